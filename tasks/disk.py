"""The disk under the data directory: whether more may be taken in, and what its refusals are called.

What is new is refused while there is still room to finish what was accepted: results, leases and positions are
written too, and a store with `appendfsync always` ends when it can't write. Knows neither what is written nor who asks.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from openrl.tasks.errors import DiskRefusal

REFUSALS = {
    errno.ENOSPC: "the service's disk is full",
    errno.EDQUOT: "the service's disk quota is used up",
    errno.EROFS: "the service's disk is read-only",
}
"""What a disk says that may write again later, once an operator has looked."""

REMEDY = "nothing was taken in; try again when the operator has made room"


def check_room(data_dir: Path, reserve_bytes: int) -> None:
    """Refuse to take more in while the disk can't be written, or has less left than `reserve_bytes`.

    Raises:
        DiskRefusal: it says which of the two, and what to do.
    """
    try:
        found = os.statvfs(data_dir)
    except OSError as error:
        raise DiskRefusal(f"the service's disk can't be read ({error.strerror}); {REMEDY}") from error
    if found.f_flag & os.ST_RDONLY:
        raise DiskRefusal(f"{REFUSALS[errno.EROFS]}; {REMEDY}")
    left = found.f_bavail * found.f_frsize
    if left < reserve_bytes:
        raise DiskRefusal(
            f"the service's disk has {left >> 20} MiB left, and OPENRL_DISK_RESERVE_BYTES keeps {reserve_bytes >> 20} "
            f"for what was accepted already; {REMEDY}"
        )


@contextmanager
def translated() -> Iterator[None]:
    """Turn a disk's refusal to write into an error of ours; what else goes wrong stays what it is.

    Raises:
        DiskRefusal: the disk is full, its quota is used up, or it is read-only.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise DiskRefusal(f"{REFUSALS[error.errno]}; {REMEDY}") from error
