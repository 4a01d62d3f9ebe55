"""Fair shares by measured cost: deficit round-robin whose costs are charged after the fact.

Knows owners by name and costs as numbers; the unit (tokens, seconds) is the caller's. The idea is
deficit round-robin (Shreedhar and Varghese 1995) in its surplus form: an owner in credit is served,
then charged what it really took, and waits until the others have had as much. Whoever is alone is
never held up.
"""

from __future__ import annotations

import math
from collections.abc import Collection


class DeficitRoundRobin:
    """Credits of the owners. One round gives each of them `quantum`; nobody saves up more than that."""

    def __init__(self, *, quantum: float) -> None:
        if not quantum > 0:
            raise ValueError(f"quantum must be positive, not {quantum}")
        self._quantum = quantum
        self._credit: dict[str, float] = {}

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
        """Drop the owners that neither wait nor owe anything. A debt outlives the owner's absence."""
        self._credit = {owner: credit for owner, credit in self._credit.items() if owner in waiting or credit < 0}

    def _turn_rounds(self, rounds: int) -> None:
        """Let rounds pass: debts shrink, whether or not their owners wait just now."""
        for owner, credit in self._credit.items():
            self._credit[owner] = min(credit + rounds * self._quantum, self._quantum)
