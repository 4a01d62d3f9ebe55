"""Brings objects in line with each other: pods with seats, seats with workloads, claims with ledgers.

Whatever an earlier pass, another scheduler or a crash has left half done is finished or undone here, in small steps
that each hold alone. Decides nothing about placement. The rules, and why they are safe, are in docs/kubernetes.md:

- a pod is made only where seat, status and claim say the same, read afresh;
- a place ends in this order: its pod is gone, the store says so, the status lets go, the seat is taken away;
- a seat that no status names is taken away once nothing can make it current;
- a claim without a ledger is deleted: the ledger went first;
- a pod's finalizer goes when its containers are proved to have ended. Nothing is ever deleted by force.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from openrl.scheduler.clusters import kube_ledger, kube_objects
from openrl.scheduler.clusters.kube_api import CLAIMS, LEDGERS, NODES, PODS, WORKLOADS, ApiError, KubeApi, Missing, Obj
from openrl.scheduler.clusters.kube_events import Events
from openrl.scheduler.clusters.kube_objects import CONTAINERS_OVER, POD_GONE, PREFIX
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.clusters.kube_view import OUT_OF_SERVICE, View
from openrl.scheduler.resources import Phase, Workload
from openrl.tasks.assignment import Assignments

log = logging.getLogger(__name__)

GRACE_S = 10.0
"""A seat without a status, or a ledger without a claim, may be another scheduler's work under way for so long."""
BACKOFF_S, BACKOFF_MOST_S = 2.0, 120.0
"""Before a worker that ended by itself is started again, doubled each time."""
FORGIVE_S = 600.0
"""After so long without another such end the first one is forgotten."""


