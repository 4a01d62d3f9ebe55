"""A trainer's side of full weights: publish a version as what changed since the one published before it.

However many optimizer steps lie between, only what differs bit by bit from the last *published* version counts. Now and
then a version carries all weights besides (an anchor): a sampler that starts, or misses a link, needs a short chain.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from openrl.tasks.errors import InvalidRequest, shown
from openrl.workers.weights import anchor, delta, layout, links, planes
from openrl.workers.weights.delta import DeltaWriter
from openrl.workers.weights.digests import block_digest, tensor_digest
from openrl.workers.weights.lanes import THREADS, in_order
from openrl.workers.weights.links import Link, TensorLink
from openrl.workers.weights.planes import Piece
from openrl.workers.weights.resident import Resident, specs, words
from openrl.workers.weights.specs import Spec, Words, blocks, differences

log = logging.getLogger(__name__)

ANCHOR_EVERY = 20
"""Versions from one anchor to the next: at 1 % density a chain of 19 deltas is then a sixth of an anchor."""

Done = TypeVar("Done")


class Publisher:
    """Publishes one run's versions into `home`, one after another; keeps a copy of the last one.

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

    def publish(
        self, name: str, tensors: Mapping[str, Tensor], *, step: int, extra: Mapping[str, Any] | None = None
    ) -> Link:
        """Publish all weights as version `name`; it is durable and whole when this returns.

        The tensors lie on the CPU, contiguous, and don't change meanwhile. Where the disk fails, nothing was published,
        and the next version is an anchor.

        Raises:
            InvalidRequest: the name or a tensor makes no sense; nothing has changed.
            FileExistsError: there is such a version; versions are never replaced.
            OSError: the disk refused, and why.
        """
        final = links.directory(self._home, name)
        if final.exists():
            raise FileExistsError(f"version {name!r} was already published; versions are never replaced")
        shapes, bits = specs(tensors), {each: words(each, tensor) for each, tensor in tensors.items()}
        draft = Link(name=name, number=0, step=step, tensors={}, extra=extra or {})
        links.check_said(draft)
        base, last = self._base, self._last
        self._base = self._last = None  # until all is well
        staged = layout.staging(final)
        try:
            base, link = self._fill(staged, draft, shapes, bits, base, last)
            ident = links.write(staged, link)
            layout.publish(staged, final)
        except BaseException:
            layout.remove(staged)
            raise
        base.settle(ident, link.results)
        self._base, self._last = base, link
        return link

    def _fill(
        self,
        staged: Path,
        draft: Link,
        shapes: Mapping[str, Spec],
        bits: Mapping[str, Words],
        base: Resident | None,
        last: Link | None,
    ) -> tuple[Resident, Link]:
        """Write the files of a version; return its weights, in memory of our own, and its manifest."""
        link = draft if last is None else replace(draft, number=last.number + 1)
        changed = "nothing was published before" if base is None else differences(shapes, base.specs)
        if base is None or last is None or changed:
            log.info("version %s has no delta: %s", link.name, changed)
            base = Resident.blank(shapes)
            link = replace(link, tensors=self._copied(base, bits))
        else:
            link = self._delta(staged, link, bits, base, last)
        if link.delta is None or self._wants_anchor(link):
            file = anchor.write(staged / anchor.FILENAME, shapes, base.words)
            link = replace(link, anchor=file, num_since_anchor=0, bytes_since_anchor=0)
        return base, link

    def _delta(self, staged: Path, link: Link, bits: Mapping[str, Words], base: Resident, last: Link) -> Link:
        """Write what leads from `base`, which becomes the new weights; leave it out if it is larger than these."""
        path = staged / delta.FILENAME
        order = delta.names(base.specs)
        jobs = ((base.words[name], bits[name]) for name in order)
        pairs = (pair for old, new in jobs for pair in zip(blocks(old), blocks(new), strict=True))
        tensors = {}
        with DeltaWriter(path) as writer, closing(in_order(_advance, pairs, threads=self._threads)) as encoded:
            for name, found in _by_tensor(order, base.specs, encoded):
                rows = tuple(writer.add(piece) for piece, _ in found)
                result = tensor_digest(base.specs[name], (digest for _, digest in found))
                tensors[name] = TensorLink(base.specs[name], result, base.digests[name], rows)
            file = writer.file
        link = replace(link, tensors=tensors)
        if file.size_bytes >= link.size_bytes:
            path.unlink()
            return replace(link, tensors={name: TensorLink(row.spec, row.result) for name, row in tensors.items()})
        return replace(
            link,
            parent=last.ident,
            delta=file,
            num_since_anchor=last.num_since_anchor + 1,
            bytes_since_anchor=last.bytes_since_anchor + file.size_bytes,
        )

    def _copied(self, base: Resident, bits: Mapping[str, Words]) -> dict[str, TensorLink]:
        """Fill `base` with the new weights, and digest them."""
        order = delta.names(base.specs)
        pairs = (pair for name in order for pair in zip(blocks(base.words[name]), blocks(bits[name]), strict=True))
        digests = in_order(_copy, pairs, threads=self._threads)
        found = _by_tensor(order, base.specs, digests)
        return {name: TensorLink(base.specs[name], tensor_digest(base.specs[name], each)) for name, each in found}

    def _wants_anchor(self, link: Link) -> bool:
        """After so many deltas, or when they take as long to read as all weights."""
        return link.num_since_anchor >= self._anchor_every or link.bytes_since_anchor >= link.size_bytes


def _advance(pair: tuple[Words, Words]) -> tuple[Piece, bytes]:
    return planes.encode(*pair, advance=True)


def _copy(pair: tuple[Words, Words]) -> bytes:
    old, new = pair
    old[:] = new
    return block_digest(old)


def _by_tensor(
    order: list[str], shapes: Mapping[str, Spec], blockwise: Iterator[Done]
) -> Iterator[tuple[str, list[Done]]]:
    """Gather what comes block by block."""
    for name in order:
        yield name, list(islice(blockwise, shapes[name].num_blocks))
