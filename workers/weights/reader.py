"""A sampler's side of full weights: bring what is in memory to another version, in place.

`prepare` fetches and verifies while the old version is served: every tensor of the new one is put together elsewhere,
block by block, and digested. Only `Switch.apply` touches the weights, so only that needs a pause. It digests once more
what it made: weights that aren't exactly the version are never vouched for.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights import links
from openrl.workers.weights.anchor import Anchor
from openrl.workers.weights.chain import Route, routes
from openrl.workers.weights.delta import Delta
from openrl.workers.weights.digests import Hasher, tensor_digests
from openrl.workers.weights.lanes import THREADS, fitting, in_order
from openrl.workers.weights.links import Link
from openrl.workers.weights.patches import patch
from openrl.workers.weights.planes import SCRATCH_BYTES, Change, scratch
from openrl.workers.weights.resident import Resident
from openrl.workers.weights.specs import BLOCK, Part, Segment, Words, differences

log = logging.getLogger(__name__)

KEPT_BYTES = 1 << 30
"""Memory for decoded changes between `prepare` and `apply`: six bytes for each bfloat16 weight that changes."""
CHUNK_BYTES = SCRATCH_BYTES // 2
"""Of weights that are patched and digested at once: few enough that they stay near a core, enough that threads don't
wait for the interpreter's lock."""


class Switch:
    """A verified way to a version: everything is fetched, nothing is changed yet. A context manager."""

    def __init__(
        self, resident: Resident, target: Link, route: Route, deltas: list[Delta], anchor: Anchor | None
    ) -> None:
        self.target, self.route = target, route
        self._resident, self._deltas, self._anchor = resident, deltas, anchor
        self._start = resident.at
        self._kept: dict[int, list[Change]] = {}
        """Changes as they were verified, so that the pause needn't decode them again; as many as fit `KEPT_BYTES`."""
        self._room = KEPT_BYTES

    def __enter__(self) -> "Switch":
        """Use it once."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the files and the memory back."""
        self._kept.clear()
        if self._anchor is not None:
            self._anchor.close()

    def apply(self, *, threads: int = THREADS) -> tuple[str, ...]:
        """Make the weights in memory this version; return the tensors that were touched.

        Nobody may use the weights meanwhile. Where it fails they are no version any more: prepare again, which then
        begins with an anchor.

        Raises:
            InvalidRequest: they changed since they were verified; nothing is to be served from them.
        """
        if self._resident.at != self._start:
            raise InvalidRequest(
                f"the weights are no longer those that {self.target.name!r} was prepared on; prepare again"
            )
        touched = self.touched
        self._resident.disown()
        self._check(touched, self._patched, threads=threads)
        self._resident.settle(self.target.ident, self.target.results)
        return touched

    @property
    def touched(self) -> tuple[str, ...]:
        """The tensors that will be touched: all, from an anchor."""
        if self._anchor is not None:
            return tuple(sorted(self.target.tensors))
        return tuple(
            name
            for name in sorted(self.target.tensors)
            if any(each.link.tensors[name].is_changed for each in self._deltas)
        )

    def verify(self, *, threads: int) -> None:
        """Put every tensor together elsewhere, and compare it with its digest.

        Raises:
            InvalidRequest: one differs; it is named.
        """
        self._check(tuple(sorted(self.target.tensors)), self._foreseen, threads=threads)

    def _check(self, names: Collection[str], digested: Callable[["_Job"], list[bytes]], *, threads: int) -> None:
        """Compare each tensor with its digest, given a function that digests the parts of a segment."""
        chosen = set(names)
        jobs = []
        for number, segment in enumerate(self.target.segments):
            if parts := tuple(part for part in segment.parts if part.name in chosen):
                jobs.append(_Job(number, Segment(segment.width, parts)))
        with closing(in_order(digested, jobs, threads=fitting(threads, jobs))) as digests:
            tensors = {name: self.target.tensors[name] for name in names}
            specs = {name: tensor.spec for name, tensor in tensors.items()}
            found = tensor_digests(specs, [job.segment for job in jobs], digests)
        for name, tensor in tensors.items():
            if found[name] != tensor.result:
                way = f"version {self.target.name!r} doesn't come out right: {self.route}"
                raise InvalidRequest(f"tensor {name} of {way}")

    def _foreseen(self, job: "_Job") -> list[bytes]:
        """Digest the parts of a segment as they will be, chunk by chunk, in memory that stays in a core's cache."""
        changes = self._changes(job.number)
        self._keep(job.number, changes)
        return [self._digest_foreseen(part, changes) for part in job.segment.parts]

    def _digest_foreseen(self, part: Part, changes: list[Change]) -> bytes:
        digest, words = Hasher(), part.of(self._resident.words)
        for start, now in _chunks(words):
            chunk = scratch(len(now), now.dtype)
            if self._anchor is None:
                np.copyto(chunk, now)
            else:
                self._anchor.read(part.name, part.number * BLOCK + start, chunk)
            for change in changes:
                patch(chunk, change, start=part.start + start)
            digest.update(chunk.data)
        return digest.digest()

    def _patched(self, job: "_Job") -> list[bytes]:
        """Change the parts of a segment, and digest what they are now."""
        changes = self._changes(job.number)
        return [self._digest_patched(part, changes) for part in job.segment.parts]

    def _digest_patched(self, part: Part, changes: list[Change]) -> bytes:
        digest, words = Hasher(), part.of(self._resident.words)
        for start, chunk in _chunks(words):
            if self._anchor is not None:
                self._anchor.read(part.name, part.number * BLOCK + start, chunk)
            for change in changes:
                patch(chunk, change, start=part.start + start)
            digest.update(chunk.data)
        return digest.digest()

    def _keep(self, number: int, changes: list[Change]) -> None:
        size = sum(change.size_bytes for change in changes)
        if size <= self._room:  # threads may pass it by a segment each
            self._room -= size
            self._kept[number] = changes

    def _changes(self, number: int) -> list[Change]:
        if (kept := self._kept.get(number)) is not None:
            return kept
        found = (
            delta.change(number, back=not hop.is_forward)
            for delta, hop in zip(self._deltas, self.route.hops, strict=True)
        )
        return [change for change in found if change is not None]