class Settler:
    """One scheduler's steps. What it remembers from pass to pass only spares others' time."""

    def __init__(
        self,
        api: KubeApi,
        settings: KubeSettings,
        assignments: Assignments,
        events: Events,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._api = api
        self._settings = settings
        self._assignments = assignments
        self._events = events
        self._clock = clock
        self._first_seen: dict[str, float] = {}
        self._ended: dict[str, tuple[int, float]] = {}
        """Workload's uid -> how often its pod ended by itself, and when last."""

    def settle(self, view: View) -> bool:
        """Take every step that the view calls for; tell whether anything was done, or is left to the next pass."""
        self._assignments.begin(
            obj["status"]["assignmentID"]
            for obj in view.workloads.values()
            if self._holds(view, obj) and "deletionTimestamp" not in obj["metadata"]
        )
        steps: list[tuple[Callable[..., bool], tuple[object, ...]]] = [
            *((self._settle_pod, (view, pod)) for pod in view.pods.values()),
            *((self._settle_workload, (view, name)) for name in view.workloads),
            *((self._settle_seat, (view, ledger, seat)) for ledger, seat in view.seats()),
            *((self._settle_claim, (view, claim)) for claim in view.claims.values()),
            *((self._settle_ledger, (view, ledger)) for ledger in view.ledgers.values()),
        ]
        self._forget(view)
        num_done = sum(self._try(step, args) for step, args in steps)
        return num_done > 0

    def _try(self, step: Callable[..., bool], args: tuple[object, ...]) -> bool:
        try:
            return step(*args)
        except ApiError as failed:
            log.info("left to the next pass: %s", failed)
            return True

    def _settle_pod(self, view: View, pod: Obj) -> bool:
        """Let go of a pod whose containers have ended; ask one to go that has no place any more."""
        meta = pod["metadata"]
        is_leaving = "deletionTimestamp" in meta
        node = pod["spec"].get("nodeName", "")
        is_lost = bool(node) and view.is_gone(node) and self._is_removed(node)
        if kube_objects.has_ended(pod) or is_lost:
            return self._let_go(view, pod, is_lost=is_lost)
        if is_leaving:
            return False
        obj = view.owner(pod)
        if obj is not None and self._is_wanted(view, obj, pod):
            return False
        self._api.delete(PODS, pod)
        return True

    def _let_go(self, view: View, pod: Obj, *, is_lost: bool) -> bool:
        """Write down that a pod's containers have ended, then take the finalizer, then delete it.

        `is_lost`: its node is gone.
        """
        meta = pod["metadata"]
        if CONTAINERS_OVER in meta.get("finalizers", ()):
            self._assignments.note_pod_ended(meta["uid"])
            if is_lost or "deletionTimestamp" not in meta:
                self._note_end(view, pod, is_lost=is_lost)
            rest = [each for each in meta["finalizers"] if each != CONTAINERS_OVER]
            version = {"resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}
            self._api.merge(PODS, meta["name"], {"metadata": {**version, "finalizers": rest or None}})
        if "deletionTimestamp" not in meta:
            self._api.delete(PODS, pod)
        return True

    def _note_end(self, view: View, pod: Obj, *, is_lost: bool) -> None:
        obj = view.owner(pod)
        if obj is not None:
            uid = obj["metadata"]["uid"]
            if not is_lost:
                self._ended[uid] = (self._ended.get(uid, (0, 0.0))[0] + 1, self._clock())
            why = kube_objects.why_ended(pod, is_lost=is_lost)
            self._events.say(obj, "Failed", why, warns=True, once=pod["metadata"]["uid"])

    def _is_removed(self, node: str) -> bool:
        """Tell whether a node is gone from the API, or said to be off; one that only opted out is neither."""
        try:
            taints = self._api.get(NODES, node).get("spec", {}).get("taints") or ()
        except Missing:
            return True
        return any(taint["key"] == OUT_OF_SERVICE for taint in taints)

    def _is_wanted(self, view: View, obj: Obj, pod: Obj) -> bool:
        """Tell whether a pod is the one that its workload wants. A workload was listed after its pods."""
        status = obj.get("status", {})
        return (
            "deletionTimestamp" not in obj["metadata"]
            and view.values[obj["metadata"]["name"]].is_to_run
            and kube_objects.assignment_of(pod) == status.get("assignmentID")
            and kube_objects.process_value(pod).generation == status.get("incarnation", 0)
        )

    def _settle_workload(self, view: View, name: str) -> bool:
        obj = view.workloads[name]
        status = obj.get("status", {})
        if "deletionTimestamp" in obj["metadata"] or status.get("phase") == "Stopping":
            return self._release(view, obj)
        if not status.get("assignmentID"):
            return False
        if not self._holds(view, obj) and self._has_lost(obj):
            why = "its claim or its seat is gone"
            obj = self._move(obj, replace(view.values[name], phase="Stopping", reason=why))
            self._events.say(obj, "Lost", why, warns=True, once=status["assignmentID"])
            return True
        return self._settle_pods(view, obj)

    def _settle_pods(self, view: View, obj: Obj) -> bool:
        """Make the pod that is wanted, or write down how the one that is there does."""
        value = view.values[obj["metadata"]["name"]]
        pods = view.pods_of(obj["metadata"]["uid"])
        if not value.is_to_run:
            return False
        if not pods:
            return self._may_start(obj["metadata"]["uid"]) and self.start_pod(view, obj)
        (pod, *others) = pods
        if others or not self._is_wanted(view, obj, pod) or "deletionTimestamp" in pod["metadata"]:
            return False
        return self._report(obj, pod)

    def _may_start(self, uid: str) -> bool:
        """Tell whether a worker that has ended by itself may be started again yet."""
        times, last = self._ended.get(uid, (0, 0.0))
        return times == 0 or self._clock() >= last + min(BACKOFF_MOST_S, BACKOFF_S * 2 ** min(times - 1, 10))

    def start_pod(self, view: View, seen: Obj) -> bool:
        """Make the pod of a workload, where status, seat and claim agree afresh. One of its name may be there."""
        meta = seen["metadata"]
        obj = self._api.get(WORKLOADS, meta["name"])
        status, wanted = obj.get("status", {}), seen["status"]
        if (obj["metadata"]["uid"], status.get("assignmentID")) != (meta["uid"], wanted["assignmentID"]):
            return True
        value = kube_objects.workload_value(obj)
        if "deletionTimestamp" in obj["metadata"] or not value.is_to_run:
            return True
        if value.claim and not self._agree(obj):
            return True
        self._assignments.begin([status["assignmentID"]])
        preferred = self._preferred(view, value.claim or "")
        try:
            self._api.create(PODS, kube_objects.pod_object(obj, self._settings, preferred=preferred))
        except ApiError as refused:
            log.info("no pod for %s yet: %s", value.name, refused)
        return True

    def _agree(self, obj: Obj) -> bool:
        status, uid = obj["status"], obj["metadata"]["uid"]
        try:
            ledger = self._api.get(LEDGERS, status["claimName"])
            claim = self._api.get(CLAIMS, status["claimName"])
        except Missing:
            return False
        is_going = "deletionTimestamp" in claim["metadata"] or "deletionTimestamp" in ledger["metadata"]
        return not is_going and kube_ledger.has_seat(ledger, status["assignmentID"], uid)

    def _preferred(self, view: View, claim: str) -> tuple[tuple[str, ...], ...]:
        """Return the nodes with a free device of each size that a pending claim takes, the preferred size first."""
        if claim not in view.ledgers:
            return ()
        seen = view.claim_values[claim]
        if seen.node is not None or len(seen.tiers) < 2:
            return ()
        free = [device for device in view.devices if not device.claim]
        return tuple(
            tuple(sorted({d.node for d in free if seen.device_bytes <= d.device_bytes <= most})) for most in seen.tiers
        )

    def _report(self, obj: Obj, pod: Obj) -> bool:
        """Write how a workload's pod does into its status, where that is news."""
        status, value = obj["status"], kube_objects.workload_value(obj)
        process = kube_objects.process_value(pod)
        phase: Phase = "Running" if process.phase == "running" else "Placing"
        reason = kube_objects.why_unschedulable(pod)
        told = {
            "podName": pod["metadata"]["name"],
            "podUID": pod["metadata"]["uid"],
            "nodeName": pod["spec"].get("nodeName", ""),
            "reason": "Unschedulable" if reason else phase,
        }
        if phase == "Running":
            self._forgive(obj["metadata"]["uid"])
        if value.phase == phase and all(status.get(field) == text for field, text in told.items()):
            return False
        changed = replace(value, phase=phase, reason=reason or value.reason)
        if reason:
            self._events.say(obj, "Unschedulable", reason, warns=True, once=told["podUID"])
        elif phase == "Running" and value.phase != "Running":
            self._events.say(obj, "Running", f"{told['podName']} runs on {told['nodeName']}", once=told["podUID"])
        self._api.replace(WORKLOADS, kube_objects.with_status(obj, changed, at=self._clock(), **told), status=True)
        return True

    def _forgive(self, uid: str) -> None:
        """Forget that a worker ended by itself, once its successor has run for long."""
        if uid in self._ended and self._clock() > self._ended[uid][1] + FORGIVE_S:
            del self._ended[uid]

    def _release(self, view: View, obj: Obj) -> bool:
        """End a workload's place, step by step; a workload that is being deleted goes with it."""
        if view.pods_of(obj["metadata"]["uid"]):
            return False  # asked to go by `_settle_pod`, and waited for
        value, status = view.values[obj["metadata"]["name"]], obj.get("status", {})
        if assignment := status.get("assignmentID", ""):
            self._assignments.end(assignment)
            nowhere = {"assignmentID": "", "podName": "", "podUID": "", "nodeName": "", "reason": "Released"}
            obj = self._move(obj, replace(value, phase="Pending", claim=None), **nowhere)
            if value.claim:
                kube_ledger.rise(self._api, value.claim, assignment, at=self._clock())
        elif status.get("phase") == "Stopping":
            obj = self._move(obj, replace(value, phase="Pending", claim=None))
        if "deletionTimestamp" in obj["metadata"] and POD_GONE in obj["metadata"].get("finalizers", ()):
            self._let_workload_go(view, obj)
        return True

    def _let_workload_go(self, view: View, obj: Obj) -> None:
        """Take a workload's finalizer, once no seat of it is left anywhere."""
        meta = obj["metadata"]
        for ledger, seat in view.seats():
            if seat["workloadUID"] == meta["uid"]:
                self._assignments.end(seat["assignmentID"])
                kube_ledger.rise(self._api, ledger, seat["assignmentID"], at=self._clock())
        rest = [each for each in meta["finalizers"] if each != POD_GONE]
        version = {"resourceVersion": meta["resourceVersion"]}
        self._api.merge(WORKLOADS, meta["name"], {"metadata": {**version, "finalizers": rest or None}})

    def _settle_seat(self, view: View, ledger: str, seat: Obj) -> bool:
        """Take away a seat that is nobody's place, and can't become one."""
        assignment, uid = seat["assignmentID"], seat["workloadUID"]
        if assignment in view.places_of_pods:
            return False
        obj = view.workloads.get(seat["workload"])
        if obj is not None and obj["metadata"]["uid"] == uid:
            current = obj.get("status", {}).get("assignmentID", "")
            if current == assignment:
                return False
            if not current:
                if not self._is_old(f"seat {assignment}"):
                    return False
                self._fence(obj, assignment)
        elif not self._is_old(f"seat {assignment}"):
            return False
        self._assignments.end(assignment)
        return kube_ledger.rise(self._api, ledger, assignment, at=self._clock())

    def _fence(self, obj: Obj, assignment: str) -> None:
        """Change the workload, so that whoever wrote the seat and is late can't make it current (compare and swap)."""
        meta = obj["metadata"]
        patch = {"resourceVersion": meta["resourceVersion"], "annotations": {f"{PREFIX}fenced": assignment}}
        self._api.merge(WORKLOADS, meta["name"], {"metadata": patch})

    def _settle_claim(self, view: View, claim: Obj) -> bool:
        """Delete a claim whose ledger is gone; write down in the ledger where a claim lies."""
        meta = claim["metadata"]
        ledger = view.ledgers.get(meta["name"])
        is_its_own = ledger is not None and ledger["metadata"]["uid"] in {
            each["uid"] for each in meta.get("ownerReferences", ())
        }
        if ledger is None or not is_its_own:
            if "deletionTimestamp" in meta:
                return False
            self._api.delete(CLAIMS, claim)
            return True
        return self._report_claim(view, claim, ledger)

    def _report_claim(self, view: View, claim: Obj, ledger: Obj) -> bool:
        node = view.node_of(claim)
        if not node or "deletionTimestamp" in ledger["metadata"]:
            return False
        devices = view.devices_of.get(claim["metadata"]["name"])
        if not devices:
            return False
        status = {
            "nodeName": node,
            "devices": len(devices),
            "memoryPerDevice": kube_objects.quantity(min(device.device_bytes for device in devices)),
        }
        if ledger.get("status", {}) == status:
            return False
        told = {key: ledger[key] for key in ("apiVersion", "kind")} | {
            "metadata": {"name": ledger["metadata"]["name"], "uid": ledger["metadata"]["uid"]},
            "status": status,
        }
        self._api.apply(LEDGERS, told, status=True)
        return True

    def _settle_ledger(self, view: View, ledger: Obj) -> bool:
        """Delete a ledger whose claim is gone or going, once it is empty: nobody gets a seat there any more."""
        name = ledger["metadata"]["name"]
        claim = view.claims.get(name)
        if claim is not None and "deletionTimestamp" not in claim["metadata"]:
            return False
        if ledger["spec"].get("seats") or (claim is None and not self._is_old(f"ledger {ledger['metadata']['uid']}")):
            return False
        kube_ledger.drop(self._api, ledger, None)
        return True

    def _holds(self, view: View, obj: Obj) -> bool:
        """Tell whether a workload's place is as its status says, as far as the view goes."""
        status = obj.get("status", {})
        if not status.get("assignmentID"):
            return False
        if not status.get("claimName"):
            return not self._settings.device_class
        claim = view.claims.get(status["claimName"])
        ledger = view.ledgers.get(status["claimName"])
        is_there = claim is not None and "deletionTimestamp" not in claim["metadata"]
        return is_there and kube_ledger.has_seat(ledger, status["assignmentID"], obj["metadata"]["uid"])

    def _has_lost(self, obj: Obj) -> bool:
        """Tell the same afresh, since claims and ledgers were listed before the workload."""
        return not obj["status"].get("claimName") or not self._agree(obj)

    def _move(self, obj: Obj, value: Workload, **more: str) -> Obj:
        return self._api.replace(WORKLOADS, kube_objects.with_status(obj, value, at=self._clock(), **more), status=True)

    def _is_old(self, what: str) -> bool:
        """Tell whether something odd has stood for longer than any scheduler takes for its next call."""
        return self._clock() >= self._first_seen.setdefault(what, self._clock()) + GRACE_S

    def _forget(self, view: View) -> None:
        """Forget what is gone."""
        uids = {obj["metadata"]["uid"] for obj in view.workloads.values()}
        self._ended = {uid: each for uid, each in self._ended.items() if uid in uids}
        odd = {f"seat {seat['assignmentID']}" for _, seat in view.seats()}
        odd |= {f"ledger {ledger['metadata']['uid']}" for ledger in view.ledgers.values()}
        self._first_seen = {what: since for what, since in self._first_seen.items() if what in odd}
