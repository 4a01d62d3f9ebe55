"""Requests that wait for a result: held a while, woken by the one subscription of the process.

A waiting poll holds no connection to the store. Knows no HTTP.
"""

from __future__ import annotations

import random
import threading
import time

from openrl.tasks.futures import Completions, Future, Futures

REREAD_S = 10.0
"""Publications can be lost (the store restarts, a connection breaks): look again after this long at the latest."""


class Polls:
    """Waits for futures, until `release` sends every waiting request home at once."""

    def __init__(self, futures: Futures, completions: Completions, *, min_s: float, max_s: float) -> None:
        self._futures = futures
        self._completions = completions
        self._min_s, self._max_s = min_s, max_s
        self._closing = False
        self._held: set[threading.Event] = set()

    def wait(self, tenant: str, request_id: str) -> Future:
        """Return the future as soon as it is finished, else as it stands after a random hold.

        Raises:
            NotFound, Gone: as `Futures.get`.
        """
        ends = time.monotonic() + random.uniform(self._min_s, self._max_s)
        with self._completions.watch(tenant, request_id) as done:
            self._held.add(done)
            try:
                future = self._futures.get(tenant, request_id)
                while future.state == "pending" and not self._closing and (left := ends - time.monotonic()) > 0:
                    done.wait(min(left, REREAD_S))
                    future = self._futures.get(tenant, request_id)
                return future
            finally:
                self._held.discard(done)

    def release(self) -> None:
        """Let every poll answer now, and later ones at once: the process is about to end."""
        self._closing = True
        for done in list(self._held):
            done.set()

    def close(self) -> None:
        """Release everybody and end the subscription."""
        self.release()
        self._completions.close()
