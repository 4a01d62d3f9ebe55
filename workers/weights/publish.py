"""A trainer's side of full weights: publish a version as what changed since the one published before it.

However many optimizer steps lie between, only what differs bit by bit from the last *published* version counts. Now and
then a version carries all weights besides (an anchor): a sampler that starts, or misses a link, needs a short chain.
"""

import logging
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from openrl.tasks.errors import InvalidRequest, shown
from openrl.workers.weights import anchor, delta, layout, links, planes
from openrl.workers.weights.delta import DeltaWriter
from openrl.workers.weights.digests import block_digest, tensor_digests
from openrl.workers.weights.lanes import THREADS, fitting, in_order
from openrl.workers.weights.links import Link, TensorLink
from openrl.workers.weights.resident import Resident
from openrl.workers.weights.specs import Spec, Words, differences, segments

log = logging.getLogger(__name__)

ANCHOR_EVERY = 20
"""Versions from one anchor to the next: at 1 % density a chain of 19 deltas is then a sixth of an anchor."""


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

    def publish(
        self,
        name: str,
        tensors: Mapping[str, Tensor],
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
        weights = Resident(tensors)
        if not gives:
            weights = Resident({each: tensor.clone() for each, tensor in tensors.items()})
        draft = Link(name=name, number=0, step=step, tensors={}, extra=extra or {})
        links.check_said(draft)
        base, last = self._base, self._last
        _refuse_kept(base, weights)
        self._base = self._last = None  # until all is well
        staged = layout.staging(final)
        try:
            link = self._fill(staged, draft, weights, base, last)
            ident = links.write(staged, link)
            layout.publish(staged, final)
        except BaseException:
            layout.remove(staged)
            raise
        weights.settle(ident, link.results)
        self._base, self._last = weights, link
        return link

    def _fill(self, staged: Path, draft: Link, weights: Resident, base: Resident | None, last: Link | None) -> Link:
        """Write the files of a version; return its manifest."""
        link = draft if last is None else replace(draft, number=last.number + 1)
        changed = "nothing was published before" if base is None else differences(weights.specs, base.specs)
        if base is None or last is None or changed:
            log.info("version %s has no delta: %s", link.name, changed)
            link = replace(link, tensors=self._digested(weights))
        else:
            link = self._delta(staged, link, weights, base, last)
        if link.delta is None or self._wants_anchor(link):
            file = anchor.write(staged / anchor.FILENAME, weights.specs, weights.words)
            link = replace(link, anchor=file, num_since_anchor=0, bytes_since_anchor=0)
        return link

    def _delta(self, staged: Path, link: Link, weights: Resident, base: Resident, last: Link) -> Link:
        """Write what leads from `base` to `weights`; leave it out if it is larger than these."""
        joined = segments(weights.specs)
        jobs = ([(part.of(base.words), part.of(weights.words)) for part in each.parts] for each in joined)
        path, blocks, digests = staged / delta.FILENAME, [], []
        threads = fitting(self._threads, joined)
        with DeltaWriter(path) as writer, closing(in_order(planes.encode, jobs, threads=threads)) as encoded:
            for piece, found in encoded:
                blocks.append(writer.add(piece))
                digests.append(found)
            file = writer.file
        results = tensor_digests(weights.specs, joined, digests)
        if file.size_bytes >= last.size_bytes:
            path.unlink()
            return replace(link, tensors=_rows(weights.specs, results))
        return replace(
            link,
            tensors=_rows(weights.specs, results, base.digests),
            blocks=tuple(blocks),
            parent=base.at,
            delta=file,
            num_since_anchor=last.num_since_anchor + 1,
            bytes_since_anchor=last.bytes_since_anchor + file.size_bytes,
        )

    def _digested(self, weights: Resident) -> dict[str, TensorLink]:
        joined = segments(weights.specs)
        jobs = ([part.of(weights.words) for part in each.parts] for each in joined)
        digests = list(in_order(_digests, jobs, threads=fitting(self._threads, joined)))
        return _rows(weights.specs, tensor_digests(weights.specs, joined, digests))

    def _wants_anchor(self, link: Link) -> bool:
        """After so many deltas, or when they take as long to read as all weights."""
        return link.num_since_anchor >= self._anchor_every or link.bytes_since_anchor >= link.size_bytes


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
