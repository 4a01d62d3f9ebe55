"""What this process has accepted and nobody has asked for yet: watched from before it was accepted.

Whoever asks for one of these needn't look into the store first: it hasn't ended as long as its watch wasn't set. Most
operations are asked for once, at once, at the process that took them in. Knows neither HTTP nor what an operation is.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from openrl.tasks.futures import Completions, Watch
from openrl.tasks.operations import Promise

MOST = 1024
"""Promises that are watched at a time, each with what `steps.lua` tells of a result at most."""
KEPT_S = 30.0
"""After this long one makes way for the next; its client asks within milliseconds. One that is fetched in
another way stays until then."""

Name = tuple[str, str]


class Expected:
    """The watches of one process. Its methods are for one thread, or for the greenlets of one."""

    def __init__(self, completions: Completions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._completions = completions
        self._clock = clock
        self._watches: OrderedDict[Name, tuple[float, Watch]] = OrderedDict()

    def submit(self, tenant: str, request_id: str, submit: Callable[[], Promise]) -> Promise:
        """Return what `submit` returns, and watch the promise from before that on, if it is a new one.

        What was accepted before may have ended before this began.
        """
        watch = self._completions.begin(tenant, request_id)
        try:
            promise = submit()
        except BaseException:
            self._completions.end(tenant, request_id, watch)
            raise
        if promise.is_new:
            self._keep((tenant, request_id), watch)
        else:
            self._completions.end(tenant, request_id, watch)
        return promise

    def take(self, tenant: str, request_id: str) -> Watch | None:
        """Return the watch of a promise, which is the caller's to end; None: there is none, or no longer."""
        found = self._watches.pop((tenant, request_id), None)
        return None if found is None else found[1]

    def _keep(self, name: Name, watch: Watch) -> None:
        self._drop(name)
        self._watches[name] = self._clock() + KEPT_S, watch
        while len(self._watches) > MOST or next(iter(self._watches.values()))[0] <= self._clock():
            self._drop(next(iter(self._watches)))

    def _drop(self, name: Name) -> None:
        if watch := self.take(*name):
            self._completions.end(*name, watch)
