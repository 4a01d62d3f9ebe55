"""Workloads as pods of a Kubernetes cluster, on accelerators that ResourceClaims hold (DRA, resource.k8s.io/v1).

`observe` lists, `apply` carries out what was decided and then lets `kube_settle` bring all objects in line. A place is
given in three steps, each a compare-and-swap that another scheduler may win: a provisional seat in the claim's ledger,
its id in the workload's status, then the pod. Correct without a lock or a leader; docs/kubernetes.md says why.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openrl.scheduler.clusters import kube_ledger
from openrl.scheduler.clusters.kube_api import WORKLOADS, ApiError, Conflict, KubeApi, Obj
from openrl.scheduler.clusters.kube_events import Events
from openrl.scheduler.clusters.kube_objects import object_name, with_status, workload_object
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.clusters.kube_settle import Settler
from openrl.scheduler.clusters.kube_view import View
from openrl.scheduler.clusters.kube_watch import Watcher
from openrl.scheduler.resources import Action, Claim, Seen, Workload
from openrl.tasks.assignment import Assignments
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

LOOK_S = 10.0
"""How old a look may be though nothing is heard of a change."""


def connect(
    store: Store, environ: Mapping[str, str], *, on_change: Callable[[], None]
) -> tuple[KubernetesCluster, str]:
    """Return the cluster that the environment names, watched, and the version of its workers.

    Raises:
        ValueError: a setting makes no sense, or no cluster is found.
    """
    settings = KubeSettings.from_env(environ)
    api = KubeApi.connect(settings.namespace, kubeconfig=settings.kubeconfig)
    watcher = Watcher(api, on_change)
    watcher.start()
    return KubernetesCluster(api, settings, Assignments(store), watcher=watcher), settings.version


class KubernetesCluster:
    """The workers of one namespace. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        api: KubeApi,
        settings: KubeSettings,
        assignments: Assignments,
        *,
        watcher: Watcher | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._settings = settings
        self._assignments = assignments
        self._clock = clock
        self._events = Events(api, clock)
        self._settler = Settler(api, settings, assignments, self._events, clock=clock)
        self._watcher = watcher
        self._view: View | None = None
        self._looked = float("-inf")
        self._is_settled = False
        """Whether the last pass found everything in line."""

    def observe(self) -> Seen:
        """Return what is there now; a look is kept while nothing changes. Raises ApiError where nobody answers."""
        may_have_changed = self._watcher is None or self._watcher.take_changed()
        if self._view is None or may_have_changed or not self._is_settled or self._clock() >= self._looked + LOOK_S:
            self._view = None
            self._looked = self._clock()
            self._view = View.take(self._api, self._settings)
        return self._view.seen

    def apply(self, actions: Sequence[Action]) -> set[str]:
        """Carry out the actions in their order, then bring everything in line; return the names of what changed."""
        view = self._view or View.take(self._api, self._settings)
        changed: set[str] = set()
        refused: set[str] = set()
        for action in actions:
            if action.name in refused:
                continue
            try:
                self._do(view, action, frozenset(changed))
                changed.add(action.name)
            except ApiError as failed:
                log.info("%s %s: not now: %s", action.verb, action.name, failed)
                refused.add(action.name)
        was_still = not self._settler.settle(view)
        self._is_settled = was_still and not changed and not refused
        return changed

    def _do(self, view: View, action: Action, changed: frozenset[str]) -> None:
        match action.verb:
            case "claim":
                kube_ledger.make(self._api, _claim(action), self._settings)
            case "drop":
                self._drop(view, _claim(action))
            case "start":
                self._start(view, action, changed)
            case "place":
                obj = self._as_seen(view, action)
                self._place(view, obj, _after(action), action.claim, changed)
                self._events.decided(action, obj)
            case "stop":
                obj = self._as_seen(view, action)
                self._api.delete(WORKLOADS, obj, unchanged=True)
                self._events.decided(action, obj)
            case "release":
                obj = self._as_seen(view, action)
                # The claim stays written down until the seat is free.
                phased = replace(_after(action), claim=_workload(action).claim, phase="Stopping", reason=action.reason)
                self._events.decided(action, self._write(obj, phased))
            case "wake" | "replace" | "note":
                obj = self._as_seen(view, action)
                self._events.decided(action, self._write(obj, replace(_after(action), reason=action.reason)))

    def _start(self, view: View, action: Action, changed: frozenset[str]) -> None:
        """Want a worker that was not wanted; with a claim named, give it its seat at once."""
        after = action.after or _workload(action)
        obj = self._api.create(WORKLOADS, workload_object(after, self._settings))
        if after.claim is None and self._settings.device_class:
            self._write(obj, replace(after, phase="Pending", reason=action.reason))
        else:
            self._place(view, obj, after, action.claim, changed)
        self._events.decided(action, obj)

    def _place(self, view: View, obj: Obj, after: Workload, claim: Claim | None, changed: frozenset[str]) -> None:
        """Give a workload a place: seat, status, pod. `obj`: as it was read before, without a place."""
        if obj.get("status", {}).get("assignmentID"):
            raise Conflict(f"{after.name} has a place already")
        uid = obj["metadata"]["uid"]
        if after.claim is None:
            assignment = kube_ledger.new_assignment()
        else:
            mates = frozenset(seat.workload for seat in claim.seats) if claim else frozenset()
            assignment = kube_ledger.sit(self._api, after, uid, after.claim, mates=mates | changed)
        try:
            placed = self._write(obj, after, assignmentID=assignment, reason="Placing")
        except Conflict:
            # Nobody else makes this seat current, so it may go at once.
            if after.claim is not None:
                kube_ledger.rise(self._api, after.claim, assignment, at=self._clock())
            raise
        if after.is_to_run:
            self._settler.start_pod(view, placed)

    def _drop(self, view: View, claim: Claim) -> None:
        ledger = view.ledgers.get(claim.name)
        if ledger is None or ledger["metadata"]["resourceVersion"] != claim.revision:
            raise Conflict(f"claim {claim.name} is not as it was seen")
        kube_ledger.drop(self._api, ledger, view.claims.get(claim.name))

    def _as_seen(self, view: View, action: Action) -> Obj:
        """Return a workload's object, if it is what the decision was made on."""
        workload = _workload(action)
        name = object_name(workload.name)
        if view.values.get(name) != workload:
            raise Conflict(f"workload {workload.name} is not as it was seen")
        return view.workloads[name]

    def _write(self, obj: Obj, workload: Workload, **more: str) -> Obj:
        return self._api.replace(WORKLOADS, with_status(obj, workload, at=self._clock(), **more), status=True)


def _workload(action: Action) -> Workload:
    assert action.workload is not None, action
    return action.workload


def _after(action: Action) -> Workload:
    assert action.after is not None, action
    return action.after


def _claim(action: Action) -> Claim:
    assert action.claim is not None, action
    return action.claim
