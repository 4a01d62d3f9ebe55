"""Bytes that are too large for the store live in files, written so that they survive a power cut.

A stowed value is what the store holds: `=` and the bytes themselves, or `@` and a path relative to
the data directory. Names are random, so a file is written once and never changed.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from openrl.tasks import disk
from openrl.tasks.keys import check_tenant

Apart = Callable[..., Any]
"""Calls its first argument with the others, away from a loop that must not stand still, and returns what it returns."""


def here(work: Callable[..., Any], *args: object) -> Any:
    """Return `work(*args)`: a process without a loop has nothing to keep clear."""
    return work(*args)


class Spool:
    """The files of one data directory; every process that shares the directory sees the same.

    Files are written, synced and read through `apart`; what is small enough for the store never is.
    """

    def __init__(self, data_dir: Path, *, inline_bytes: int, apart: Apart = here) -> None:
        self._root = data_dir
        self._inline_bytes = inline_bytes
        self._apart = apart

    def stow(self, tenant: str, data: bytes) -> bytes:
        """Return what to keep in the store for `data`; a large one is on disk before this returns."""
        if len(data) <= self._inline_bytes:
            return b"=" + data
        return str(self._apart(self.write, tenant, data)).encode()

    def load(self, stowed: bytes) -> bytes:
        """Return the bytes behind a stowed value; OSError if its file is lost."""
        if stowed.startswith(b"@"):
            return bytes(self._apart(self.read, stowed.decode()))
        return stowed[1:]

    def size(self, stowed: bytes) -> int:
        """Return how many bytes `load` would give; 0 if the file is lost."""
        if not stowed.startswith(b"@"):
            return len(stowed) - 1
        try:
            return self._path(stowed.decode()).stat().st_size
        except FileNotFoundError:
            return 0

    def discard(self, stowed: bytes) -> None:
        """Delete the file behind a stowed value, if there is one."""
        if stowed.startswith(b"@"):
            self.delete(stowed.decode())

    def write(self, tenant: str, data: bytes) -> str:
        """Write `data` durably and return `@<relative path>`. The name ends with the size, which scripts read there.

        Raises:
            DiskRefusal: it takes nothing now; nothing is left of the file.
        """
        name = f"{secrets.token_hex(16)}-{len(data)}"
        relative = Path("spool", check_tenant(tenant), name[:2], name)
        with disk.translated():
            self._write(self._root / relative, data)
        return f"@{relative.as_posix()}"

    def _write(self, target: Path, data: bytes) -> None:
        _make_directory(target.parent, root=self._root)
        temporary = target.with_suffix(".tmp")
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(target)
            _sync_directory(target.parent)
        except OSError:
            temporary.unlink(missing_ok=True)  # half a file on a full disk takes room that is needed
            raise

    def read(self, reference: str) -> bytes:
        """Return the bytes of `@<relative path>`."""
        return self._path(reference).read_bytes()

    def delete(self, reference: str) -> None:
        """Delete the file of `@<relative path>`; gone already is fine."""
        self._path(reference).unlink(missing_ok=True)

    def files(self) -> Iterator[Path]:
        """Yield every file there is, half-written ones included."""
        for folder, _, names in os.walk(self._root / "spool"):
            yield from (Path(folder, name) for name in names)

    def _path(self, reference: str) -> Path:
        relative = Path(reference.removeprefix("@"))
        assert relative.parts[0] == "spool" and ".." not in relative.parts, reference
        return self._root / relative


def _make_directory(path: Path, *, root: Path) -> None:
    """Create `path` so that its entry in each parent is durable too."""
    if path.is_dir() or path == root:
        return
    _make_directory(path.parent, root=root)
    path.mkdir(mode=0o700, exist_ok=True)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
