"""Fair shares by measured cost: deficit round-robin whose costs are charged after the fact.

Knows owners by name and costs as numbers; the unit (tokens, seconds) is the caller's. The idea is
deficit round-robin (Shreedhar and Varghese 1995) in its surplus form: an owner in credit is served,
then charged what it really took, and waits until the others have had as much. Whoever is alone is
never held up.
"""

from __future__ import annotations

import math
from collections.abc import Collection

MOST_ABSENT = 10_000
"""Owners that are remembered while they don't wait. Runs end, and their names never come again."""


class DeficitRoundRobin:
    """Credits of the owners. One round gives each of them `quantum`; nobody saves up more than that."""

    def __init__(self, *, quantum: float) -> None:
        if not quantum > 0:
            raise ValueError(f"quantum must be positive, not {quantum}")
        self._quantum = quantum
        self._credit: dict[str, float] = {}

    def copy(self) -> DeficitRoundRobin:
        """Return one that knows the same and goes its own way from here."""
        other = DeficitRoundRobin(quantum=self._quantum)
        other._credit = dict(self._credit)
        return other

    def next(self, waiting: Collection[str]) -> str:
        """Return who of `waiting` (in order of arrival, not empty) is served now.

        It is the one with the most credit, and the first of them where several have it.
        """
        for owner in waiting:
            self._credit.setdefault(owner, self._quantum)
        richest = max(waiting, key=self._credit.__getitem__)
        if self._credit[richest] <= 0:
            self._turn_rounds(math.floor(-self._credit[richest] / self._quantum) + 1)
        return richest

    def charge(self, owner: str, cost: float) -> None:
        """Take `cost`, as measured, from the credit of `owner`."""
        self._credit[owner] = self._credit.get(owner, self._quantum) - cost

    def forget_idle(self, waiting: Collection[str]) -> None:
        """Drop the owners that don't wait and whose credit is whole, and of the others all but the MOST_ABSENT poorest.

        What was used of a credit outlives the owner's absence like a debt: otherwise those who come and go would never
        run out of it, no round would pass, and whoever owes would wait for ever. A name that is new has a whole credit.
        """
        absent = [owner for owner in self._credit if owner not in waiting]
        forgotten = [owner for owner in absent if self._credit[owner] >= self._quantum]
        if len(absent) - len(forgotten) > MOST_ABSENT:
            forgotten = sorted(absent, key=self._credit.__getitem__)[MOST_ABSENT:]
        for owner in forgotten:
            del self._credit[owner]

    def _turn_rounds(self, rounds: int) -> None:
        """Let rounds pass: debts shrink, whether or not their owners wait just now."""
        for owner, credit in self._credit.items():
            self._credit[owner] = min(credit + rounds * self._quantum, self._quantum)
