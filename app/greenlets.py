"""Work that must not hold up the event loop, where the process runs on one.

Under gunicorn a process is a gevent hub with thousands of greenlets; in tests and tools there is none, and
everything here is a plain call.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar, cast

from gevent import Timeout, get_hub, monkey, sleep
from gevent.pool import Pool

log = logging.getLogger(__name__)

T = TypeVar("T")

_beside = Pool(1024)
_TELL_S = 10.0
_told = 0.0


def off_loop(work: Callable[..., T], *args: object, large: bool) -> T:
    """Return `work(*args)`, run in a native thread when it is large.

    `work` must touch neither the request nor the store, which belong to the event loop.
    """
    if large and _on_gevent():
        result, error = get_hub().threadpool.apply(_outcome, (work, args))
        if error is not None:
            raise error
        return cast(T, result)
    return work(*args)


def _outcome(work: Callable[..., T], args: tuple[object, ...]) -> tuple[T | None, Exception | None]:
    """Return what `work(*args)` returns or raises: gevent would write a traceback of what leaves a native thread."""
    try:
        return work(*args), None
    except Exception as error:
        return None, error


def within(seconds: float, work: Callable[..., T], *args: object) -> T:
    """Return `work(*args)`, which waits for somebody else on the event loop; where there is none, it waits for ever.

    Raises:
        TimeoutError: it took longer than `seconds`, and was given up.
    """
    if not _on_gevent():
        return work(*args)
    with Timeout(seconds, TimeoutError):
        return work(*args)


def breathe() -> None:
    """Let every other greenlet that can go on have its turn first."""
    if _on_gevent():
        sleep(0)


def rest(seconds: float) -> None:
    """Let others work for so long, where there are others."""
    if _on_gevent():
        sleep(seconds)


def beside(work: Callable[..., object], *args: object) -> None:
    """Start `work(*args)` beside the request, which doesn't wait for it; left out when too much hangs already."""
    if not _on_gevent():
        work(*args)
    elif _beside.free_count() > 0:
        _beside.spawn(work, *args)
    else:
        _tell(f"{getattr(work, '__name__', work)} left out, as others may be: {_beside.size} of them still wait")


def _tell(trouble: str) -> None:
    """Log it, now and then: thousands of requests may have the same trouble at once."""
    global _told
    if time.monotonic() - _told > _TELL_S:
        _told = time.monotonic()
        log.warning(trouble)


class Budget:
    """A number of bytes that the requests of this process share; native threads may take from it too."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        # A native lock, held for nothing that waits: gevent's own belong to one thread's loop.
        self._lock = monkey.get_original("_thread", "allocate_lock")()

    def take(self, size: int) -> bool:
        """Take `size` bytes and return True, or nothing and False where they aren't left."""
        with self._lock:
            if size > self._left:
                return False
            self._left -= size
            return True

    def give_back(self, size: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._left += size


def _on_gevent() -> bool:
    return bool(monkey.is_module_patched("threading"))
