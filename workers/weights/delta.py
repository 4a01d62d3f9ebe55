"""The delta of a version: one file of compressed frames, in the order of the tensors' names and of their blocks.

Where a frame lies follows from the lengths in the manifest, so frames can't overlap nor lead out of the file. Size and
digest of the file tell a torn one before a frame is read. `planes` knows what is in a frame. Without torch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights import planes
from openrl.workers.weights.digests import Hasher
from openrl.workers.weights.links import Block, File, Link, open_file
from openrl.workers.weights.planes import Change, Piece
from openrl.workers.weights.specs import Spec

FILENAME = "delta.bin"
MAGIC = b"OPENRLD2"


class DeltaWriter(AbstractContextManager["DeltaWriter"]):
    """Writes pieces one after another; `file` says afterwards what was written."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("xb")
        self._digest = Hasher()
        self._size = 0
        self._write(MAGIC)

    def add(self, piece: Piece) -> Block:
        """Append one block's frames; return what the manifest says of them."""
        for frame in piece.frames:
            self._write(frame)
        return Block(piece.form, piece.count, tuple(map(len, piece.frames)))

    @property
    def file(self) -> File:
        """What was written until now."""
        return File(self._size, self._digest.hexdigest())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._out.close()

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._digest.update(data)
        self._size += len(data)


class Delta:
    """The verified bytes of a version's delta, held in memory."""

    def __init__(self, link: Link, data: bytes) -> None:
        self.link = link
        self._data = memoryview(data)
        self._starts = _starts(link)

    @classmethod
    def load(cls, home: Path, link: Link) -> Self:
        """Read the delta of a version whose manifest was read.

        Raises:
            InvalidRequest: it is missing, torn or altered.
        """
        expected = link.delta
        if expected is None:
            raise InvalidRequest(f"version {link.name!r} has no delta")
        length = len(MAGIC) + sum(map(sum, _lengths(link)))
        if length != expected.size_bytes:
            raise InvalidRequest(f"the frames of version {link.name!r} have {length} bytes, not {expected.size_bytes}")
        with os.fdopen(open_file(home, link, FILENAME, expected), "rb") as file:
            data = file.read(expected.size_bytes)
        if not data.startswith(MAGIC) or Hasher(data).hexdigest() != expected.digest:
            raise InvalidRequest(
                f"{FILENAME} of version {link.name!r} differs from its manifest: it is torn or altered"
            )
        return cls(link, data)

    def change(self, name: str, number: int, dtype: np.dtype, *, back: bool = False) -> Change | None:
        """Decode what happens to one block of a tensor, or with `back` what undoes it; None where nothing does.

        Raises:
            InvalidRequest: the frames are no change of such a block.
        """
        tensor = self.link.tensors[name]
        block = tensor.blocks[number]
        if not block.count:
            return None
        start, frames = self._starts[name, number], []
        for length in block.lengths:
            frames.append(self._data[start : start + length])
            start += length
        size = tensor.spec.block_sizes[number]
        return planes.decode(block.form, block.count, frames, size=size, dtype=dtype, back=back)


def names(tensors: Mapping[str, Spec]) -> list[str]:
    """The order of tensors in a delta."""
    return sorted(tensors)


def _lengths(link: Link) -> Iterator[Sequence[int]]:
    return (block.lengths for tensor in link.tensors.values() for block in tensor.blocks)


def _starts(link: Link) -> dict[tuple[str, int], int]:
    starts, at = {}, len(MAGIC)
    for name in names(link.specs):
        for number, block in enumerate(link.tensors[name].blocks):
            starts[name, number] = at
            at += sum(block.lengths)
    return starts
