"""Runs that could not be rebuilt here, and how long each is left alone.

Bookkeeping only: what becomes of such a run's operations is told in `settling`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from openrl.workers.trainer.residents import Key

MOST_TRIES = 5
"""After so many tries to rebuild a run its next operation fails, so that its client gets an answer."""


@dataclass(slots=True)
class Doubt:
    """How often a run could not be rebuilt since its last operation took effect; not tried again `until` then."""

    tries: int = 0
    until: float = 0.0

    @property
    def is_hopeless(self) -> bool:
        """Tell whether it was tried often enough to fail its next operation."""
        return self.tries >= MOST_TRIES


class Doubts:
    """The runs of one trainer that are in doubt."""

    def __init__(self, pause_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Leave a run alone for `pause_s` at first, in seconds; that doubles four times."""
        self._pause_s = pause_s
        self._clock = clock
        self._doubts: dict[Key, Doubt] = {}

    def pauses(self, key: Key) -> bool:
        """Tell whether the run is left alone for now."""
        doubt = self._doubts.get(key)
        return doubt is not None and doubt.until > self._clock()

    def add(self, key: Key) -> tuple[Doubt, float]:
        """Note one more failure to rebuild the run; return the doubt and for how long it is left alone, in seconds."""
        doubt = self._doubts.setdefault(key, Doubt())
        pause_s = self._pause_s * 2 ** min(doubt.tries, 4)
        doubt.tries, doubt.until = doubt.tries + 1, self._clock() + pause_s
        return doubt, pause_s

    def end(self, key: Key) -> None:
        """Forget it: an operation of the run took effect."""
        self._doubts.pop(key, None)
