"""The delta of a version: one file of compressed frames, in the order of the segments that its tensors are joined to.

Where a frame lies follows from the lengths in the manifest, so frames can't overlap nor lead out of the file. Size and
digest of the file tell a torn one before a frame is read. `planes` knows what is in a frame. Without torch.
"""

import os
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, Self

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights import planes
from openrl.workers.weights.digests import Hasher
from openrl.workers.weights.links import Block, File, Link, open_file
from openrl.workers.weights.planes import Change, Piece

FILENAME = "delta.bin"
MAGIC = b"OPENRLD3"


class DeltaWriter:
    """Writes pieces one after another to a file or to memory; `file` says afterwards what was written."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._digest = Hasher()
        self._size = 0
        self._write(MAGIC)

    def add(self, piece: Piece) -> Block:
        """Append one segment's frames; return what the manifest says of them."""
        for frame in piece.frames:
            self._write(frame)
        return Block(piece.form, piece.count, tuple(map(len, piece.frames)))

    @property
    def file(self) -> File:
        """What was written until now."""
        return File(self._size, self._digest.hexdigest())

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._digest.update(data)
        self._size += len(data)


class Delta:
    """The verified bytes of a version's delta, held in memory."""

    def __init__(self, link: Link, data: bytes) -> None:
        self.link = link
        self._data = memoryview(data)
        self._starts = list(accumulate((sum(block.lengths) for block in link.blocks), initial=len(MAGIC)))

    @classmethod
    def load(cls, home: Path, link: Link) -> Self:
        """Read the delta of a version whose manifest was read.

        Raises:
            InvalidRequest: it is missing, torn or altered.
        """
        expected = link.delta
        if expected is None:
            raise InvalidRequest(f"version {link.name!r} has no delta")
        length = len(MAGIC) + sum(sum(block.lengths) for block in link.blocks)
        if length != expected.size_bytes:
            raise InvalidRequest(f"the frames of version {link.name!r} have {length} bytes, not {expected.size_bytes}")
        with os.fdopen(open_file(home, link, FILENAME, expected), "rb") as file:
            data = file.read(expected.size_bytes)
        if not data.startswith(MAGIC) or Hasher(data).hexdigest() != expected.digest:
            raise InvalidRequest(
                f"{FILENAME} of version {link.name!r} differs from its manifest: it is torn or altered"
            )
        return cls(link, data)

    def change(self, number: int, *, back: bool = False) -> Change | None:
        """Decode what happens to one segment, or with `back` what undoes it; None where nothing does.

        Raises:
            InvalidRequest: the frames are no change of such a segment.
        """
        block, segment = self.link.blocks[number], self.link.segments[number]
        if not block.count:
            return None
        ends = accumulate(block.lengths, initial=self._starts[number])
        frames = [self._data[start:end] for start, end in pairwise(ends)]
        return planes.decode(block.form, block.count, frames, size=segment.size, dtype=segment.dtype, back=back)
