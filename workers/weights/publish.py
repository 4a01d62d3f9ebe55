"""A trainer's side of full weights: publish a version as what changed since the one published before it.

However many optimizer steps lie between, only what differs bit by bit from the last *published* version counts. Now and
then a version carries all weights besides (an anchor): a sampler that starts, or misses a link, needs a short chain.
What differs may be found before anybody asks for a version (`stage`): to publish it is then to write it.
"""

import io
import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from openrl.tasks.errors import InvalidRequest, shown
from openrl.workers.weights import anchor, delta, layout, links, planes
from openrl.workers.weights.delta import DeltaWriter
from openrl.workers.weights.digests import block_digest, tensor_digests
from openrl.workers.weights.lanes import THREADS, fitting, in_order
from openrl.workers.weights.links import Block, File, Link, TensorLink
from openrl.workers.weights.resident import Resident
from openrl.workers.weights.specs import Spec, Words, differences, segments

log = logging.getLogger(__name__)

ANCHOR_EVERY = 20
"""Versions from one anchor to the next: at 1 % density a chain of 19 deltas is then a sixth of an anchor."""


@dataclass(frozen=True, slots=True)
class _Encoded:
    """What leads from one set of weights to another, without its bytes."""

    results: Mapping[str, str]
    """Digest of each tensor afterwards."""
    blocks: tuple[Block, ...]
    file: File


@dataclass(frozen=True, slots=True, eq=False)
class Staged:
    """Weights to be published, and in memory the delta to them from the version that was the last one then."""

    weights: Resident
    base: Resident
    encoded: _Encoded
    data: memoryview


class Publisher:
    """Publishes one run's versions into `home`, one after another; keeps the weights of the last one.

    Which published version counts is for the caller's registry to say: a rename alone never does.
    """

    def __init__(
        self, home: Path, *, base: Resident | None = None, anchor_every: int = ANCHOR_EVERY, threads: int = THREADS
    ) -> None:
        """Go on from `base`, which a reader loaded and nobody else changes from now on, or begin with an anchor.

        Raises:
            InvalidRequest: `anchor_every` or `threads` is under 1, or `base` is no version.
        """
        for what, value in (("anchor_every", anchor_every), ("threads", threads)):
            if type(value) is not int or value < 1:
                raise InvalidRequest(f"{what} is {shown(value)}; it must be an integer from 1 on")
        if base is not None and base.at is None:
            raise InvalidRequest("base is no version; load one into it first")
        self._home, self._anchor_every, self._threads = home, anchor_every, threads
        self._base = base
        self._last = None if base is None or base.at is None else links.read(home, base.at.name, digest=base.at.digest)

    def stage(self, tensors: Mapping[str, Tensor], *, gives: bool = False) -> Staged | None:
        """Find and encode what differs from the last version; None where there is none to differ from.

        Nothing is written, and no version follows unless `publish` is given the result. Tensors as there.

        Raises:
            InvalidRequest: a tensor makes no sense.
        """
        weights = _owned(tensors, gives=gives)
        base = self._base
        _refuse_kept(base, weights)
        if base is None or differences(weights.specs, base.specs):
            return None
        out = io.BytesIO()
        return Staged(weights, base, self._encode(out, weights, base), out.getbuffer())

    def publish(
        self,
        name: str,
        tensors: Mapping[str, Tensor] | Staged,
        *,
        step: int,
        extra: Mapping[str, Any] | None = None,
        gives: bool = False,
    ) -> Link:
        """Publish all weights as version `name`; it is durable and whole when this returns.

        The tensors lie on the CPU, contiguous, and don't change meanwhile. With `gives` they are the publisher's from
        now on: nobody changes them any more, and it needn't copy what the next version is compared with. Where the disk
        fails, nothing was published, and the next version is an anchor.

        Raises:
            InvalidRequest: the name or a tensor makes no sense; nothing has changed.
            FileExistsError: there is such a version; versions are never replaced.
            OSError: the disk refused, and why.
        """
        final = links.directory(self._home, name)
        if final.exists():
            raise FileExistsError(f"version {name!r} was already published; versions are never replaced")
        staged = tensors if isinstance(tensors, Staged) else None
        weights = tensors.weights if isinstance(tensors, Staged) else _owned(tensors, gives=gives)
        draft = Link(name=name, number=0, step=step, tensors={}, extra=extra or {})
        links.check_said(draft)
        base, last = self._base, self._last
        _refuse_kept(base, weights)
        self._base = self._last = None  # until all is well
        folder = layout.staging(final)
        try:
            link = self._fill(folder, draft, weights, base, last, staged)
            ident = links.write(folder, link)
            layout.publish(folder, final)
        except BaseException:
            layout.remove(folder)
            raise
        weights.settle(ident, link.results)
        self._base, self._last = weights, link
        return link

    def _fill(
        self,
        folder: Path,
        draft: Link,
        weights: Resident,
        base: Resident | None,
        last: Link | None,
        staged: Staged | None,
    ) -> Link:
        """Write the files of a version; return its manifest."""
        link = draft if last is None else replace(draft, number=last.number + 1)
        changed = "nothing was published before" if base is None else differences(weights.specs, base.specs)
        if base is None or last is None or changed:
            log.info("version %s has no delta: %s", link.name, changed)
            link = replace(link, tensors=self._digested(weights))
        else:
            path = folder / delta.FILENAME
            with path.open("xb") as out:
                if staged is not None and staged.base is base:
                    found = staged.encoded
                    out.write(staged.data)
                else:
                    found = self._encode(out, weights, base)
            link = _led(link, weights, base, last, found)
            if link.delta is None:
                path.unlink()
        if link.delta is None or self._wants_anchor(link):
            file = anchor.write(folder / anchor.FILENAME, weights.specs, weights.words)
            link = replace(link, anchor=file, num_since_anchor=0, bytes_since_anchor=0)
        return link

    def _encode(self, out: BinaryIO, weights: Resident, base: Resident) -> _Encoded:
        """Write what leads from `base` to `weights`."""
        joined = segments(weights.specs)
        jobs = ([(part.of(base.words), part.of(weights.words)) for part in each.parts] for each in joined)
        writer, blocks, digests = DeltaWriter(out), [], []
        with closing(in_order(planes.encode, jobs, threads=fitting(self._threads, joined))) as encoded:
            for piece, found in encoded:
                blocks.append(writer.add(piece))
                digests.append(found)
        return _Encoded(tensor_digests(weights.specs, joined, digests), tuple(blocks), writer.file)

    def _digested(self, weights: Resident) -> dict[str, TensorLink]:
        joined = segments(weights.specs)
        jobs = ([part.of(weights.words) for part in each.parts] for each in joined)
        digests = list(in_order(_digests, jobs, threads=fitting(self._threads, joined)))
        return _rows(weights.specs, tensor_digests(weights.specs, joined, digests))

    def _wants_anchor(self, link: Link) -> bool:
        """After so many deltas, or when they take as long to read as all weights."""
        return link.num_since_anchor >= self._anchor_every or link.bytes_since_anchor >= link.size_bytes


