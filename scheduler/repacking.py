"""Places given in one decision, arranged anew where more of the nodes' memory can be put to use.

Best fit, one ask after another, leaves out what another arrangement has room for. So where something was left out, the
places on a few nodes at a time are searched again: branch and bound (Land and Doig 1960), exact where a cluster is
small, and bounded by a number of steps where it isn't. Knows spots and needs, no asks and no queue.

Nothing that runs is ever moved, nor what has a seat already: only places of the same decision, which nobody has begun
to use. Who `must` have a place keeps one, perhaps another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from openrl.scheduler.resources import Kind, Need

STEPS = 2_000
"""Of all searches of one decision: some hundredths of a second."""
WINDOW_NODES, WINDOW_ITEMS = 4, 24
"""What one search looks at, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A worker that may be placed. `spot`: the index of the one that it was given, None where it has none."""

    kind: Kind
    need: Need
    must: bool
    spot: int | None = None
    avoids: str = ""

    @property
    def value(self) -> int:
        """Return what its place counts: memory put to use, and of equals the larger number of workers."""
        return self.need.host_bytes + 1


@dataclass(slots=True)
class Bin:
    """A node without the places that are searched anew. `left`: of its memory, in bytes."""

    name: str
    kinds: frozenset[Kind]
    left: float
    spots: list[tuple[float, int, int, bool, int]]
    """Of each accelerator its bytes, seats, the largest need, whether it is exclusive, and its index."""


class Search:
    """The searches of one decision."""

    def __init__(self, *, residue_bytes: int, most_seats: int, steps: int = STEPS) -> None:
        self._residue = residue_bytes
        self._most_seats = most_seats
        self.steps = steps
        """How many are left."""

    def better(self, items: Sequence[Item], bins: Sequence[Bin]) -> list[int | None] | None:
        """Return a spot for each item, None for those left out; None altogether where nothing better was found."""
        order = sorted(range(len(items)), key=lambda at: (-items[at].need.host_bytes, -items[at].need.device_bytes, at))
        run = _Run(self, [items[at] for at in order], list(bins))
        run.best = sum(item.value for item in items if item.spot is not None)
        run.go(0, 0)
        if run.found is None:
            return None
        spots: list[int | None] = [None] * len(items)
        for at, spot in zip(order, run.found, strict=True):
            spots[at] = spot
        return spots

    def admits(self, spot: tuple[float, int, int, bool, int], need: Need) -> bool:
        """Tell whether a worker may come to an accelerator."""
        size, seats, largest, exclusive, _ = spot
        if seats and (exclusive or need.exclusive):
            return False
        return seats < self._most_seats and max(largest, need.device_bytes) + self._residue * seats <= size


class _Run:
    """One search, depth first, the largest items first."""

    def __init__(self, search: Search, items: list[Item], bins: list[Bin]) -> None:
        self._search = search
        self._items = items
        self._bins = bins
        self._rest = _sums(item.value for item in items)
        self._chosen: list[int | None] = [None] * len(items)
        self.best = 0
        self.found: list[int | None] | None = None

    def go(self, at: int, value: int) -> None:
        """Try everything for the items from `at` on that could be better than the best so far."""
        left = sum(each.left for each in self._bins) + len(self._items) - at
        if value + min(self._rest[at], left) <= self.best or self._search.steps <= 0:
            return
        self._search.steps -= 1
        if at == len(self._items):
            self.best, self.found = value, list(self._chosen)
            return
        item = self._items[at]
        for bin_, number in self._choices(item):
            spot = bin_.spots[number]
            size, seats, largest, exclusive, index = spot
            taken = (size, seats + 1, max(largest, item.need.device_bytes), exclusive or item.need.exclusive, index)
            bin_.spots[number], bin_.left = taken, bin_.left - item.need.host_bytes
            self._chosen[at] = index
            self.go(at + 1, value + item.value)
            bin_.spots[number], bin_.left = spot, bin_.left + item.need.host_bytes
        self._chosen[at] = None
        if not item.must:
            self.go(at + 1, value)

    def _choices(self, item: Item) -> list[tuple[Bin, int]]:
        """Return where the item may go, the best fit first; of places that are alike, one."""
        found: dict[object, tuple[tuple[float, float, int, int], Bin, int]] = {}
        for bin_ in self._bins:
            if item.need.host_bytes > bin_.left or item.kind not in bin_.kinds or bin_.name == item.avoids:
                continue
            whole = (bin_.left, bin_.kinds, tuple(sorted(spot[:4] for spot in bin_.spots)))
            for number, spot in enumerate(bin_.spots):
                if (whole, spot[:4]) not in found and self._search.admits(spot, item.need):
                    found[whole, spot[:4]] = ((bin_.left, spot[0], -spot[1], spot[4]), bin_, number)
        return [(bin_, number) for _, bin_, number in sorted(found.values(), key=lambda each: each[0])]


def _sums(values: Iterable[int]) -> list[int]:
    """Return for each position the sum from there on, and 0 for the end."""
    sums = [0]
    for value in reversed(list(values)):
        sums.append(sums[-1] + value)
    return sums[::-1]
