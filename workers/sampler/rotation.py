"""Which version of a full model is sampled from next, where only one fits in memory. Pure: the time is given to it.

While another version is asked for, the one in memory keeps going for its share of time, a longer one where switches
take long. Then nothing new begins on it, and what runs may end. What hasn't ended after a while is laid aside and goes
on when its version comes again: never on other weights. Next is the version that has waited longest, so that of any
number of versions each has its turn, however much is asked of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

SWITCHES_COST = 0.1
"""Switching takes at most about this part of the time that versions have, unless turns became too long by it."""

Version = TypeVar("Version", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[Version]):
    """What to do in a step, in this order."""

    enter: bool = False
    """Requests of the version in memory may begin, or go on."""
    fetch: Version | None = None
    """The version to be fetched and verified meanwhile, since it comes next; None where no other is asked for."""
    lay_aside: bool = False
    """What still runs has had long enough to end."""
    switch: bool = False
    """Nothing runs: make `fetch` the version in memory."""


class Rotation(Generic[Version]):
    """Decides step by step between the versions that are asked for."""

    def __init__(self, *, turn_s: float, drain_s: float) -> None:
        """Give each version `turn_s` at least while others wait, and what runs then `drain_s` to end."""
        self._turn_s, self._drain_s = turn_s, drain_s
        self._ended: dict[Version, float] = {}
        """When each version that is asked for still was last in memory."""
        self._took_s = 0.0
        self._began = float("-inf")
        self._draining: float | None = None
        self.current: Version | None = None

    def begin(self, version: Version | None, *, now: float, took_s: float = 0.0) -> None:
        """Note that `version` is in memory from now on, and how long the switch took; None: nothing is."""
        if self.current is not None:
            self._ended[self.current] = now
        self.current, self._began, self._draining = version, now, None
        self._took_s = took_s or self._took_s

    def decide(
        self, asked: Mapping[Version, float], *, running: bool, ready: Callable[[Version], bool], now: float
    ) -> Decision[Version]:
        """Say what to do; `asked` is since when each version's oldest request has waited, or runs.

        `running` tells whether any request is at work on the weights in memory, `ready` which version was fetched.
        """
        self._ended = {version: at for version, at in self._ended.items() if version in asked}
        others = {version: self._waits_since(version, at) for version, at in asked.items() if version != self.current}
        if not others:
            self._draining = None
            return Decision(enter=True)
        chosen = min(others, key=others.__getitem__)
        if not ready(chosen) or (self.current in asked and not self._is_over(now)):
            self._draining = None
            return Decision(enter=self.current is not None, fetch=chosen)
        if not running:
            return Decision(fetch=chosen, switch=True)
        if self._draining is None:
            self._draining = now
        return Decision(fetch=chosen, lay_aside=now - self._draining >= self._drain_s)

    def _is_over(self, now: float) -> bool:
        # Bounded, since one switch that was slow (the first, of a whole model) says little of the next.
        longest = self._turn_s + self._drain_s
        return now - self._began >= max(self._turn_s, min(self._took_s / SWITCHES_COST, longest))

    def _waits_since(self, version: Version, asked_at: float) -> float:
        return max(asked_at, self._ended.get(version, float("-inf")))
