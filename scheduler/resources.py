"""What the scheduler reasons about, as values: pools and their demand, nodes, devices, claims, seats, workloads.

Knows neither Redis nor processes nor Kubernetes. Times are seconds since the epoch, on the scheduler's own clock
where it compares them; sizes are bytes. A size of 0 that something needs means that it isn't known and bounds nothing;
a size of 0 that something has (`Node.host_bytes`, `Claim.device_bytes`) means the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, Self

from openrl.tasks import keys
from openrl.tasks.schema import WORKLOAD

Kind = Literal["trainer", "sampler"]
ProcessPhase = Literal["pending", "running", "ended"]
KINDS: tuple[Kind, ...] = ("trainer", "sampler")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pool:
    """All workers of one kind for one base model, or for one run that is fine-tuned in full.

    `base` is the model's name; `slug` what queues and workers go by: the base's short form, or the run's own.
    """

    slug: str
    kind: Kind
    base: str

    @property
    def is_full(self) -> bool:
        """Tell whether it serves one run that is fine-tuned in full."""
        return keys.is_full(self.slug)

    @property
    def workload_name(self) -> str:
        """Return the name of the pool's first workload: the same whoever decides, so that two deciders agree."""
        return self.replica_name(0)

    def replica_name(self, number: int) -> str:
        """Return the name of the pool's workload of this number, from 0 on."""
        return f"{self.kind}-{self.slug}" if not number else f"{self.kind}-{self.slug}-{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a pool has before it: operations acknowledged and not finished, and the age of the oldest.

    `tenants`: how many of them are whose; empty where nobody counted.
    """

    depth: int = 0
    oldest_s: float = 0.0
    tenants: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one worker of a pool takes, and how it may be placed. `owner`: the tenant who has it to himself, or "".

    `device_bytes`: the most that it has on an accelerator in its turn. `host_bytes`: the most of its node's memory,
    what it parks there included. `exclusive`: it shares its accelerator with nobody. A higher `priority` is served
    first.
    """

    device_bytes: int = 0
    host_bytes: int = 0
    exclusive: bool = False
    priority: int = 0
    owner: str = ""
    words: str = ""
    """How the sizes come about, for an operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A live worker: its lease stands. `last_busy`: when it last computed something, 0 if never."""

    worker_id: str
    kind: str
    slug: str
    state: str
    started: float
    last_busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What runs for a workload: a process of this machine (`pid`) or a pod, of this generation of its workload.

    `phase` is `running` for a process of this machine. `leaving`: it was asked to end. `unschedulable`: a pod that no
    node has room for now, and `unschedulable_since` since when, 0 meaning for long. `version`: what code it runs, ""
    where that isn't told. `started`: when a pod's container started, which tells its signs of life from those of the
    pod before; a process of this machine has its pid for that.
    """

    pid: int = 0
    generation: int
    phase: ProcessPhase = "running"
    leaving: bool = False
    unschedulable: bool = False
    version: str = ""
    unschedulable_since: float = 0.0
    started: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The last sign of life of a worker that did not end its lease itself: who gave it, and when."""

    pid: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine that takes workers of these kinds. `host_bytes`: its memory for them, all together.

    `ready`: it answers; what has a place on one that doesn't is placed anew. `takes_new`: one that is cordoned doesn't,
    and keeps what it has.
    """

    name: str
    host_bytes: int = 0
    kinds: frozenset[Kind] = frozenset(KINDS)
    ready: bool = True
    takes_new: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator of a node that claims can be allocated on. `claim`: the one that has it now, "" if none."""

    name: str
    node: str
    device_bytes: int
    claim: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A worker's place at a claim, as the claim's ledger has it. The ledger, not the pod, is what is counted."""

    workload: str
    assignment: str = ""
    uid: str = ""
    owner: str = ""
    exclusive: bool = False
    device_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim on one accelerator, and the ledger of its seats.

    `node`: where it is allocated, None while it is pending. `device_bytes`: of the device once allocated, before that
    the least that was asked for. `tiers`: the sizes of device that it takes, the preferred one first. `fixed`: it is a
    device of this machine, neither made nor dropped. `revision`: of the ledger, for whoever changes it (compare and
    swap). `since`: when it was made, or last had a seat.
    """

    name: str
    node: str | None = None
    device_bytes: int = 0
    tiers: tuple[int, ...] = ()
    seats: tuple[Seat, ...] = ()
    deleting: bool = False
    fixed: bool = False
    revision: str = ""
    since: float = 0.0

    @property
    def is_allocated(self) -> bool:
        """Tell whether others may join: it lies on a node and isn't about to go."""
        return self.node is not None and not self.deleting


