"""A device of bounded size for the CPU: what lies on it is booked in a file that all its processes share.

So processes that take turns without an accelerator are held to the same as with one: where two states would lie there
together, the second finds no room. The bytes themselves are in each process's own memory, taken and released as on a
device. What a process had is free once it is gone, as a driver would have it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from openrl.timeslice.holder import Process


class ArenaFull(MemoryError):
    """There is no room for this beside what lies there."""


class Arena:
    """The device. `path` is the book, made by whoever comes first; all processes name the same size.

    Raises:
        ValueError: the size makes no sense, or isn't the one that the others use.
    """

    pins = False

    def __init__(self, path: Path, *, size_bytes: int) -> None:
        if size_bytes <= 0:
            raise ValueError(f"size_bytes is {size_bytes}; it must be above 0")
        self._path = path
        self._size_bytes = size_bytes
        self._me = Process.of(os.getpid())
        with self._book() as rows:
            sizes = {row["arena"] for row in rows}
            if sizes - {size_bytes}:
                raise ValueError(f"size_bytes is {size_bytes}; other processes use {path} with {min(sizes)}")

    def take(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Book bytes, then allocate them."""
        self._add_if_it_fits(sum(size_bytes for _, size_bytes in storages))
        for storage, size_bytes in storages:
            storage.resize_(size_bytes)

    def admit(self, tensors: Iterable[torch.Tensor]) -> None:
        """Book tensors that were allocated before they were put here."""
        sizes = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        self._add_if_it_fits(sum(sizes.values()))

    def give_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Release storages, then their bookings."""
        released = 0
        for storage in storages:
            released += storage.nbytes()
            storage.resize_(0)
        with self._book() as rows:
            self._add(rows, -released)

    def leave(self) -> None:
        """Take everything of this process out of the book, also what was freed without being given back."""
        with self._book() as rows:
            self._add(rows, -sum(row["bytes"] for row in rows if row["pid"] == self._me.pid))

    def barrier(self) -> None:
        """Copies on a CPU are through when they return."""

    def resident(self) -> dict[int, int]:
        """Return who has something here: pid -> bytes."""
        with self._book() as rows:
            return {row["pid"]: row["bytes"] for row in rows if row["bytes"]}

    def _add_if_it_fits(self, size_bytes: int) -> None:
        with self._book() as rows:
            taken = sum(row["bytes"] for row in rows)
            if taken + size_bytes > self._size_bytes:
                raise ArenaFull(
                    f"{size_bytes} bytes don't fit: {taken} of {self._size_bytes} are taken, by {self._who(rows)}"
                )
            self._add(rows, size_bytes)

    def _add(self, rows: list[dict[str, int]], change: int) -> None:
        for row in rows:
            if row["pid"] == self._me.pid:
                # What grew since it was brought here was never booked.
                row["bytes"] = max(0, row["bytes"] + change)
                return
        rows.append({"pid": self._me.pid, "start": self._me.start, "bytes": max(0, change), "arena": self._size_bytes})

    @staticmethod
    def _who(rows: list[dict[str, int]]) -> str:
        return ", ".join(f"process {row['pid']} ({row['bytes']})" for row in rows if row["bytes"]) or "nobody"

    @contextmanager
    def _book(self) -> Iterator[list[dict[str, int]]]:
        """Open the book alone; what was changed is written back, unless the body raises."""
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            rows = self._read(file)
            yield rows
            file.seek(0)
            file.truncate()
            file.write(json.dumps(rows))

    @staticmethod
    def _read(file: IO[str]) -> list[dict[str, int]]:
        file.seek(0)
        rows: list[dict[str, int]] = json.loads(file.read() or "[]")
        return [row for row in rows if not Process(row["pid"], row["start"]).is_gone()]