def _owned(tensors: Mapping[str, Tensor], *, gives: bool) -> Resident:
    """Return weights that nobody else changes: copies of these, unless they were given away."""
    weights = Resident(tensors)
    return weights if gives else Resident({name: tensor.clone() for name, tensor in tensors.items()})


def _led(link: Link, weights: Resident, base: Resident, last: Link, found: _Encoded) -> Link:
    """Say of a version what leads to it; without a delta, if that is larger than all weights."""
    if found.file.size_bytes >= last.size_bytes:
        return replace(link, tensors=_rows(weights.specs, found.results))
    return replace(
        link,
        tensors=_rows(weights.specs, found.results, base.digests),
        blocks=found.blocks,
        parent=base.at,
        delta=found.file,
        num_since_anchor=last.num_since_anchor + 1,
        bytes_since_anchor=last.bytes_since_anchor + found.file.size_bytes,
    )


def _digests(parts: Iterable[Words]) -> list[bytes]:
    return [block_digest(part) for part in parts]


def _rows(
    shapes: Mapping[str, Spec], results: Mapping[str, str], bases: Mapping[str, str] | None = None
) -> dict[str, TensorLink]:
    return {
        name: TensorLink(spec, results[name], None if bases is None else bases[name]) for name, spec in shapes.items()
    }


def _refuse_kept(base: Resident | None, weights: Resident) -> None:
    """Memory that is ours since the last version would be compared with itself."""
    ours = {words.ctypes.data for words in base.words.values() if words.nbytes} if base is not None else set()
    for name, words in weights.words.items():
        if words.nbytes and words.ctypes.data in ours:
            raise InvalidRequest(f"tensor {name} was given to the publisher before; it must be a copy")
