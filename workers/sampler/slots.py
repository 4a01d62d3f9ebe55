"""Who gets a place in the cache, and who reads how much of its prompt in a step. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from openrl.workers.sampler.groups import Group, Slot

SMALLEST = 64
"""Positions of a place in pool 0; each pool's places are twice as long as those of the one before."""


class Slots:
    """Places for sequences on one line of positions, each a power of two long and aligned to its length.

    A free place is halved until it fits and joined with its other half when both are free (Knowlton 1965, "A fast
    storage allocator"). The lowest one is taken, so that those of one length lie close.
    """

    def __init__(self, num_slots: int, *, kv_tokens: int) -> None:
        """Give out at most `num_slots` places, on `kv_tokens` positions: a power of two, at least SMALLEST."""
        self._num_free = num_slots
        self._free: list[set[int]] = [set() for _ in range((kv_tokens // SMALLEST).bit_length())]
        self._free[-1].add(0)

    def take(self, num_tokens: int) -> Slot | None:
        """Return a place for `num_tokens` positions; None when there isn't room."""
        pool = max(0, (num_tokens - 1).bit_length() - SMALLEST.bit_length() + 1)
        fitting = [larger for larger in range(pool, len(self._free)) if self._free[larger]]
        if not self._num_free or not fitting:
            return None
        self._num_free -= 1
        index = min(self._free[fitting[0]])
        self._free[fitting[0]].remove(index)
        for smaller in range(fitting[0] - 1, pool - 1, -1):
            index *= 2
            self._free[smaller].add(index + 1)
        return Slot(pool, index)

    def give(self, slot: Slot) -> None:
        """Give a place back."""
        self._num_free += 1
        pool, index = slot
        while index ^ 1 in self._free[pool]:
            self._free[pool].remove(index ^ 1)
            pool, index = pool + 1, index // 2
        self._free[pool].add(index)


def next_group(groups: Iterable[Group]) -> Group | None:
    """Return who gets the next slot: of the tenant with the fewest, the request with the fewest, the oldest.

    Whoever it is waits until there is room; nobody smaller passes, so nobody waits for ever.
    """
    groups = list(groups)
    held: Counter[str] = Counter()
    for group in groups:
        held[group.tenant] += len(group.slots)
    wanting = [group for group in groups if group.wants_slot]
    return min(wanting, key=lambda group: (held[group.tenant], len(group.slots), group.arrival), default=None)


def prefill_shares(unread: Sequence[int], budget: int) -> list[int]:
    """Split a step's `budget` of prompt tokens between prompts with `unread` tokens left, given by age.

    Half is for the oldest, so that it gets through; the rest goes to the shortest first, so that a long prompt
    doesn't keep short ones waiting.
    """
    shares = [0] * len(unread)
    order = sorted(range(len(unread)), key=lambda i: (unread[i], i))
    for i, bound in [*([(0, max(1, budget // 2))] if unread else []), *((i, budget) for i in order)]:
        part = min(unread[i] - shares[i], bound, budget - sum(shares))
        shares[i] += part
    return shares
