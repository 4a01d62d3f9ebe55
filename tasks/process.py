"""A process and its surroundings: it leaves when the one that started it is gone or when nothing that it does works
any more, and may open files enough.

`openrl up` is the only parent of everything it starts and says so in OPENRL_PARENT_PID; where that is
unset (Kubernetes, a process started by hand) nothing here does anything. Knows nothing of what the
process is for: it asks it to end as an operator would, and insists after a while.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

log = logging.getLogger(__name__)

PARENT_PID = "OPENRL_PARENT_PID"
GRACE_S = 12.0
"""How long a process that lost its parent may take over its own clean end."""

MOST_OPEN_FILES = 1 << 20
"""Linux's own default bound. Containers allow a thousand times that, and some programs walk through all of them."""

MOST_FAILURES = 20
"""So many failures of one kind in a row are no accident."""

MOST_API_PROCESSES = 4
"""Beyond it the store is busier than they are."""

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MOST_MMAP_THRESHOLD = 32 << 20
"""glibc takes no larger one."""


def api_processes() -> int:
    """Return how many processes of the API suit this machine: one for each two cores that we may use, 1 to 4.

    On two cores a second one costs each request more, in caches and in turns, than it does of the work.
    """
    return min(max(1, len(os.sched_getaffinity(0)) // 2), MOST_API_PROCESSES)


class Streak:
    """Failures in a row of a loop that goes on after each; too many of one kind end the process.

    A fault of the program would repeat for ever while everybody waits. The process ends as if killed, handing nothing
    back: so its successor suspects what it was at, and in the end fails that. Trouble of the machine (OSError), which
    a successor would have too, ends nothing. `leave` takes the exit status.
    """

    def __init__(self, leave: Callable[[int], object] = os._exit) -> None:
        self._leave = leave
        self._kind: type[Exception] | None = None
        self._length = 0

    def end(self) -> None:
        """Note a success."""
        self._kind, self._length = None, 0

    def add(self, error: Exception) -> None:
        """Note a failure, and end the process where it is one too many."""
        self._length = self._length + 1 if type(error) is self._kind else 1
        self._kind = type(error)
        if self._length >= MOST_FAILURES and not isinstance(error, OSError):
            log.critical("%s failed %d times in a row; leaving", type(error).__name__, self._length)
            logging.shutdown()
            self._leave(1)


def signal_on_parent_death() -> None:
    """Ask the kernel for SIGTERM when the parent dies. Kept over exec; a no-op where Linux's prctl is missing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def die_with_parent() -> None:
    """Leave when the process named in OPENRL_PARENT_PID is no longer our parent. Call it first in `main`."""
    parent = os.environ.get(PARENT_PID, "")
    if not parent.isdigit():
        return
    signal_on_parent_death()
    if os.getppid() != int(parent):
        raise SystemExit("the process that started this one is gone; leaving")
    threading.Thread(target=_watch, args=(int(parent),), name="parent-watch", daemon=True).start()


def keep_freed_memory(size: int) -> None:
    """Keep up to `size` bytes of freed memory for what comes next, where the C library is glibc; a no-op elsewhere.

    By itself it gives a freed MiB back at once and gets it again page by page, which costs more than copying it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, size)
        mallopt(_M_MMAP_THRESHOLD, min(size, _MOST_MMAP_THRESHOLD))


def most_open_files() -> int:
    """Return how many open files `raise_open_files` can get."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)


def raise_open_files() -> int:
    """Let this process, and what it starts, open as many files as the hard limit allows; return how many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = most_open_files()
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    return MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def leave(status: int) -> NoReturn:
    """End this process with `status`, whatever its threads are at: all that matters is in the store by now.

    An interpreter that ends in order under a thread inside torch aborts ("terminate called without an active
    exception", SIGABRT): a worker whose bound for stopping ran out in the midst of a pass.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)
