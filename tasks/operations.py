"""Operations on their way: what the journal takes in, hands to a worker, and gets back.

Plain values; the rules are in `journal` and `samples`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from openrl.tasks.messages import Sample
from openrl.tasks.ownership import Lease
from openrl.tasks.records import Row

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

REFUSED = "refused"
"""The kind of an operation that was refused at submission; it still takes its turn."""
MISSING = "missing"
"""The kind of an operation that never arrived; it takes its turn when its gap is closed."""
_BROUGHT_BYTES = 1 << 16
"""Bodies that `take` brings along: those of a quiet hour. With a backlog most would be brought in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a submission is answered with: the id to ask for the result. `run_id` is empty for samples."""

    request_id: str
    run_id: str = ""
    is_new: bool = field(default=False, compare=False)
    """Whether it was accepted by this very call; what was accepted before may have ended since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One entry of a run's journal. `take` gives it with its `body` or without, `history` with bodies of some kinds.

    `size` is the body's in bytes, `tokens` what it sends through the model.
    `error`: why a refused or missing one failed; on replay, how it ended ("" means it succeeded).
    `voids`: a refused or missing one may have been a forward_backward, so the gradients are incomplete.
    """

    tenant: str
    run_id: str
    seq_id: int
    request_id: str
    kind: str
    submitted: float
    size: int = 0
    tokens: int = 0
    body: bytes = b""
    replay: bool = False
    error: str = ""
    voids: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """The executable operations of one run, `applied + 1` first, without a hole.

    `newly_owned`: this process is handed this token for the first time, so it holds none of the run's state.
    `crashes`: how many workers died with the first of these operations next. The first death may be another run's
    doing; the further ones are counted only while the operation was begun by itself (see `Journal.begin`).
    """

    tenant: str
    run_id: str
    token: int
    newly_owned: bool
    applied: int
    operations: tuple[Operation, ...]
    crashes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleJob:
    """One sampling request in this process's hands. `submitted` in unix seconds."""

    tenant: str
    request_id: str
    message: Sample
    submitted: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What an operation used, as it was measured. What a training operation reads is in the journal already."""

    prompt_tokens: int = 0
    sampled_tokens: int = 0
    seconds: float = 0.0

    @property
    def microseconds(self) -> int:
        """The seconds as the store counts them."""
        return round(self.seconds * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an operation ended. `error` None means that it succeeded; `category` says whose fault it was.

    `rows` and `run_fields` (fields of `registry.Run`) are written together with the run's new position.
    """

    result: bytes = b""
    content_type: str = JSON
    error: str | None = None
    category: str = "user"
    rows: tuple[Row, ...] = ()
    run_fields: Mapping[str, str] = field(default_factory=dict)
    usage: Usage = Usage()


class Committal(NamedTuple):
    """An operation, how it ended, and the token under which its run was computed."""

    operation: Operation
    outcome: Outcome
    token: int


class FullPool(NamedTuple):
    """The pool of a full fine-tuning run, and whose it is."""

    slug: str
    tenant: str
    run_id: str


class Taking(NamedTuple):
    """What `take` is asked for."""

    slug: str
    max_runs: int
    max_ops_per_run: int
    max_claims: int

    def args(self, lease: Lease, *, in_hand: bool = False) -> tuple[str | int, ...]:
        """Return the arguments of the script. `in_hand`: what was taken before may not be committed yet."""
        return self.slug, lease.worker_id, lease.generation, *self[1:], _BROUGHT_BYTES, int(in_hand)
