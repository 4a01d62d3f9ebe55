"""Work that must not hold up the event loop, where the process runs on one.

Under gunicorn a process is a gevent hub with thousands of greenlets; in tests and tools there is none, and
everything here is a plain call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from gevent import get_hub, monkey
from gevent.pool import Pool

log = logging.getLogger(__name__)

T = TypeVar("T")

_beside = Pool(256)


def off_loop(work: Callable[..., T], *args: object, large: bool) -> T:
    """Return `work(*args)`, run in a native thread when it is large.

    `work` must touch neither the request nor the store, which belong to the event loop.
    """
    if large and _on_gevent():
        result: T = get_hub().threadpool.apply(work, args)
        return result
    return work(*args)


def beside(work: Callable[..., None], *args: object) -> None:
    """Start `work(*args)` beside the request, which doesn't wait for it; left out when too much hangs already."""
    if not _on_gevent():
        work(*args)
    elif _beside.free_count() > 0:
        _beside.spawn(work, *args)
    else:
        log.warning("%s left out: %d of them still wait", getattr(work, "__name__", work), _beside.size)


def _on_gevent() -> bool:
    return bool(monkey.is_module_patched("threading"))
