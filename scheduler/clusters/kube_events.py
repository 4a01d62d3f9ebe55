"""What happens to a workload, said as Kubernetes Events: what `kubectl describe` shows at its end.

Only said, never read: no decision depends on an event, and one that can't be written is left out. The same thing said
twice is one object, by its name; the API server forgets events after a while (an hour by default).
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable

from openrl.scheduler.clusters.kube_api import EVENTS, MANAGER, ApiError, Conflict, KubeApi, Obj
from openrl.scheduler.clusters.kube_conditions import stamp
from openrl.scheduler.resources import Action, Workload

log = logging.getLogger(__name__)

MOST = 1024
"""Characters of a message that the API server takes."""


class Events:
    """The events of one scheduler's namespace. `clock` returns seconds since the epoch."""

    def __init__(self, api: KubeApi, clock: Callable[[], float]) -> None:
        self._api = api
        self._clock = clock
        self._instance = f"{MANAGER}-{uuid.uuid4().hex[:8]}"

    def decided(self, action: Action, obj: Obj) -> None:
        """Say what a decision that was carried out did to a workload."""
        if (reason := _reason(action)) is not None:
            self.say(obj, reason, action.reason)

    def say(self, obj: Obj, reason: str, message: str, *, warns: bool = False, once: str = "") -> None:
        """Say something about a workload. `once`: what tells it from the same words about another of its pods."""
        meta = obj["metadata"]
        digest = hashlib.sha256("\0".join((meta["uid"], reason, message, once)).encode()).hexdigest()[:16]
        now = stamp(self._clock())
        event = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.name,
            "metadata": {"name": f"{meta['name']}.{digest}", "namespace": self._api.namespace},
            "involvedObject": {
                "apiVersion": obj["apiVersion"],
                "kind": obj["kind"],
                "namespace": self._api.namespace,
                "name": meta["name"],
                "uid": meta["uid"],
            },
            "type": "Warning" if warns else "Normal",
            "reason": reason,
            "message": message[:MOST],
            "source": {"component": MANAGER},
            "reportingComponent": MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        try:
            self._api.create(EVENTS, event)
        except Conflict:
            return  # it was said
        except ApiError as failed:
            log.info("left unsaid, %s of %s: %s", reason, meta["name"], failed)


def _reason(action: Action) -> str | None:
    """Return the one word for what was done, None for what only the pod shows."""
    after: Workload | None = action.after
    match action.verb:
        case "start" | "place" if after is not None and after.phase == "Reserved":
            return "Reserved"
        case "start" | "place" if after is not None and after.claim is not None:
            return "Placed"
        case "start" if after is not None and after.phase != "Pending":
            return "Started"
        case "start" | "note":
            return "Waiting"
        case "wake":
            return "Woken"
        case "release":
            return "Released"
        case "replace":
            return "Replaced"
        case "stop":
            return "Preempted" if action.gives_way_to else "Stopped"
        case _:
            return None
