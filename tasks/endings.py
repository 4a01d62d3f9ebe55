"""What the engine of this process has ended lately, for those who wait for it in other threads.

Knows neither the store nor what ended: what another process ends is never heard of here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 4096
"""Endings that are remembered for who asks after them."""

Name = tuple[str, str]
"""A tenant and a request id."""


class Ending:
    """How an operation ends, once it has."""

    def __init__(self) -> None:
        self.error: str | None = None
        """None: it hasn't ended here; "": in success."""
        self._told = threading.Event()

    def wait(self, timeout_s: float) -> str | None:
        """Return `error`, after `timeout_s` at the latest, or when `Endings.release` is called."""
        self._told.wait(timeout_s)
        return self.error

    def tell(self, error: str | None) -> None:
        """Let `wait` return."""
        self.error = error
        self._told.set()


class Endings:
    """Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past: OrderedDict[Name, str] = OrderedDict()
        self._awaited: defaultdict[Name, list[Ending]] = defaultdict(list)

    def note(self, tenant: str, request_id: str, error: str) -> None:
        """Note how an operation ended; `error` "" is success."""
        with self._lock:
            self._past[tenant, request_id] = error
            if len(self._past) > MOST:
                self._past.popitem(last=False)
            awaited = self._awaited.get((tenant, request_id), [])
            for ending in awaited:
                ending.tell(error)

    @contextmanager
    def watch(self, tenant: str, request_id: str) -> Iterator[Ending]:
        """Hear of one operation for the body of the `with`; of one that has ended already, at once."""
        name, ending = (tenant, request_id), Ending()
        with self._lock:
            if name in self._past:
                ending.tell(self._past[name])
            self._awaited[name].append(ending)
        try:
            yield ending
        finally:
            with self._lock:
                self._awaited[name].remove(ending)
                if not self._awaited[name]:
                    del self._awaited[name]

    def release(self) -> None:
        """Let everybody who waits now look up."""
        with self._lock:
            for awaited in self._awaited.values():
                for ending in awaited:
                    ending.tell(ending.error)
