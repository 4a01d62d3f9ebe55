"""Requests that wait for a result: held a while, woken by the one subscription of the process.

A waiting poll holds no connection to the store, and reads nothing until it is woken or its time is up: whenever the
subscription was broken, all are woken. Knows no HTTP.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from openrl.app.expected import Expected
from openrl.tasks.deliveries import Batch, Deliveries
from openrl.tasks.futures import Completions, Future, Futures, Watch, told

T = TypeVar("T")


class Polls:
    """Waits for futures, until `release` sends every waiting request home at once."""

    def __init__(
        self,
        futures: Futures,
        deliveries: Deliveries,
        completions: Completions,
        expected: Expected,
        *,
        min_s: float,
        max_s: float,
    ) -> None:
        self._futures = futures
        self._deliveries = deliveries
        self._completions = completions
        self._expected = expected
        self._min_s, self._max_s = min_s, max_s
        self._closing = False
        self._held: set[threading.Event] = set()

    def wait(self, tenant: str, request_id: str) -> Future:
        """Return the future as soon as it is finished, else as it stands after a random hold.

        Raises:
            NotFound, Gone: as `Futures.get`.
        """
        expected = self._expected.take(tenant, request_id)
        done = expected or self._completions.begin(tenant, request_id)
        try:
            return self._held_until(
                done,
                lambda: told(tenant, request_id, done.said) or self._futures.get(tenant, request_id),
                lambda future: future.state != "pending",
                pends=expected is not None,
            )
        finally:
            self._completions.end(tenant, request_id, done)

    def wait_for_any(
        self, tenant: str, sampler_id: str, clone: int, cursor: int, *, timeout_s: float | None = None
    ) -> Batch:
        """Return what has ended of a clone's samples since `cursor`: at once if there is anything, else after a hold.

        `timeout_s` shortens the hold; 0 is none.

        Raises:
            NotFound, InvalidRequest: as `Deliveries.since`.
        """
        with self._completions.watch_clone(tenant, sampler_id, clone) as done:
            return self._held_until(
                done,
                lambda: self._deliveries.since(tenant, sampler_id, clone, cursor),
                lambda batch: bool(batch.ended),
                most_s=timeout_s,
            )

    def _held_until(
        self,
        done: Watch,
        read: Callable[[], T],
        enough: Callable[[T], bool],
        *,
        most_s: float | None = None,
        pends: bool = False,
    ) -> T:
        """Read again each time that something was done, until it is enough or the hold is over.

        `pends`: nothing has been done as long as `done` isn't set, so there is nothing to read before.
        """
        hold_s = random.uniform(self._min_s, self._max_s)
        ends = time.monotonic() + (hold_s if most_s is None else min(most_s, hold_s))
        self._held.add(done)
        try:
            if pends and not self._closing:
                done.wait(ends - time.monotonic())
            found = read()
            while not enough(found) and not self._closing and (left := ends - time.monotonic()) > 0:
                done.wait(left)
                found = read()
            return found
        finally:
            self._held.discard(done)

    @property
    def closing(self) -> bool:
        """Tell whether the process is about to end."""
        return self._closing

    def release(self) -> None:
        """Let every poll answer now, and later ones at once: the process is about to end."""
        self._closing = True
        for done in list(self._held):
            done.set()

    def close(self) -> None:
        """Release everybody and end the subscription."""
        self.release()
        self._completions.close()
