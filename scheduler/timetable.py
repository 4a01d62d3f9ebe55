"""The file in which a beat keeps when each task ran last, so that what is due once an hour survives restarts.

Two processes that write one file tear it. So whoever comes first has it, for as long as the process lives; another
scheduler on the same directory keeps its own times, and forgets them at its end. Knows nothing of the tasks.
"""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "beat-schedule"
LOCK = "beat-schedule.lock"


@contextmanager
def timetable(folder: Path) -> Iterator[Path]:
    """Within the `with`, the returned file is this process's alone: the one in `folder`, or one for now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with tempfile.TemporaryDirectory(prefix="openrl-beat-") as own:
                yield Path(own) / NAME
            return
        yield folder / NAME
