"""What one version of a full model says about itself: `manifest.json` in its directory.

It names its parent and that one's digest, and for every tensor the digests before and after; its own digest is over all
of that. A version holds a delta from its parent, or all weights (an anchor), or both. Everything is checked before
anything is allocated for it. Without torch.
"""

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from openrl.tasks.errors import InvalidRequest, NotFound, OtherVersion, shown
from openrl.tasks.schema import Schema
from openrl.workers.weights import planes
from openrl.workers.weights.digests import is_manifest_digest, is_weights_digest, manifest_digest
from openrl.workers.weights.layout import resolve
from openrl.workers.weights.specs import BLOCK, MAX_BYTES, Segment, Spec, check, check_all, segments

FILENAME = "manifest.json"
SCHEMA = Schema(noun="version of a full model", number=2)
"""2: changes are encoded over several tensors at once. A version of 1 is to be published again."""
MAX_MANIFEST_BYTES = 64 << 20
MAX_EXTRA_BYTES = 64 << 10
_NAME = re.compile(r"[@A-Za-z0-9][A-Za-z0-9._\-]{0,200}")


@dataclass(frozen=True, slots=True)
class Ident:
    """Which version weights are: its directory's name, its manifest's digest, and how many came before it."""

    name: str
    digest: str
    number: int


@dataclass(frozen=True, slots=True)
class File:
    """Size and digest of a file beside the manifest; an anchor has no digest of its own, its tensors have."""

    size_bytes: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """The header of one segment's change: what `planes.Piece` is without its bytes."""

    form: str
    count: int
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorLink:
    """One tensor: its digest, and in a delta its digest before."""

    spec: Spec
    result: str
    base: str | None = None

    @property
    def is_changed(self) -> bool:
        """Whether its bits are others than in its parent."""
        return self.base != self.result


@dataclass(frozen=True, kw_only=True)
class Link:
    """One version of a full model."""

    name: str
    number: int
    step: int
    """Optimizer steps taken."""
    tensors: Mapping[str, TensorLink] = field(repr=False)
    parent: Ident | None = None
    """What the delta leads from; None where there is none."""
    delta: File | None = None
    blocks: tuple[Block, ...] = field(default=(), repr=False)
    """What the delta says of each of `specs.segments`."""
    anchor: File | None = None
    num_since_anchor: int = 0
    """Deltas from the last anchor to here; 0 where this is one."""
    bytes_since_anchor: int = 0
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What its writer alone reads back (JSON values)."""

    @cached_property
    def text(self) -> bytes:
        """The one form in which this manifest can be written."""
        return _text(self)

    @cached_property
    def ident(self) -> Ident:
        """Its name, digest and number."""
        return Ident(self.name, manifest_digest(self.text), self.number)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Type and shape of each tensor."""
        return {name: tensor.spec for name, tensor in self.tensors.items()}

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """How its tensors are joined."""
        return segments(self.specs)

    @property
    def results(self) -> dict[str, str]:
        """Digest of each tensor in this version."""
        return {name: tensor.result for name, tensor in self.tensors.items()}

    @property
    def bases(self) -> dict[str, str | None]:
        """Digest of each tensor in its parent."""
        return {name: tensor.base for name, tensor in self.tensors.items()}

    @property
    def size_bytes(self) -> int:
        """Of all weights, in memory."""
        return sum(tensor.spec.size_bytes for tensor in self.tensors.values())


