"""What the scheduler reasons about, as values: pools, their demand, workers and wanted workloads.

Knows neither Redis nor processes. Times are seconds since the epoch, on the scheduler's own clock
where it compares them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal, Self

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
class Workload:
    """A worker process that is wanted. `accelerator` is an index, None for the CPU; `since`: wanted since."""

    name: str
    kind: Kind
    base: str
    slug: str
    accelerator: int | None
    since: float

    @property
    def pool(self) -> Pool:
        """Return the pool that it serves."""
        return Pool(slug=self.slug, kind=self.kind, base=self.base)

    def to_json(self) -> str:
        """Return the one canonical text of this workload."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Rebuild the workload that `to_json` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a decision may depend on.

    `demand` holds every served pool. `accelerators`: how many there are, 0 for the CPU alone.
    """

    now: float
    demand: dict[Pool, Demand]
    workers: tuple[Worker, ...] = ()
    workloads: tuple[Workload, ...] = ()
    accelerators: int = 0
    idle_timeout_s: float = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """Start or stop one workload, and why, in words for an operator."""

    verb: Literal["start", "stop"]
    workload: Workload
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now. Empty when all is as it should be."""

    actions: tuple[Action, ...] = ()
