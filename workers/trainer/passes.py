"""Which operations go into the next pass. Policy: pure, no torch, no store, no clock.

Knows each run's next operations by kind and size. Shares passes between tenants, and between the runs of
one tenant, by deficit round-robin over tokens, so that nobody waits for a longer tenant beyond one pass
and a run that is alone pays nothing. What is carried out together has room on the device together.

A run that is alone gets one forward at a time: how its operations happen to arrive then never changes
what is packed together, hence not one bit of its weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
class Room:
    """How many runs can be on the device at a time, and with how many bytes of state together; 0: no bound."""

    runs: int = 0
    state_bytes: int = 0

    def holds(self, runs: int, state_bytes: int) -> bool:
        """Tell whether so much fits. One run always does.

        A larger one was refused when it was created, or was taken over from a trainer that had more.
        """
        return runs <= 1 or (runs <= (self.runs or runs) and state_bytes <= (self.state_bytes or state_bytes))


BOUNDLESS = Room()


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """The next operations of one run, in order, without a gap."""

    tenant: str
    run_id: str
    pending: tuple[Pending, ...]
    state_bytes: int = 0
    """What its adapter, its moments and its gradient take on the device."""

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
    state_bytes: int = 0
    """What its run takes on the device."""

    @property
    def run(self) -> tuple[str, str]:
        """Tenant and run: unique in the service."""
        return self.tenant, self.run_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What to do next: `singles` one after the other, then `packed` in one go. In order for each run."""

    singles: tuple[Chosen, ...] = ()
    packed: tuple[Chosen, ...] = ()
    room: Room = BOUNDLESS

    def groups(self) -> list[list[Chosen]]:
        """Return what is carried out and then committed together, in order.

        Neighbouring steps of different runs are, as many as have room: they ask nothing of the store. Any other single
        one is committed before the next begins; only then may a store that fails be asked again.
        """
        groups: list[list[Chosen]] = []
        for chosen in self.singles:
            last = groups[-1] if groups else []
            joins = chosen.kind == STEP and all(one.kind == STEP and one.run != chosen.run for one in last)
            together = sum(one.state_bytes for one in (*last, chosen))
            if last and joins and self.room.holds(len(last) + 1, together):
                last.append(chosen)
            else:
                groups.append([chosen])
        return groups + ([list(self.packed)] if self.packed else [])


class Planner:
    """Plans one pass after the other and remembers who has had how much."""

    def __init__(self, *, token_budget: int, runs_per_pass: int = 0, room: Room = BOUNDLESS) -> None:
        """`runs_per_pass`: the most runs that share a forward; 0 means however many the budget has room for.

        `room` is the device's.
        """
        self._budget = token_budget
        self._room = room
        self._most_runs = min((most for most in (runs_per_pass, room.runs) if most), default=0)
        self._tenants = DeficitRoundRobin(quantum=token_budget)
        self._runs = DeficitRoundRobin(quantum=token_budget)

    def plan(self, queues: Sequence[Queue]) -> Pass:
        """Return the next pass over `queues` (oldest first); empty when nothing is pending.

        A pass holds at most the token budget, or one operation that is larger by itself. Its forwards are of runs
        that have room on the device together, or of one run that is larger by itself.
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
                tenant=part.queue.tenant,
                run_id=part.queue.run_id,
                seq_id=operation.seq_id,
                kind=operation.kind,
                state_bytes=part.queue.state_bytes,
            )
            (packed if operation.packed else singles).append(chosen)
        return Pass(singles=tuple(singles), packed=tuple(packed), room=self._room)

    def foresee(self, queues: Sequence[Queue], after: Pass) -> list[Chosen]:
        """Return what the pass behind `after` would be if nothing else came. Decides nothing: `plan` remembers no more.

        `queues` are those that `after` was planned over.
        """
        ends = {chosen.run: chosen.seq_id for chosen in (*after.singles, *after.packed)}
        rest = [
            replace(queue, pending=tuple(one for one in queue.pending if one.seq_id > ends.get(queue.key, -1)))
            for queue in queues
        ]
        if not any(queue.pending for queue in rest):
            return []
        thought = copy.copy(self)
        thought._tenants, thought._runs = self._tenants.copy(), self._runs.copy()
        then = thought.plan(rest)
        return [*then.singles, *then.packed]

    def _pick(self, parts: list[_Part]) -> Iterator[tuple[_Part, Pending]]:
        """Yield operations in fair order until the next one in line doesn't fit: it comes first in the next pass."""
        room = self._budget
        sharing: dict[str, int] = {}
        while parts:
            tenant = self._tenants.next(list(dict.fromkeys(part.queue.tenant for part in parts)))
            of_tenant = {part.name: part for part in parts if part.queue.tenant == tenant}
            part = of_tenant[self._runs.next(list(of_tenant))]
            cost = part.left[0].cost
            if cost > room and room < self._budget:
                return
            joining = sharing | ({part.name: part.queue.state_bytes} if part.packed else {})
            if not self._room.holds(len(joining), sum(joining.values())):
                return
            operation = part.take()
            room -= cost
            self._tenants.charge(tenant, cost)
            self._runs.charge(part.name, cost)
            yield part, operation
            sharing = joining
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
