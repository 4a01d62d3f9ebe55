"""A cluster in memory that takes its time: claims are allocated, pods start and end, nodes come, each after a while.

What the real ones do to a decision, with a clock that is set: first fit of claims on devices, pods of an unallocated
claim that can't be scheduled, seats that are free once their pod is gone, an autoscaler that adds a node for what has
stood long enough. Drives the simulator and the tests that walk random histories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from openrl.scheduler.resources import Action, Claim, Device, Node, Process, Seat, Seen, Workload
from openrl.scheduler.trace import GIB, Latencies, Machines


@dataclass(slots=True)
class _Pod:
    workload: str
    claim: str
    generation: int
    state: Literal["pending", "starting", "running", "leaving"] = "pending"
    due: float = 0.0
    version: str = ""
    since: float = 0.0


@dataclass(slots=True)
class _Claim:
    claim: Claim
    device: str | None = None
    due: float = 0.0
    seats: dict[str, Seat] = field(default_factory=dict)
    revision: int = 0

    def seen(self) -> Claim:
        return replace(self.claim, seats=tuple(self.seats.values()), revision=str(self.revision))


class SimulatedCluster:
    """Nodes of some kinds, and what runs on them. `now` is the caller's to set by `advance`."""

    def __init__(self, machines: Sequence[Machines] = (), latencies: Latencies | None = None) -> None:
        self.now = 0.0
        self._latencies = latencies or Latencies()
        self._machines = {each.name: each for each in machines}
        self.nodes: dict[str, Node] = {}
        self.devices: dict[str, Device] = {}
        self._made = 0
        self._of_kind = dict.fromkeys(self._machines, 0)
        self._coming: list[tuple[float, str]] = []
        self.claims: dict[str, _Claim] = {}
        self.workloads: dict[str, Workload] = {}
        self.pods: dict[str, _Pod] = {}
        self._removed: set[str] = set()
        for each in machines:
            for _ in range(each.count):
                self._of_kind[each.name] += 1
                self._add_node(each)

    # What the scheduler sees and does

    def observe(self) -> Seen:
        """Return what is there now."""
        return Seen(
            nodes=tuple(self.nodes.values()),
            devices=tuple(self.devices.values()),
            claims=tuple(each.seen() for each in self.claims.values()),
            workloads=tuple(self.workloads.values()),
            processes={name: self._process(pod) for name, pod in self.pods.items()},
            has_claims=True,
            can_claim=True,
        )

    def apply(self, actions: Sequence[Action]) -> set[str]:
        """Carry out the actions; each is refused where what it was decided on has changed."""
        changed, refused = set(), set()
        revisions = {name: str(each.revision) for name, each in self.claims.items()}
        for action in actions:
            if action.name in refused:
                continue
            if self._change(action, revisions):
                changed.add(action.name)
            else:
                refused.add(action.name)
        return changed

    def _change(self, action: Action, revisions: dict[str, str]) -> bool:
        if action.verb == "claim":
            return self._make(action)
        if action.verb == "drop":
            return self._drop(action)
        seen, after = action.workload, action.after
        assert seen is not None
        if action.verb == "start":
            if seen.name in self.workloads or seen.name in self.pods:
                return False
        elif self.workloads.get(seen.name) != seen:
            return False
        sits = after is not None and after.claim is not None and (action.verb == "start" or after.claim != seen.claim)
        if sits and not self._seat(after, action, revisions):
            return False
        if action.verb in ("stop", "release"):
            self._leave(seen, forget=action.verb == "stop", after=after)
            return True
        assert after is not None
        self.workloads[seen.name] = after
        if action.verb == "replace" and (pod := self.pods.get(seen.name)):
            self._end(pod)
        return True

    def _make(self, action: Action) -> bool:
        claim = action.claim
        assert claim is not None
        if claim.name in self.claims:
            return False
        self.claims[claim.name] = _Claim(replace(claim, since=self.now))
        return True

    def _drop(self, action: Action) -> bool:
        assert action.claim is not None
        there = self.claims.get(action.claim.name)
        if there is None or there.seats:
            return False
        self._free(there)
        del self.claims[action.claim.name]
        return True

    def _seat(self, workload: Workload | None, action: Action, revisions: dict[str, str]) -> bool:
        """Write the seat into the claim's ledger, where nobody has changed it since it was seen."""
        assert workload is not None and workload.claim is not None and action.claim is not None
        there = self.claims.get(workload.claim)
        known = revisions.get(workload.claim)
        if there is None or (known is not None and known != action.claim.revision):
            return False
        there.seats[workload.name] = workload.seat
        there.revision += 1
        return True

    def _leave(self, workload: Workload, *, forget: bool, after: Workload | None) -> None:
        pod = self.pods.get(workload.name)
        if pod is not None:
            self._end(pod)
            phase = replace(after or workload, claim=workload.claim, phase="Stopping", placed=workload.placed)
            self.workloads[workload.name] = phase
            if forget:
                self._removed.add(workload.name)
            return
        self._unseat(workload.name, workload.claim)
        if forget or after is None:
            del self.workloads[workload.name]
        else:
            self.workloads[workload.name] = after

    # What time does

    def advance(self, now: float) -> None:
        """Let the time pass until `now`."""
        self.now = now
        self._nodes_come()
        self._pods_end()
        self._pods_begin()
        self._claims_allocated()
        self._nodes_asked_for()

    def lose_node(self, name: str) -> None:
        """Take a node away with all that runs there; its claims stay allocated to it until they are dropped."""
        self.nodes.pop(name, None)
        for device in [each for each in self.devices.values() if each.node == name]:
            del self.devices[device.name]
        for pod in list(self.pods.values()):
            if (claim := self.claims.get(pod.claim)) and claim.claim.node == name:
                self._gone(pod)

    def evict(self, workload: str) -> None:
        """End a pod behind the scheduler's back."""
        if workload in self.pods:
            self._gone(self.pods[workload])

    def delete_claim(self, name: str) -> None:
        """Delete a claim behind the scheduler's back: it goes once nobody uses it."""
        if name in self.claims:
            there = self.claims[name]
            there.claim = replace(there.claim, deleting=True)
            self._forget_if_unused(there)

    def is_running(self, workload: str) -> bool:
        """Tell whether its pod runs."""
        pod = self.pods.get(workload)
        return pod is not None and pod.state == "running"

    def moves(self) -> bool:
        """Tell whether something will still happen by itself."""
        return bool(self._coming) or any(pod.state in ("starting", "leaving", "running") for pod in self.pods.values())

    def is_changing(self) -> bool:
        """Tell whether a pod starts or ends, or a node comes."""
        return bool(self._coming) or any(pod.state in ("starting", "leaving") for pod in self.pods.values())

    def _process(self, pod: _Pod) -> Process:
        claim = self.claims.get(pod.claim)
        waits = pod.state == "pending" and (claim is None or claim.claim.node is None)
        return Process(
            generation=pod.generation,
            phase="running" if pod.state in ("running", "leaving") else "pending",
            leaving=pod.state == "leaving",
            unschedulable=waits,
            version=pod.version,
            unschedulable_since=pod.since,
            started=pod.since,
        )

    def _end(self, pod: _Pod) -> None:
        if pod.state != "leaving":
            # One that never ran has nothing to hand back.
            quick = pod.state == "pending"
            pod.state, pod.due = "leaving", self.now + (0.0 if quick else self._latencies.stop_s)

    def _pods_end(self) -> None:
        for pod in [each for each in self.pods.values() if each.state == "leaving" and each.due <= self.now]:
            self._gone(pod)

    def _gone(self, pod: _Pod) -> None:
        del self.pods[pod.workload]
        workload = self.workloads.get(pod.workload)
        if workload is None or workload.phase != "Stopping":
            return
        self._unseat(workload.name, workload.claim)
        if workload.name in self._removed:
            self._removed.discard(workload.name)
            del self.workloads[workload.name]
        else:
            self.workloads[workload.name] = replace(workload, claim=None, phase="Pending")

    def _unseat(self, name: str, claim: str | None) -> None:
        there = self.claims.get(claim) if claim is not None else None
        if there is None or name not in there.seats:
            return
        del there.seats[name]
        there.revision += 1
        there.claim = replace(there.claim, since=self.now)
        self._forget_if_unused(there)

    def _forget_if_unused(self, there: _Claim) -> None:
        if there.claim.deleting and not there.seats:
            self._free(there)
            del self.claims[there.claim.name]

    def _pods_begin(self) -> None:
        for workload in self.workloads.values():
            if not workload.is_to_run or workload.claim is None:
                continue
            pod = self.pods.get(workload.name)
            if pod is None:
                self.pods[workload.name] = _Pod(
                    workload.name, workload.claim, workload.generation, version=workload.version, since=self.now
                )
            elif pod.state == "pending" and (claim := self.claims.get(pod.claim)) and claim.claim.node is not None:
                if claim.claim.node in self.nodes:
                    pod.state, pod.due = "starting", self.now + self._latencies.start_s
            elif pod.state == "starting" and pod.due <= self.now:
                pod.state = "running"

    def _claims_allocated(self) -> None:
        """Allocate what pods wait for: the first tier that has a device, first fit, where the node has memory too."""
        waiting = [each for each in self.claims.values() if each.claim.node is None and not each.claim.deleting]
        if not waiting:
            return
        free = [each for each in self.devices.values() if not each.claim]
        left = self._host_left()
        for each in waiting:
            if not any(name in self.pods for name in each.seats):
                continue
            wanted = sum(seat.host_bytes for seat in each.seats.values())
            if (device := self._fitting(each.claim, wanted, free, left)) is not None:
                free.remove(device)
                left[device.node] -= wanted
                each.device = device.name
                each.claim = replace(each.claim, node=device.node, device_bytes=device.device_bytes)
                self.devices[device.name] = replace(device, claim=each.claim.name)

    def _fitting(self, claim: Claim, host_bytes: int, free: list[Device], left: dict[str, float]) -> Device | None:
        for most in claim.tiers or (1 << 62,):
            for device in free:
                fits = claim.device_bytes <= device.device_bytes <= most
                if fits and left[device.node] >= host_bytes:
                    return device
        return None

    def _host_left(self) -> dict[str, float]:
        left = {name: float(node.host_bytes or 1 << 62) for name, node in self.nodes.items()}
        for each in self.claims.values():
            if each.claim.node in left:
                left[each.claim.node] -= sum(seat.host_bytes for seat in each.seats.values())
        return left

    def _free(self, there: _Claim) -> None:
        device = self.devices.get(there.device) if there.device else None
        if device is not None:
            self.devices[device.name] = replace(device, claim="")

    # The autoscaler

    def _nodes_asked_for(self) -> None:
        """Ask for a node for each claim that stands with a pod, beyond those that come already."""
        standing = [
            each.claim for each in self.claims.values()
            if each.claim.node is None and any(name in self.pods for name in each.seats)
        ]  # fmt: skip
        room = sum(self._machines[name].devices for _, name in self._coming)
        for claim in standing[room:]:
            kind = self._kind_for(claim)
            if kind is not None:
                self._of_kind[kind.name] += 1
                self._coming.append((self.now + self._latencies.node_s, kind.name))
                room += kind.devices

    def _kind_for(self, claim: Claim) -> Machines | None:
        """Return the smallest kind of node that would do and may still grow."""
        fitting = [
            each for each in self._machines.values()
            if self._of_kind[each.name] < each.most and each.device_gib * GIB >= claim.device_bytes
        ]  # fmt: skip
        return min(fitting, key=lambda each: (each.device_gib, each.name), default=None)

    def _nodes_come(self) -> None:
        for due, name in [each for each in self._coming if each[0] <= self.now]:
            self._coming.remove((due, name))
            self._add_node(self._machines[name])

    def _add_node(self, machines: Machines) -> None:
        self._made += 1
        name = f"{machines.name}-{self._made}"
        self.nodes[name] = Node(name=name, host_bytes=int(machines.host_gib * GIB))
        for index in range(machines.devices):
            device = f"{name}.{index}"
            self.devices[device] = Device(name=device, node=name, device_bytes=int(machines.device_gib * GIB))
