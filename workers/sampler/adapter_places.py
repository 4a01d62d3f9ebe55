"""Which adapters may be in the batch of an engine that has few places for them, and which make room. Pure.

A place is one tenant's. A tenant with two fewer than another takes one from it at once; where all have as many, whoever
has had a place for a while gives it up to who has waited longest: of any number of adapters each gets on, however long
the requests of the others are.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

TURN_S = 2.0
"""How long an adapter that is loaded keeps its place while others wait. What stops reads again what it had."""


@dataclass(slots=True)
class _Holder:
    tenant: str
    since: float | None = None
    """When it was loaded: not before is its time counted."""


class AdapterPlaces:
    """Gives places to adapters, by directory, and takes them back."""

    def __init__(self, most: int, *, turn_s: float = TURN_S, clock: Callable[[], float] = time.monotonic) -> None:
        """There are `most` places."""
        self._most, self._turn_s, self._clock = most, turn_s, clock
        self._holders: dict[str, _Holder] = {}
        self._left: dict[str, int] = {}
        """Of those that wait and had a place: the smaller, the longer ago."""
        self._numbers = itertools.count()

    def __contains__(self, directory: str) -> bool:
        return directory in self._holders

    def loaded(self, directory: str) -> None:
        """Note that an adapter with a place can be used from now on."""
        holder = self._holders[directory]
        if holder.since is None:
            holder.since = self._clock()

    def arrange(self, asked: Iterable[tuple[str, str]]) -> list[str]:
        """Give places to those asked for, pairs of tenant and directory, the oldest first; return who lost theirs."""
        tenants: dict[str, str] = {}
        for tenant, directory in asked:
            tenants.setdefault(directory, tenant)
        self._holders = {name: holder for name, holder in self._holders.items() if name in tenants}
        self._left = {name: at for name, at in self._left.items() if name in tenants}
        lost: list[str] = []
        while waiting := {name: tenant for name, tenant in tenants.items() if name not in self._holders}:
            held = Counter(holder.tenant for holder in self._holders.values())
            # Of the tenant with the fewest places the one that has waited longest; the sort keeps the order of arrival.
            name = min(waiting, key=lambda one: (held[waiting[one]], self._left.get(one, -1)))
            if len(self._holders) >= self._most:
                loser = self._loser(held, waiting[name])
                if loser is None:
                    break
                lost.append(loser)
                if self._holders.pop(loser).since is not None:
                    self._left[loser] = next(self._numbers)
            self._holders[name] = _Holder(waiting[name])
            self._left.pop(name, None)
        return lost

    def _loser(self, held: Counter[str], tenant: str) -> str | None:
        """Return who gives up a place to a tenant, be it to another of its own; None: all keep theirs for now."""
        most = max(held.values())
        if most >= held[tenant] + 2:
            return min((one for one in self._holders if held[self._holders[one].tenant] == most), key=self._since_when)
        before = self._clock() - self._turn_s
        over = [
            name
            for name, holder in self._holders.items()
            if (holder.tenant == tenant or held[holder.tenant] > held[tenant])
            and holder.since is not None
            and holder.since <= before
        ]
        return min(over, key=self._since_when, default=None)

    def _since_when(self, name: str) -> float:
        since = self._holders[name].since
        return float("inf") if since is None else since