def directory(home: Path, name: str) -> Path:
    """Where the version `name` lies, or is to lie.

    Raises:
        InvalidRequest: no such name is possible, or it leads elsewhere.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"version {shown(name)} is not allowed; it must be 1 to 201 of letters, digits and . _ -, maybe after an @"
        )
    return resolve(home, name)


def write(folder: Path, link: Link) -> Ident:
    """Write the manifest into a staged directory; return what the version is known by."""
    (folder / FILENAME).write_bytes(link.text)
    return link.ident


def read(home: Path, name: str, *, digest: str | None = None) -> Link:
    """Read a version's manifest: the very one that `digest` means, where that is known.

    Raises:
        NotFound: there is no such version.
        InvalidRequest: it is torn, altered, another one, or says what can't be.
    """
    path = directory(home, name) / FILENAME
    if not path.parent.is_dir():
        raise NotFound(f"version {name!r} is no longer on disk; publish it again")
    text = _bytes(path)
    found = manifest_digest(text)
    if digest is not None and found != digest:
        raise InvalidRequest(
            f"version {name!r} has the digest {found[:12]}, not {digest[:12]}: it is another, or altered"
        )
    try:
        link = _link(SCHEMA.current(json.loads(text)))
    except OtherVersion as other:
        raise InvalidRequest(f"version {name!r} can't be read: {other}") from other
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"{FILENAME} of version {name!r} is damaged: {error}") from error
    if link.name != name or link.text != text:
        raise InvalidRequest(f"{FILENAME} of version {name!r} is damaged, or another version's")
    return link


def open_file(home: Path, link: Link, name: str, expected: File) -> int:
    """Open a file of a version for reading, which is a plain one of the expected size; return its descriptor.

    Raises:
        InvalidRequest: it isn't there, is no plain file, or has another size.
    """
    what = f"{name} of version {link.name!r}"
    try:
        handle = os.open(directory(home, link.name) / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest(f"{what} can't be opened: {error.strerror}") from error
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size != expected.size_bytes:
        os.close(handle)
        raise InvalidRequest(f"{what} has {found.st_size} bytes; its manifest says {expected.size_bytes}: it is torn")
    return handle


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise InvalidRequest(f"version {path.parent.name!r} has no readable {FILENAME}") from error
    if len(text) > MAX_MANIFEST_BYTES:
        raise InvalidRequest(f"{FILENAME} of version {path.parent.name!r} has over {MAX_MANIFEST_BYTES} bytes")
    return text


def _text(link: Link) -> bytes:
    row = {
        **{key: getattr(link, key) for key in ("name", "number", "step", "num_since_anchor", "bytes_since_anchor")},
        **{key: value and asdict(value) for key, value in _parts(link).items()},
        "extra": dict(link.extra),
        "blocks": [[block.form, block.count, list(block.lengths)] for block in link.blocks],
        "tensors": {name: _row(tensor) for name, tensor in link.tensors.items()},
    }
    return json.dumps(SCHEMA.numbered(row), sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _parts(link: Link) -> dict[str, Ident | File | None]:
    return {"parent": link.parent, "delta": link.delta, "anchor": link.anchor}


def _row(tensor: TensorLink) -> list[Any]:
    return [tensor.spec.dtype, list(tensor.spec.shape), tensor.base, tensor.result]


def _link(row: dict[str, Any]) -> Link:
    """Read a manifest; `ValueError` and its kin say that a field is wrong."""
    parent, delta, anchor = row.pop("parent"), row.pop("delta"), row.pop("anchor")
    tensors = {name: _tensor(name, value, is_delta=delta is not None) for name, value in row.pop("tensors").items()}
    shapes = {name: tensor.spec for name, tensor in tensors.items()}
    check_all(shapes)
    link = Link(
        **{**row, "blocks": _blocks(shapes, row["blocks"], is_delta=delta is not None)},
        tensors=tensors,
        parent=None if parent is None else Ident(**parent),
        delta=None if delta is None else File(**delta),
        anchor=None if anchor is None else File(**anchor),
    )
    _check(link)
    return link


def check_said(link: Link) -> None:
    """Refuse what a writer may say wrongly.

    Raises:
        InvalidRequest: it names the field.
    """
    for name in ("number", "step", "num_since_anchor", "bytes_since_anchor"):
        _number(name, getattr(link, name))
    if not isinstance(link.extra, dict) or len(_extra(link.extra)) > MAX_EXTRA_BYTES:
        raise InvalidRequest(f"extra is {shown(link.extra)}; it must be an object of up to {MAX_EXTRA_BYTES} bytes")


def _extra(extra: dict[str, Any]) -> str:
    try:
        return json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"extra is {shown(extra)}; it must be a JSON object: {error}") from error


def _check(link: Link) -> None:
    check_said(link)
    if (link.parent is None) != (link.delta is None) or (link.delta is None and link.anchor is None):
        raise InvalidRequest("a version has a parent and a delta, or all weights, or both")
    if link.parent is not None:
        _check_parent(link.parent, link.number)
    for file, digested in ((link.delta, True), (link.anchor, False)):
        if file is not None:
            _number("size_bytes", file.size_bytes)
            if not (is_weights_digest(file.digest) if digested else file.digest is None):
                raise InvalidRequest(f"a file's digest is {shown(file.digest)}")


def _check_parent(parent: Ident, number: int) -> None:
    if parent.number != number - 1 or not is_manifest_digest(parent.digest) or not _NAME.fullmatch(parent.name):
        raise InvalidRequest(f"parent {shown(parent)} can't come before number {number}")


def _tensor(name: str, row: list[Any], *, is_delta: bool) -> TensorLink:
    dtype, shape, base, result = row
    spec = Spec(dtype, tuple(shape))
    check(name, spec)
    if not is_weights_digest(result) or not (is_weights_digest(base) if is_delta else base is None):
        raise InvalidRequest(f"tensor {name} has the digests {shown(base)} and {shown(result)}")
    return TensorLink(spec, result, base)


def _blocks(shapes: Mapping[str, Spec], rows: list[Any], *, is_delta: bool) -> tuple[Block, ...]:
    least = sum(spec.num_elements for spec in shapes.values()) // BLOCK if is_delta else 0
    joined = segments(shapes) if is_delta and least <= len(rows) else ()
    if len(rows) != len(joined):
        raise InvalidRequest(f"tensors of {max(least, len(joined))} segments or more have {len(rows)} blocks")
    blocks = tuple(Block(form, count, tuple(lengths)) for form, count, lengths in rows)
    for segment, block in zip(joined, blocks, strict=True):
        planes.check(block.form, block.count, len(block.lengths), size=segment.size, width=segment.width)
        for length in block.lengths:
            _number("a frame's length", length)
    return blocks


def _number(name: str, value: object) -> None:
    if type(value) is not int or not 0 <= value <= MAX_BYTES:
        raise InvalidRequest(f"{name} is {shown(value)}; it must be an integer from 0 to {MAX_BYTES}")
