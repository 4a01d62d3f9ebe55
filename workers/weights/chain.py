"""The way from the weights in memory to another version: which deltas, in which direction, or from which anchor.

A delta leads both ways, so the way goes back from where one is to a common ancestor, and from there on. It is taken
only while it reads less than all weights. Knows manifests; nothing is read here of deltas and anchors. Without torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights.links import Ident, Link, read


@dataclass(frozen=True, slots=True)
class Hop:
    """One delta, from its parent to its version, or back."""

    link: Link
    is_forward: bool

    @property
    def before(self) -> dict[str, str | None]:
        """Digests that the tensors must have for this hop."""
        return self.link.bases if self.is_forward else dict(self.link.results)

    @property
    def after(self) -> dict[str, str | None]:
        """Digests that they have afterwards."""
        return dict(self.link.results) if self.is_forward else self.link.bases


@dataclass(frozen=True, slots=True)
class Route:
    """Where to start (None: from what is in memory), and the hops from there."""

    anchor: Link | None
    hops: tuple[Hop, ...]

    @property
    def size_bytes(self) -> int:
        """What has to be read."""
        anchor = self.anchor.anchor.size_bytes if self.anchor and self.anchor.anchor else 0
        return anchor + sum(hop.link.delta.size_bytes for hop in self.hops if hop.link.delta)

    def __str__(self) -> str:
        """For logs."""
        start = f"anchor {self.anchor.name}" if self.anchor else "memory"
        return " ".join([start, *(f"{'+' if hop.is_forward else '-'}{hop.link.name}" for hop in self.hops)])


def routes(home: Path, target: Link, at: Ident | None) -> Iterator[Route]:
    """Yield the ways to `target`: first from the version `at`, if there is a short one, then from an anchor.

    Raises:
        InvalidRequest, NotFound: there is no anchor to be found; it names the link that is missing or broken.
    """
    if at is not None:
        hops = _between(home, target, at)
        if hops is not None:
            yield Route(None, hops)
    yield _from_anchor(home, target)


def _between(home: Path, target: Link, at: Ident) -> tuple[Hop, ...] | None:
    """Hops from one version to another by way of their last common ancestor; None if no short way is readable."""
    back: list[Hop] = []
    forward: list[Hop] = []
    here, there, room = at, target.ident, target.size_bytes
    while here != there:
        from_there = there.number > here.number
        try:
            link = target if there == target.ident and from_there else _read(home, there if from_there else here)
        except (InvalidRequest, NotFound):
            return None
        if link.parent is None or link.delta is None or link.delta.size_bytes > room:
            return None
        room -= link.delta.size_bytes
        if from_there:
            forward.append(Hop(link, True))
            there = link.parent
        else:
            back.append(Hop(link, False))
            here = link.parent
    return (*back, *reversed(forward))


def _from_anchor(home: Path, target: Link) -> Route:
    hops: list[Hop] = []
    link = target
    while link.anchor is None:
        assert link.parent is not None  # a manifest without either was refused
        hops.append(Hop(link, True))
        link = _read(home, link.parent)
    return Route(link, tuple(reversed(hops)))


def _read(home: Path, ident: Ident) -> Link:
    link = read(home, ident.name, digest=ident.digest)
    if link.number != ident.number:
        raise InvalidRequest(f"version {ident.name!r} has number {link.number}, not {ident.number}")
    return link
