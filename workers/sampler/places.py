"""Places in the cache: stretches of one line of positions, each a power of two long and aligned to its length.

A free place is halved until it fits and joined with its other half when both are free (Knowlton 1965, "A fast
storage allocator"). The lowest one is taken, so that those of one length lie close. Pure.
"""

from __future__ import annotations

from typing import NamedTuple, Self

SMALLEST = 64
"""Positions of a place in pool 0; each pool's places are twice as long as those of the one before."""


class Place(NamedTuple):
    """The `number`-th of the places of one length."""

    pool: int
    number: int

    @property
    def length(self) -> int:
        """How many tokens it can hold."""
        return SMALLEST << self.pool

    @property
    def start(self) -> int:
        """Where on the line it begins."""
        return self.number * self.length

    @property
    def whole(self) -> Self:
        """The place of twice the length that it is a half of."""
        return type(self)(self.pool + 1, self.number // 2)


def pool_of(num_tokens: int) -> int:
    """Return the pool of the smallest places that hold `num_tokens`."""
    return max(0, (num_tokens - 1).bit_length() - SMALLEST.bit_length() + 1)


class Places:
    """Which places of a line are free."""

    def __init__(self, kv_tokens: int) -> None:
        """Begin with `kv_tokens` free positions: a power of two, at least SMALLEST."""
        self._free: list[set[int]] = [set() for _ in range((kv_tokens // SMALLEST).bit_length())]
        self._free[-1].add(0)

    def take(self, pool: int) -> Place | None:
        """Return a place of `pool`; None when there isn't room."""
        fitting = [larger for larger in range(pool, len(self._free)) if self._free[larger]]
        if not fitting:
            return None
        number = min(self._free[fitting[0]])
        self._free[fitting[0]].remove(number)
        for smaller in range(fitting[0] - 1, pool - 1, -1):
            number *= 2
            self._free[smaller].add(number + 1)
        return Place(pool, number)

    def give(self, place: Place) -> None:
        """Give a place back."""
        pool, number = place
        while number ^ 1 in self._free[pool]:
            self._free[pool].remove(number ^ 1)
            pool, number = pool + 1, number // 2
        self._free[pool].add(number)

    def grow(self, place: Place) -> Place | None:
        """Return one of twice the length for `place`: the whole it is a half of, if the other half is free.

        A place elsewhere is returned beside `place`, which then is still to be given back.
        """
        if place.number ^ 1 in self._free[place.pool]:
            self._free[place.pool].remove(place.number ^ 1)
            return place.whole
        return self.take(place.pool + 1) if place.pool + 1 < len(self._free) else None
