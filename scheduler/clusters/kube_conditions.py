"""What a workload's status says by condition, as `kubectl describe` and `kubectl wait` read it: pure.

`Placed`: it has a seat at a claim, or needs none. `Ready`: its pod runs. A condition's time is when it last turned.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

from openrl.scheduler.clusters.kube_api import Obj
from openrl.scheduler.resources import Workload

WAITING = {"Pending": "Waiting", "Stopping": "Leaving", "Reserved": "Reserved", "Placing": "Starting"}
"""Why a workload isn't ready, by its phase; the words are in the message."""


def conditions(old: Obj, workload: Workload, *, assignment: str, reason: str, generation: int, at: float) -> list[Obj]:
    """Return the conditions of a workload. `old`: its status so far; `reason`: of a pod that can't be scheduled."""
    before = {each["type"]: each for each in old.get("conditions") or ()}
    is_placed, is_ready = bool(assignment), workload.phase == "Running"
    waiting = WAITING.get(workload.phase, workload.phase)
    told = {
        "Placed": (is_placed, "Placed" if is_placed else waiting),
        "Ready": (is_ready, "Running" if is_ready else reason if reason == "Unschedulable" else waiting),
    }
    return [
        _condition(kind, before.get(kind, {}), is_so, why, workload.reason, generation, at)
        for kind, (is_so, why) in told.items()
    ]


def _condition(
    kind: str, before: Mapping[str, object], is_so: bool, reason: str, message: str, generation: int, at: float
) -> Obj:
    status = "True" if is_so else "False"
    turned = before.get("lastTransitionTime") if before.get("status") == status else None
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message[:4096],
        "lastTransitionTime": turned or stamp(at),
        "observedGeneration": generation,
    }


def stamp(at: float) -> str:
    """Return seconds since the epoch as Kubernetes writes times."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
