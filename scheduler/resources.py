"""What the scheduler reasons about, as values: pools, their demand, workers and wanted workloads.

Knows neither Redis nor processes. Times are seconds since the epoch, on the scheduler's own clock
where it compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, Self

from openrl.tasks.schema import WORKLOAD

Kind = Literal["trainer", "sampler"]
KINDS: tuple[Kind, ...] = ("trainer", "sampler")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Pool:
    """All workers of one kind for one base model. `base` is the model's name, `slug` its short form."""

    slug: str
    kind: Kind
    base: str

    @property
    def workload_name(self) -> str:
        """Return the name of the pool's workload: the same whoever decides, so that two deciders agree."""
        return f"{self.kind}-{self.slug}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a pool has before it: operations acknowledged and not finished, and the age of the oldest."""

    depth: int = 0
    oldest_s: float = 0.0


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
    """A process that runs for a workload, and the workload's generation that it was started for."""

    pid: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """The last sign of life of a worker that did not end its lease itself: who gave it, and when."""

    pid: int
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A worker process that is wanted. `accelerator` is an index, None for the CPU; `since`: wanted since.

    A process of an older `generation` is not wanted any more: it is ended, and a fresh one takes its place.
    """

    name: str
    kind: Kind
    base: str
    slug: str
    accelerator: int | None
    since: float
    generation: int = 0

    @property
    def pool(self) -> Pool:
        """Return the pool that it serves."""
        return Pool(slug=self.slug, kind=self.kind, base=self.base)

    def to_json(self) -> str:
        """Return the one canonical text of this workload."""
        return json.dumps(WORKLOAD.numbered(asdict(self)), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild the workload that `to_json` wrote."""
        return cls(**WORKLOAD.current(json.loads(text)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a decision may depend on.

    `demand` holds every served pool. `accelerators`: how many there are, 0 for the CPU alone. `processes` and `signs`
    are by workload; `watched_since`: since when the scheduler has looked at the store without a long break.
    """

    now: float
    demand: dict[Pool, Demand]
    workers: tuple[Worker, ...] = ()
    workloads: tuple[Workload, ...] = ()
    processes: Mapping[str, Process] = field(default_factory=dict)
    signs: Mapping[str, Sign] = field(default_factory=dict)
    watched_since: float = 0.0
    lease_s: float = 30.0
    accelerators: int = 0
    idle_timeout_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Start or stop one workload, or replace its process, and why, in words for an operator.

    `workload` is the new one of a start, else the one seen.
    """

    verb: Literal["start", "stop", "replace"]
    workload: Workload
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now. Empty when all is as it should be."""

    actions: tuple[Action, ...] = ()