UNCLAIMED = "*"
"""What `Workload.avoids` says of all devices that have no claim: those that look free weren't to be had."""

Phase = Literal["Pending", "Reserved", "Placing", "Running", "Stopping", "Succeeded", "Failed"]
"""Pending: it waits for a seat. Reserved: a seat that is kept for a process which nobody needs yet. Placing: its
process is to run. The others are a driver's own words for what became of that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A worker that is wanted. `since`: wanted since.

    A process of an older `generation` is not wanted any more: it is ended, and a fresh one takes its place. `claim`:
    the one that it has a seat at; None on the CPU, and while it waits for a place. `placed`: how often it was given a
    place. `avoids`: a node that had no room for its pod though it had a seat there, or UNCLAIMED; it isn't placed there
    again for a while after `since`. `phase` and `reason` say how it is, for an operator.
    """

    name: str
    kind: Kind
    base: str
    slug: str
    since: float
    generation: int = 0
    claim: str | None = None
    need: Need = Need()
    placed: int = 0
    version: str = ""
    phase: Phase = "Placing"
    reason: str = ""
    avoids: str = ""

    @property
    def pool(self) -> Pool:
        """Return the pool that it serves."""
        return Pool(slug=self.slug, kind=self.kind, base=self.base)

    @property
    def accelerator(self) -> int | None:
        """Return the index of its device on this machine, None without one."""
        return None if self.claim is None else int(self.claim.rpartition("-")[2])

    @property
    def is_to_run(self) -> bool:
        """Tell whether a process is wanted for it now."""
        return self.phase in ("Placing", "Running")

    @property
    def assignment(self) -> str:
        """Return the id of its present place: another for every place that it was ever given. "" without a place."""
        return f"{self.name}.{self.placed}.{self.claim}" if self.claim is not None else ""

    @property
    def seat(self) -> Seat:
        """Return the seat that it takes."""
        return Seat(
            workload=self.name,
            assignment=self.assignment,
            owner=self.need.owner,
            exclusive=self.need.exclusive,
            device_bytes=self.need.device_bytes,
            host_bytes=self.need.host_bytes,
        )

    def to_json(self) -> str:
        """Return the one canonical text of this workload."""
        return json.dumps(WORKLOAD.numbered(asdict(self)), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild the workload that `to_json` wrote."""
        row: dict[str, Any] = WORKLOAD.current(json.loads(text))
        return cls(**{**row, "need": Need(**row.get("need", {}))})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a tenant may have at once, and its share where there isn't enough for all.

    `seats`: workers of runs that it has to itself, None for no bound. `weight`: its share beside others'.
    """

    seats: int | None = None
    weight: float = 1.0


Strategy = Literal["spread", "binpack"]
"""spread: a free accelerator first, then the one with the fewest seats. binpack: one with seats first, on the node
with the least memory left that suffices, then a free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What an operator decides about placement.

    `tiers`: sizes of device that new claims may ask for, ascending, empty for any; `tier_host_bytes`: what a node of
    the autoscaler has for each of its claims. `residue_bytes`: what a parked worker still has on the device.
    `patience_s`: after so long a wait the next room is kept for it. `preempt_idle_s`: so long idle, a worker gives way
    to one that waits. `drop_s`: a claim without seats goes after this. `surge`: workers replaced at once in an upgrade.
    `unschedulable_s`: a pod that no node takes for so long, though by our books one would, shows that the books are
    wrong. `avoid_s`: so long it then isn't placed on that node.
    """

    strategy: Strategy = "spread"
    idle_timeout_s: float = 900.0
    tiers: tuple[int, ...] = ()
    tier_host_bytes: int = 0
    residue_bytes: int = 0
    most_seats: int = 64
    most_pending: int = 64
    patience_s: float = 300.0
    preempt_idle_s: float = 15.0
    migrate_idle_s: float = 120.0
    drop_s: float = 30.0
    unschedulable_s: float = 30.0
    avoid_s: float = 600.0
    sampler_replicas: int = 1
    replica_depth: int = 256
    surge: int = 1
    version: str = ""
    limits: Mapping[str, Limit] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What one cluster shows: machines, claims with their seats, workloads, what runs for them (by workload's name).

    `has_claims`: False where workers share the CPU and are placed nowhere. `can_claim`: new claims can be made.
    """

    nodes: tuple[Node, ...] = ()
    devices: tuple[Device, ...] = ()
    claims: tuple[Claim, ...] = ()
    workloads: tuple[Workload, ...] = ()
    processes: Mapping[str, Process] = field(default_factory=dict)
    has_claims: bool = False
    can_claim: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a decision may depend on.

    `demand` holds every served pool. `signs` are by workload; `watched_since`: since when the scheduler has looked at
    the store without a long break. `needs`: what a worker of a pool takes; a pool that isn't there takes nothing known.
    """

    now: float
    demand: Mapping[Pool, Demand]
    seen: Seen = Seen()
    needs: Mapping[Pool, Need] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    signs: Mapping[str, Sign] = field(default_factory=dict)
    watched_since: float = 0.0
    lease_s: float = 30.0
    policy: Policy = Policy()


Verb = Literal["start", "place", "wake", "release", "stop", "replace", "claim", "drop", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One change about one object, and why, in words for an operator.

    About `workload`, the one that was seen, for a start the new one; `after` is what becomes of it, None for a stop:
    start    it is wanted; where it names a claim, it has a seat there from the first moment
    place    it waited, and has a seat at `after.claim`
    wake     its reserved seat gets its process
    release  its process ends, then its seat is free; it is still wanted, and waits for another place
    stop     it is wanted no more: its process ends, its seat is free, it is forgotten
    replace  its process ends, a fresh one takes its place in the same seat; its generation is one up
    note     nothing changes but its `reason`
    About `claim`: claim (make it, pending, with an empty ledger), drop (its ledger goes, then itself).
    An action is refused where what was seen has changed meanwhile, and the later ones of its workload with it.
    """

    verb: Verb
    reason: str
    workload: Workload | None = None
    after: Workload | None = None
    claim: Claim | None = None
    """For claim and drop what they are about; for a start or place in a seat, that claim as it was seen."""
    gives_way_to: str = ""
    """Of a stop: the worker that waits and is to have the place; "" where it ends for its own sake."""

    @property
    def name(self) -> str:
        """Return the name of what it is about."""
        return self.workload.name if self.workload else self.claim.name if self.claim else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, in this order. Empty when all is as it should be. `waits`: workload -> why it has no place."""

    actions: tuple[Action, ...] = ()
    waits: Mapping[str, str] = field(default_factory=dict)


class Cluster(Protocol):
    """Where workers run: one machine's processes, or a Kubernetes cluster's pods."""

    def observe(self) -> Seen:
        """Return what is there now. A cache that lags behind is fine: `apply` refuses what has changed."""

    def apply(self, actions: Sequence[Action]) -> set[str]:
        """Carry out the actions in their order; return the names of what they changed.

        Each is refused alone, without harm, where its object is no longer as it was seen. Doing one twice, or half of
        it before a crash, is made good by the next round.
        """
