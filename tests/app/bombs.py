"""Bodies that are far larger than they look, sent to the application in a process of its own, which says what it took.

`python -m tests.app.bombs STORE_URL DATA_DIR`: one JSON line a body: its name, the status and the peak's growth in MiB.
"""

from __future__ import annotations

import gzip
import io
import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zstandard

from tests.app import walk
from tests.app.conftest import GOLDEN
from tests.app.walk import PROTOBUF

MIB = 1 << 20
JSON = {"Content-Type": "application/json"}
ZSTD, GZIP = {"Content-Encoding": "zstd"}, {"Content-Encoding": "gzip"}


def squeezed(piece: bytes, mebibytes: int, *, before: bytes = b"", after: bytes = b"") -> bytes:
    """Compress a piece over and over, never holding more than a MiB of it."""
    packer = zstandard.ZstdCompressor().compressobj()
    whole = piece * (MIB // len(piece))
    parts = [packer.compress(before), *(packer.compress(whole) for _ in range(mebibytes)), packer.compress(after)]
    return b"".join([*parts, packer.flush()])


class Zeros(io.RawIOBase):
    """A body that is never held: so many zeros."""

    def __init__(self, size: int) -> None:
        self._size, self._at = size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self._size - self._at)
        buffer[:size] = bytes(size)
        self._at += size
        return size


def bodies() -> Iterator[tuple[str, str, dict[str, str], bytes | int]]:
    """Yield name, route, headers and body of each; a number is so many zeros."""
    fb = "/forward_backward"
    yield "1 GiB of zeros in zstd", fb, PROTOBUF | ZSTD, squeezed(bytes(MIB), 1024)
    yield "many frames of zstd", fb, PROTOBUF | ZSTD, zstandard.compress(b"") * 100_000
    yield "40 MiB of empty datums", fb, PROTOBUF | ZSTD, squeezed(b"\x1a\x00", 40)
    yield "40 MiB of unknown fields", fb, PROTOBUF | ZSTD, squeezed(b"\x78\x01", 40)
    yield "7 MiB of unknown fields", fb, PROTOBUF | ZSTD, squeezed(b"\x78\x01", 7, before=GOLDEN)
    yield "40 MiB of settings", fb, PROTOBUF | ZSTD, squeezed(b"\x2a\x00", 40)
    many, listed = "/asample", {"before": b'{"prompt":[', "after": b"1]}"}
    yield "40 MiB of lists in JSON", many, JSON | ZSTD, squeezed(b"[],", 40, **listed)
    yield "20 MiB of objects in JSON", many, JSON | ZSTD, squeezed(b"{},", 20, **listed)
    yield "10 MiB of texts in JSON", many, JSON | ZSTD, squeezed(b'"aa",', 10, **listed)
    yield "30 MiB of digits", many, JSON | ZSTD, squeezed(b"1", 30, before=b'{"seq_id":', after=b"}")
    yield "30 MiB of brackets", many, JSON | ZSTD, squeezed(b"[", 30)
    yield "1 GiB in gzip", fb, PROTOBUF | GZIP, gzip.compress(bytes(16 * MIB), 1) * 64
    yield "100 MB, as said", fb, PROTOBUF, 100_000_000
    yield "100 MB of JSON, as said", "/create_session", JSON, 100_000_000
    yield "100 MB, unsaid", fb, PROTOBUF | {"Transfer-Encoding": "chunked"}, 100_000_000


def peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


def main(store_url: str, data_dir: str) -> None:
    """Send them all, the compressed ones made beforehand."""
    made = [(name, route, headers, body) for name, route, headers, body in bodies()]
    with walk.serving(store_url, Path(data_dir)) as (app, _):
        client = app.test_client()
        for name, route, headers, body in made:
            sent: dict[str, Any] = {"data": body}
            if isinstance(body, int):
                chunked = "Transfer-Encoding" in headers
                environ = {"wsgi.input_terminated": True} if chunked else {"CONTENT_LENGTH": str(body)}
                sent = {"input_stream": io.BufferedReader(Zeros(body)), "environ_overrides": environ}
            before = peak_mib()
            answer = client.post(f"/api/v1{route}", headers=headers, **sent)
            row = {
                "name": name,
                "status": answer.status_code,
                "grew_mib": peak_mib() - before,
                "said": answer.text[:300],
            }
            print(json.dumps(row))


if __name__ == "__main__":
    main(*sys.argv[1:])
