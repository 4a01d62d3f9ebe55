"""Archives: a checkpoint's files as one tar.gz that is made while it is read, its length known before its first byte.

The files are put in as they are (adapters hardly get smaller), so nothing of the archive is ever held but the piece
that is being sent. Knows no HTTP and not which files a checkpoint has.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

NAME = "archive.tar.gz"

COMPLETE = "checkpoint_complete"
"""An empty file at the end: old clients take an archive without it for one that broke off."""

_PIECE = 65535
"""Bytes of one piece: the most that deflate stores as they are (RFC 1951, 3.2.4)."""
_GZIP_HEAD = bytes((0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255))
_GZIP_ENDS = len(_GZIP_HEAD) + 8


class Archive:
    """Files under their names in one archive. They stay open until `close`: a deletion meanwhile does no harm."""

    def __init__(self, files: Mapping[str, Path], *, modified: float) -> None:
        """Open the files. FileNotFoundError: one of them is gone."""
        self._opened = ExitStack()
        self._members: list[tuple[bytes, BinaryIO | None, int]] = []
        try:
            for name, path in files.items():
                file = self._opened.enter_context(path.open("rb"))
                size = path.stat().st_size
                self._members.append((_head(name, size, modified), file, size))
        except BaseException:
            self.close()
            raise
        self._members.append((_head(COMPLETE, 0, modified), None, 0))

    @property
    def num_bytes(self) -> int:
        """How long the archive is."""
        tar = 2 * tarfile.BLOCKSIZE + sum(len(head) + size + _padding(size) for head, _, size in self._members)
        num_pieces = -(-tar // _PIECE)
        return _GZIP_ENDS + tar + 5 * num_pieces

    def pieces(self) -> Iterator[bytes]:
        """Yield the archive, about 64 KiB at a time."""
        yield _GZIP_HEAD
        check = size = 0
        held = b""
        for part in self._tar():
            check, size, held = zlib.crc32(part, check), size + len(part), held + part
            while len(held) > _PIECE:
                yield _stored(held[:_PIECE], last=False)
                held = held[_PIECE:]
        yield _stored(held, last=True)
        yield check.to_bytes(4, "little") + (size % 2**32).to_bytes(4, "little")

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def _tar(self) -> Iterator[bytes]:
        for head, file, size in self._members:
            yield head
            left = size
            while file is not None and left:
                part = file.read(min(left, _PIECE))
                if not part:
                    raise OSError(f"a file of a version ended {left} bytes early")
                left -= len(part)
                yield part
            yield bytes(_padding(size))
        yield bytes(2 * tarfile.BLOCKSIZE)


def _head(name: str, size: int, modified: float) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, int(modified), 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


def _padding(size: int) -> int:
    return -size % tarfile.BLOCKSIZE


def _stored(piece: bytes, *, last: bool) -> bytes:
    """Return one block of deflate that holds its bytes as they are."""
    return bytes((int(last),)) + len(piece).to_bytes(2, "little") + (len(piece) ^ 0xFFFF).to_bytes(2, "little") + piece
