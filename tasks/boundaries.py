"""Named boundaries between two steps of a process, at which the chaos test ends or stops it.

Inert, and no more than one comparison, unless OPENRL_TEST_BOUNDARIES names a directory; only tests set it. There the
file `<name>` holds how often the boundary is still to be passed, and a signal. The process that finds 0 removes the
file and sends itself the signal: SIGKILL, to be gone between those two steps; SIGSTOP, to sleep there.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "OPENRL_TEST_BOUNDARIES"

NAMES = (
    "api.spooled", "api.appended",
    "trainer.taken", "trainer.executed", "trainer.committed", "trainer.restored", "trainer.repeated",
    "snapshot.written", "snapshot.registered",
    "weights.staged", "weights.renamed",
    "trainer.handing_back", "trainer.handed_back",
    "sampler.taken", "sampler.drawn", "sampler.committed",
    "scheduler.decided", "scheduler.applied",
)  # fmt: skip
"""Where something may end: what is before the boundary has happened, what is behind it has not."""

_DIRECTORY = os.environ.get(VARIABLE, "")


def reach(name: str) -> None:
    """Say that the process is at a boundary."""
    if _DIRECTORY:
        _reach(Path(_DIRECTORY) / name)


def arm(directory: Path, name: str, *, passes: int = 0, number: signal.Signals = signal.SIGKILL) -> Path:
    """Let the process that next comes by, after so many passes, get a signal; the file that this makes goes then."""
    assert name in NAMES, name
    staged = directory / f".{name}"
    staged.write_text(f"{passes} {number.name}")
    return staged.rename(directory / name)


def _reach(path: Path) -> None:
    try:
        passes, number = path.read_text().split()
        if int(passes) > 0:
            path.write_text(f"{int(passes) - 1} {number}")
            return
        path.unlink()  # of two processes at the same boundary, the one that removes the file
    except (FileNotFoundError, ValueError):
        return
    os.kill(os.getpid(), signal.Signals[number])
