"""Which operations go into the next pass. Policy: pure, no torch, no store, no clock.

Knows each run's next operations by kind and size. Shares passes between tenants, and between the runs of
one tenant, by deficit round-robin over tokens, so that nobody waits for a longer tenant beyond one pass
and a run that is alone pays nothing.

A run that is alone gets one forward at a time: how its operations happen to arrive then never changes
what is packed together, hence not one bit of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from openrl.timeslice import DeficitRoundRobin

FORWARDS = frozenset({"forward", "forward_backward"})
"""The kinds that are packed together; each other kind is carried out by itself."""

STEP = "optim_step"

SINGLE_COST = 64
"""What an operation without tokens (a step, a save) is charged, in tokens: about its time on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """One operation that could run: `tokens` is its size, 0 for a kind that has none."""

    kind: str
    seq_id: int
    tokens: int = 0

    @property
    def packed(self) -> bool:
        """Whether the operation shares a forward with others."""
        return self.kind in FORWARDS

    @property
    def cost(self) -> int:
        """What it is charged, in tokens."""
        return self.tokens if self.packed else SINGLE_COST


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The next operations of one run, in order, without a gap."""

    tenant: str
    run_id: str
    pending: tuple[Pending, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and run: unique in the service."""
        return self.tenant, self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """An operation that goes into the pass."""

    tenant: str
    run_id: str
    seq_id: int
    kind: str

    @property
    def run(self) -> tuple[str, str]:
        """Tenant and run: unique in the service."""
        return self.tenant, self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What to do next: `singles` one after the other, then `packed` in one go. In order for each run."""

    singles: tuple[Chosen, ...] = ()
    packed: tuple[Chosen, ...] = ()

    def groups(self) -> list[list[Chosen]]:
        """Return what is carried out and then committed together, in order.

        Neighbouring steps of different runs are: they ask nothing of the store. Any other single one is committed
        before the next begins; only then may a store that fails be asked again.
        """
        groups: list[list[Chosen]] = []
        for chosen in self.singles:
            last = groups[-1] if groups else []
            joins = chosen.kind == STEP and all(one.kind == STEP and one.run != chosen.run for one in last)
            if last and joins:
                last.append(chosen)
            else:
                groups.append([chosen])
        return groups + ([list(self.packed)] if self.packed else [])


class Planner:
    """Plans one pass after the other and remembers who has had how much."""

    def __init__(self, *, token_budget: int, runs_per_pass: int = 0) -> None:
        """`runs_per_pass`: the most runs that share a forward; 0 means however many the budget has room for."""
        self._budget = token_budget
        self._most_runs = runs_per_pass
        self._tenants = DeficitRoundRobin(quantum=token_budget)
        self._runs = DeficitRoundRobin(quantum=token_budget)

    def plan(self, queues: Sequence[Queue]) -> Pass:
        """Return the next pass over `queues` (oldest first); empty when nothing is pending.

        A pass holds at most the token budget, or one operation that is larger by itself.
        """
        parts = [part for queue in queues if (part := _Part(queue)).left]
        alone = self._most_runs == 1 or sum(part.packed for part in parts) == 1
        for part in parts:
            part.limit = 1 if alone and part.packed else None
        self._tenants.forget_idle({part.queue.tenant for part in parts})
        self._runs.forget_idle({part.name for part in parts})
        singles: list[Chosen] = []
        packed: list[Chosen] = []
        for part, operation in self._pick(parts):
            chosen = Chosen(
                tenant=part.queue.tenant, run_id=part.queue.run_id, seq_id=operation.seq_id, kind=operation.kind
            )
            (packed if operation.packed else singles).append(chosen)
        return Pass(singles=tuple(singles), packed=tuple(packed))

    def _pick(self, parts: list[_Part]) -> Iterator[tuple[_Part, Pending]]:
        """Yield operations in fair order until the next one in line doesn't fit."""
        room = self._budget
        sharing: set[str] = set()
        while parts:
            tenant = self._tenants.next(list(dict.fromkeys(part.queue.tenant for part in parts)))
            of_tenant = {part.name: part for part in parts if part.queue.tenant == tenant}
            part = of_tenant[self._runs.next(list(of_tenant))]
            cost = part.left[0].cost
            if cost > room and room < self._budget:
                return
            operation = part.take()
            room -= cost
            self._tenants.charge(tenant, cost)
            self._runs.charge(part.name, cost)
            yield part, operation
            if part.packed:
                sharing.add(part.name)
            full = 0 < self._most_runs <= len(sharing)
            parts = [part for part in parts if part.left and not (full and part.packed and part.name not in sharing)]


class _Part:
    """What one run can have in one pass: its leading forwards, or its leading singles."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.name = f"{queue.tenant} {queue.run_id}"
        self.packed = bool(queue.pending) and queue.pending[0].packed
        self.limit: int | None = None
        self._rest = list(queue.pending)
        self._taken = 0

    @property
    def left(self) -> list[Pending]:
        """What may still follow in this pass."""
        ended = not self._rest or self._rest[0].packed is not self.packed or self._taken == self.limit
        return [] if ended else self._rest

    def take(self) -> Pending:
        """Take the next operation."""
        self._taken += 1
        return self._rest.pop(0)