def _chunks(words: Words) -> Iterator[tuple[int, Words]]:
    """Yield where each chunk starts, and the chunk, which shares memory with what it is of."""
    length = CHUNK_BYTES // words.itemsize
    for start in range(0, len(words), length):
        yield start, words[start : start + length]


class _Job(NamedTuple):
    """What is worked on at once: some parts of a segment, and which one that is."""

    number: int
    segment: Segment


class Reader:
    """Brings one set of weights to versions under `home`; any number of readers may, and know nothing of each other."""

    def __init__(self, home: Path, resident: Resident, *, threads: int = THREADS) -> None:
        self.resident = resident
        self._home, self._threads = home, threads

    def prepare(self, name: str, *, digest: str | None = None) -> Switch:
        """Fetch and verify what leads to version `name`; the weights in memory stay as they are, and in use.

        The deltas from what is in memory are tried first, then those from an anchor. With `digest`, which the caller's
        registry knows, it is that very version.

        Raises:
            NotFound: there is no such version.
            InvalidRequest: it is torn or altered, or for another model; or no unbroken chain leads to it.
        """
        target = links.read(self._home, name, digest=digest)
        wrong = differences(target.specs, self.resident.specs)
        if wrong:
            raise InvalidRequest(f"version {name!r} is for another model: {wrong}")
        failures: list[str] = []
        try:
            for route in routes(self._home, target, self.resident.at):
                try:
                    return self._verified(target, route)
                except (InvalidRequest, NotFound) as failure:
                    log.warning("version %s can't be reached by way of %s: %s", name, route, failure)
                    failures.append(str(failure))
        except (InvalidRequest, NotFound) as failure:
            failures.append(str(failure))
        raise InvalidRequest(f"version {name!r} can't be reached: {'; '.join(failures)}")

    def _verified(self, target: Link, route: Route) -> Switch:
        _check_chain(route, self.resident)
        deltas = [Delta.load(self._home, hop.link) for hop in route.hops]
        switch = Switch(
            self.resident, target, route, deltas, Anchor.open(self._home, route.anchor) if route.anchor else None
        )
        try:
            switch.verify(threads=self._threads)
        except BaseException:
            switch.__exit__()
            raise
        return switch


def _check_chain(route: Route, resident: Resident) -> None:
    """Each hop must begin with the very weights that the one before ends with.

    Raises:
        InvalidRequest: a delta was made for other weights.
    """
    now: Mapping[str, str | None] = route.anchor.results if route.anchor else resident.digests
    for hop in route.hops:
        if now != hop.before:
            name = next(name for name in sorted(hop.before) if now.get(name) != hop.before[name])
            raise InvalidRequest(f"the delta of version {hop.link.name!r} was made for another tensor {name}")
        now = hop.after
