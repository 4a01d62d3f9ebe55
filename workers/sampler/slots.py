"""Which sequences are in the cache, who comes next, who gives way, and who reads how much in a step. Pure.

A slot is the right to be in the batch, a place is room in the cache. Slots are shared between tenants, sequence by
sequence: a free one goes to the tenant with the fewest, and a tenant that has two fewer than another takes one from it.
A place begins small and doubles. Who gives way keeps its tokens and reads them again later (the recomputation of Kwon
et al. 2023, "Efficient memory management for large language model serving with PagedAttention").
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from openrl.timeslice.fairness import DeficitRoundRobin
from openrl.workers.sampler.groups import Continuation, Group
from openrl.workers.sampler.places import SMALLEST, Place, Places, pool_of

GROWTH = 256
"""Positions beyond what it knows that a sequence begins with, where it may need as many."""

PATIENCE = 64
"""Steps for which smaller sequences may pass one that finds no place that is long enough."""

QUANTUM = 4096.0
"""Tokens of a round, where two tenants with equally many slots want the next one."""


_Allowed = Callable[[Sequence[Continuation]], bool]


class Memory(Protocol):
    """What lies in places. A place must be empty before another that overlaps it is used."""

    def clear(self, place: Place) -> None:
        """Empty a place."""

    def copy(self, source: Place, target: Place, num_tokens: int) -> None:
        """Let `target` begin with the first tokens of `source`."""

    def move(self, source: Place, target: Place) -> None:
        """Let `target` hold what `source` holds, which then is empty; they may overlap."""


class Slots:
    """Gives slots and places to the sequences of groups, and takes them back."""

    def __init__(self, num_slots: int, *, kv_tokens: int, memory: Memory) -> None:
        """Run at most `num_slots` sequences, in `kv_tokens` positions: a power of two, at least SMALLEST."""
        self._num_slots = num_slots
        self._places = Places(kv_tokens)
        self._memory = memory
        self._fair = DeficitRoundRobin(quantum=QUANTUM)
        self._step = 0
        self._groups: list[Group] = []
        self._running: list[Continuation] = []
        self._held: Counter[str] = Counter()

    def arrange(self, groups: Iterable[Group]) -> list[Continuation]:
        """Before a step: let sequences grow, enter and give way; return those that can go on, one at least."""
        self._step += 1
        self._groups = list(groups)
        self._running = [one for group in self._groups for one in group.running]
        outgrown = sorted((one for one in self._running if one.outgrown), key=_age)
        if not outgrown and not any(group.waiting for group in self._groups):
            return self._running
        self._held = Counter(one.group.tenant for one in self._running)
        self._fair.forget_idle({group.tenant for group in self._groups})
        for one in outgrown:
            if one.place is not None and not self._grow(one) and self._overdue(one):
                self._evict(one)
        self._let_in()
        self._drop_spares()
        while self._running and all(one.outgrown for one in self._running):
            if not self._grow(min(self._running, key=_age)):
                self._evict(max(self._running, key=_age))
        return [one for one in self._running if not one.outgrown]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Note what a tenant had of a step."""
        self._fair.charge(tenant, num_tokens)

    def end(self, sequence: Continuation) -> None:
        """Take the slot of an ended sequence; its place stays until the next step if it alone holds the prompt."""
        group = sequence.group
        place = group.leave(sequence)
        if group.waiting and group.prompt_holder is None:
            group.spare = place
        else:
            self._release(place)

    def drop(self, group: Group) -> None:
        """Take back all that a group has."""
        for one in list(group.running):
            self._release(group.leave(one))
        self._drop_spare(group)

    def _grow(self, one: Continuation) -> bool:
        """Move a sequence to a place of twice the length; younger ones give way for it."""
        assert one.place is not None
        old = one.place

        def attempt() -> Place | None:
            return self._places.grow(old)

        def may_give_way(victims: Sequence[Continuation]) -> bool:
            least = self._held[one.group.tenant] - 1
            return all(victim.age > one.age for victim in victims) and self._leaves(victims, least, one.group.tenant)

        new = self._room(attempt, old.pool + 1, one, may_give_way)
        if new is None:
            self._passed(one)
            return False
        self._memory.move(old, new)
        if new != old.whole:
            self._places.give(old)
        one.place, one.passed_at = new, None
        return True

    def _let_in(self) -> None:
        """Hand out slots, and take some from who has too many; smaller ones pass who finds no place, for a while."""
        asking = [group for group in self._groups if group.next is not None]
        while asking:
            group = self._first(asking)
            victim = None
            if len(self._running) >= self._num_slots:
                victim = self._surplus(group.tenant)
                if victim is None:
                    return
            if self._enter(group, victim):
                asking = [one for one in asking if one is not group or one.next is not None]
                continue
            assert group.next is not None
            if self._overdue(group.next):
                return
            asking = [one for one in asking if one.tenant != group.tenant or _pool(one) < _pool(group)]

    def _first(self, asking: Sequence[Group]) -> Group:
        """Return who gets the next slot: of the tenant with the fewest, the request with the fewest, the oldest."""
        least = min(self._held[group.tenant] for group in asking)
        tenants = list(dict.fromkeys(group.tenant for group in asking if self._held[group.tenant] == least))
        tenant = self._fair.next(tenants)
        mine = (group for group in asking if group.tenant == tenant)
        return min(mine, key=lambda group: (len(group.running), group.arrival))

    def _surplus(self, tenant: str) -> Continuation | None:
        """Return the youngest sequence of the tenant with the most slots, if it has two more than `tenant`."""
        largest = max(self._held, key=self._held.__getitem__)
        if self._held[largest] < self._held[tenant] + 2:
            return None
        return max((one for one in self._running if one.group.tenant == largest), key=_age)

    def _enter(self, group: Group, victim: Continuation | None) -> bool:
        """Give the next sequence of a group a place, and `victim`'s slot where there is one."""
        one = group.next
        assert one is not None
        length = len(group.request.prompt)
        if group.spare is not None and group.spare.length >= one.num_known:
            place: Place | None = group.spare
            group.spare, num_held = None, length
        else:
            place, num_held = self._place_for(one), 0
        if place is None:
            self._passed(one)
            return False
        if victim is not None and victim.place is not None and len(self._running) >= self._num_slots:
            self._evict(victim)
        source = group.prompt_holder
        if not num_held and source is not None and source.place is not None:
            self._memory.copy(source.place, place, length)
            num_held = length
        self._running.append(group.enter(place, num_held=num_held))
        self._held[group.tenant] += 1
        return True

    def _place_for(self, one: Continuation) -> Place | None:
        """Return a place to begin in; sequences of tenants with more slots give way for it."""
        tenant, pool = one.group.tenant, _pool(one.group)

        def may_give_way(victims: Sequence[Continuation]) -> bool:
            mine = any(victim.group.tenant == tenant for victim in victims)
            return not mine and self._leaves(victims, self._held[tenant] + 1, tenant)

        return self._room(lambda: self._places.take(pool), pool, one, may_give_way)

    def _room(
        self, attempt: Callable[[], Place | None], pool: int, one: Continuation, may_give_way: _Allowed
    ) -> Place | None:
        """Return what `attempt` gives, once spare places are free, or once others have given way."""
        place = attempt()
        if place is None and self._drop_spares():
            place = attempt()
        if place is None and self._make_way(pool, one, may_give_way):
            place = attempt()
        return place

    def _leaves(self, victims: Sequence[Continuation], least: int, tenant: str) -> bool:
        """Tell whether all tenants but `tenant` keep at least so many slots without these."""
        lost = Counter(victim.group.tenant for victim in victims)
        return all(self._held[other] - lost[other] >= least for other in lost if other != tenant)

    def _make_way(self, pool: int, mover: Continuation, allowed: _Allowed) -> bool:
        """Empty one stretch of that length of others, if that is allowed for some: the one of the youngest."""
        stretches: defaultdict[int, list[Continuation]] = defaultdict(list)
        for one in self._running:
            if one is not mover and one.place is not None:
                stretches[one.place.start // (SMALLEST << pool)].append(one)
        choice = [victims for victims in stretches.values() if allowed(victims)]
        if not choice:
            return False
        for victim in max(choice, key=lambda victims: min(map(_age, victims))):
            self._evict(victim)
        return True

    def _evict(self, one: Continuation) -> None:
        """Let a sequence wait; it will go on with what it has drawn."""
        self._release(one.group.leave(one))
        self._running.remove(one)
        self._held[one.group.tenant] -= 1

    def _passed(self, one: Continuation) -> None:
        if one.passed_at is None:
            one.passed_at = self._step

    def _overdue(self, one: Continuation) -> bool:
        return one.passed_at is not None and self._step - one.passed_at > PATIENCE

    def _drop_spares(self) -> bool:
        """Give back the places that nobody runs in; tell whether there were any."""
        return sum(self._drop_spare(group) for group in self._groups) > 0

    def _drop_spare(self, group: Group) -> bool:
        place, group.spare = group.spare, None
        if place is not None:
            self._release(place)
        return place is not None

    def _release(self, place: Place) -> None:
        self._memory.clear(place)
        self._places.give(place)


def prefill_shares(unread: Sequence[int], budget: int) -> list[int]:
    """Split a step's `budget` of tokens to read between sequences with `unread` tokens left, given by age.

    Half is for the oldest, so that it gets through; the rest goes to the shortest first, so that a long prompt
    doesn't keep short ones waiting.
    """
    shares = [0] * len(unread)
    order = sorted(range(len(unread)), key=lambda i: (unread[i], i))
    for i, bound in [*([(0, max(1, budget // 2))] if unread else []), *((i, budget) for i in order)]:
        part = min(unread[i] - shares[i], bound, budget - sum(shares))
        shares[i] += part
    return shares


def _age(one: Continuation) -> tuple[int, int]:
    return one.age


def _pool(group: Group) -> int:
    """Return the pool of the place that the group's next sequence begins in."""
    one = group.next
    assert one is not None
    return pool_of(min(one.num_known + GROWTH, group.request.cache_tokens))
