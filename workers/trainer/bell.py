"""What rings for a trainer's engine: that it should look into the journal, or with what it would find there.

An operation that is told of along with the ring needn't be asked for, which saves a trip to the store. It counts for no
more than that: the engine looks by itself all the same, and what is lost here costs time. Any thread may ring.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

MOST = 64
"""What is told of and not yet heard; of more, the journal is asked."""


class Heard(NamedTuple):
    """All that rang since the last time."""

    told: list[bytes]
    """Operations, as the script that took them in describes them; none where the journal has to be looked into."""
    rang: bool
    """Whether somebody rang who told of nothing: what that was for may be something else."""


class Bell:
    """Rings for one engine, which alone may hear."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._lock = threading.Lock()
        self._told: deque[bytes] = deque()
        self._looks = self._rang = False

    def ring(self) -> None:
        """Let the engine carry out what it was told of and then look, or look at once: a doorbell has come."""
        with self._lock:
            self._rang = True
        self._rung.set()

    def tell(self, said: bytes) -> None:
        """Ring with an operation; with nothing, to let the engine look at once whatever else it was told of."""
        with self._lock:
            if said and len(self._told) < MOST:
                self._told.append(said)
            else:
                self._looks = True
        self._rung.set()

    def is_set(self) -> bool:
        """Tell whether it rang since the last `hush`."""
        return self._rung.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait until it rings; False after `timeout_s`."""
        return self._rung.wait(timeout_s)

    def hush(self) -> None:
        """Begin to wait for the next ring."""
        self._rung.clear()

    def heard(self) -> Heard:
        """Return all that rang since the last time."""
        with self._lock:
            heard = Heard([] if self._looks else list(self._told), self._rang)
            self._told.clear()
            self._looks = self._rang = False
        return heard

    def forget(self) -> None:
        """Forget all that rang: the journal is looked into now."""
        self.hush()
        self.heard()
