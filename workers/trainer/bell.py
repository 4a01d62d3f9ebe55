"""What rings for a trainer's engine: that it should look into the journal, or with what it would find there.

An operation that is told of along with the ring needn't be asked for, which saves a trip to the store. It counts for no
more than that: the engine looks by itself all the same, and what is lost here costs time. Any thread may ring.
"""

from __future__ import annotations

import threading
from collections import deque

MOST = 64
"""What is told of and not yet heard; of more, the journal is asked."""


class Bell:
    """Rings for one engine, which alone may hear."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._told: deque[bytes] = deque(maxlen=MOST)
        self._calls = False

    def ring(self) -> None:
        """Let the engine go on, with what it was told of, or with a look. So does a doorbell, which comes as well."""
        self._rung.set()

    def tell(self, said: bytes) -> None:
        """Ring with an operation, as the script that took it in describes it; to let the engine look, with nothing."""
        if not said or len(self._told) == MOST:
            self._calls = True
        else:
            self._told.append(said)
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

    def heard(self) -> list[bytes]:
        """Return what was told since the last time; nothing where the journal has to be looked into."""
        calls, self._calls = self._calls, False
        told = [self._told.popleft() for _ in range(len(self._told))]
        return [] if calls else told

    def forget(self) -> None:
        """Forget all that rang: the journal is looked into now."""
        self.hush()
        self.heard()
