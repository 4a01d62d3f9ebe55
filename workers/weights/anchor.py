"""An anchor: all weights of a version, as one safetensors file that stock readers open.

Its header follows from the names, types and shapes (github.com/huggingface/safetensors, "Format"): a length, JSON,
padding, then the tensors one after another, wide types first so that all are aligned. So a reader compares the header
with the one that it expects, byte for byte, trusts no offset, and reads block by block straight to where the weights
belong. Without torch.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights.links import File, Link, open_file
from openrl.workers.weights.specs import BLOCK, Spec, Words

FILENAME = "model.safetensors"


def header(specs: Mapping[str, Spec]) -> bytes:
    """The bytes before the first tensor."""
    rows: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, (start, end) in _places(specs).items():
        rows[name] = {"dtype": specs[name].dtype, "shape": list(specs[name].shape), "data_offsets": [start, end]}
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def size_bytes(specs: Mapping[str, Spec]) -> int:
    """Of the whole file."""
    return len(header(specs)) + sum(spec.size_bytes for spec in specs.values())


def write(path: Path, specs: Mapping[str, Spec], words: Mapping[str, Words]) -> File:
    """Write all weights; the disk is asked to keep them when the directory is published."""
    with path.open("xb", buffering=0) as out:
        for part in _parts(specs, words):
            while part:
                part = part[out.write(part) :]
    return File(size_bytes(specs))


class Anchor:
    """An open anchor; a context manager. Which bits it has is known by whoever digests them."""

    def __init__(self, link: Link, handle: int) -> None:
        self.link = link
        self._handle = handle
        head = len(header(link.specs))
        self._starts = {name: head + start for name, (start, _) in _places(link.specs).items()}

    @classmethod
    def open(cls, home: Path, link: Link) -> Self:
        """Open the anchor of a version whose manifest was read.

        Raises:
            InvalidRequest: it is missing, torn, or holds other tensors.
        """
        if link.anchor is None:
            raise InvalidRequest(f"version {link.name!r} is no anchor")
        handle = open_file(home, link, FILENAME, link.anchor)
        expected = header(link.specs)
        if link.anchor.size_bytes != size_bytes(link.specs) or os.pread(handle, len(expected), 0) != expected:
            os.close(handle)
            raise InvalidRequest(f"{FILENAME} of version {link.name!r} holds other tensors than its manifest says")
        return cls(link, handle)

    def read(self, name: str, start: int, into: Words) -> None:
        """Fill `into` with the elements of a tensor from `start` on.

        Raises:
            InvalidRequest: the file became shorter meanwhile.
        """
        view, at = into.data.cast("B"), self._starts[name] + start * into.itemsize
        while view:
            count = os.preadv(self._handle, [view], at)
            if not count:
                raise InvalidRequest(f"{FILENAME} of version {self.link.name!r} ends in the middle of tensor {name}")
            view, at = view[count:], at + count

    def close(self) -> None:
        """Give the file back."""
        os.close(self._handle)


def _places(specs: Mapping[str, Spec]) -> dict[str, tuple[int, int]]:
    places, at = {}, 0
    for name in _order(specs):
        places[name] = (at, at + specs[name].size_bytes)
        at += specs[name].size_bytes
    return places


def _order(specs: Mapping[str, Spec]) -> list[str]:
    return sorted(specs, key=lambda name: (-specs[name].width, name))


def _parts(specs: Mapping[str, Spec], words: Mapping[str, Words]) -> Iterable[memoryview]:
    yield memoryview(header(specs))
    for name in _order(specs):
        yield from (words[name][start : start + BLOCK].data.cast("B") for start in range(0, len(words[name]), BLOCK))
