"""Which places of a decision may be exchanged for those of others, and the exchange itself.

Who waits is served in order, but for this: among workers that serve all (no tenant has them to himself) and have the
same priority, one that has waited less than the policy's patience may be left for the next decision where others put
more of the nodes' memory to use. One that has waited longer keeps a place, as do gangs, tenants' own workers and all of
another priority. Whatever has a seat already stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from openrl.scheduler.asks import Ask
from openrl.scheduler.repacking import WINDOW_ITEMS, WINDOW_NODES, Bin, Item, Search
from openrl.scheduler.resources import UNCLAIMED, Policy
from openrl.scheduler.room import Room, Spot, Taken

MOST_MOVED = WINDOW_ITEMS - 4


@dataclass(frozen=True, slots=True)
class Found:
    """An ask with what was counted for each of its members, in their order."""

    ask: Ask
    taken: list[Taken]

    @property
    def spots(self) -> list[Spot]:
        """Return the spots of the members."""
        return [each.spot for each in self.taken]


def rearranged(found: list[Found], unmet: list[Ask], room: Room, policy: Policy) -> tuple[list[Found], list[Ask]]:
    """Return the asks with a place and those without, after exchanges that put more memory to use; `room` follows."""
    search = Search(residue_bytes=policy.residue_bytes, most_seats=policy.most_seats)
    for priority in sorted({ask.priority for ask in unmet if _is_free(ask)}, reverse=True):
        for nodes in _windows(found, room):
            if search.steps > 0 and any(_is_free(ask) and ask.priority == priority for ask in unmet):
                found, unmet = _Window(nodes, priority, found, unmet, room, policy).exchanged(search)
    return found, unmet


def _windows(found: list[Found], room: Room) -> Iterator[list[str]]:
    """Yield a few nodes at a time, those with the most memory left first; only where something was given a place."""
    given = {spot.node for each in found for spot in each.spots if _is_free(each.ask)}
    nodes = room.roomiest()
    for begin in range(0, len(nodes), WINDOW_NODES):
        window = nodes[begin : begin + WINDOW_NODES]
        if given & set(window):
            yield window


def _is_free(ask: Ask) -> bool:
    """Tell whether it may have another place, or none for now: a single worker that serves all, before no claim."""
    return len(ask.members) == 1 and not (ask.owner or ask.standing or ask.members[0].avoids == UNCLAIMED)


class _Window:
    """A few nodes, what may come to them, and what may leave them."""

    def __init__(
        self, nodes: list[str], priority: int, found: list[Found], unmet: list[Ask], room: Room, policy: Policy
    ) -> None:
        self._nodes, self._found, self._unmet, self._room = nodes, found, unmet, room
        inside = set(nodes)
        movable = [each for each in found if _is_free(each.ask) and each.taken[0].spot.node in inside]
        self._movable = movable[-MOST_MOVED:]
        """The last ones that were given a place: those that waited least."""
        candidates = [ask for ask in unmet if _is_free(ask) and ask.priority == priority]
        self._candidates = candidates[: WINDOW_ITEMS - len(self._movable)]
        self._items = [
            _item(each.ask, must=each.ask.priority != priority or each.ask.waited_s >= policy.patience_s,
                  spot=each.taken[0].spot)
            for each in self._movable
        ] + [_item(ask, must=False) for ask in self._candidates]  # fmt: skip

    def exchanged(self, search: Search) -> tuple[list[Found], list[Ask]]:
        """Return found and unmet after the best exchange on these nodes."""
        for each in self._movable:
            self._room.undo(each.taken[0])
        spots = search.better(self._items, [self._bin(name) for name in self._nodes])
        asks = [*(each.ask for each in self._movable), *self._candidates]
        placed: dict[str, Found] = {}
        for ask, item, spot in zip(asks, self._items, spots or [item.spot for item in self._items], strict=True):
            if spot is not None:
                placed[ask.name] = Found(ask, [self._room.take(self._room.at(spot), item.need)])
        if spots is None:
            return [placed.get(each.ask.name, each) for each in self._found], self._unmet
        self._room.forget_refusals()
        return self._after(asks, placed)

    def _after(self, asks: list[Ask], placed: dict[str, Found]) -> tuple[list[Found], list[Ask]]:
        touched = {ask.name for ask in asks}
        there = {each.ask.name for each in self._found}
        kept = [placed.get(each.ask.name, each) for each in self._found
                if each.ask.name in placed or each.ask.name not in touched]  # fmt: skip
        left = [each.ask for each in self._found if each.ask.name in touched - placed.keys()]
        new = [placed[ask.name] for ask in self._candidates if ask.name in placed.keys() - there]
        return kept + new, [ask for ask in self._unmet if ask.name not in placed] + left

    def _bin(self, name: str) -> Bin:
        node, left, spots = self._room.node(name)
        return Bin(
            name=name,
            kinds=node.kinds,
            left=left,
            spots=[(spot.device_bytes, spot.seats, spot.largest, spot.exclusive, spot.index) for spot in spots],
        )


def _item(ask: Ask, *, must: bool, spot: Spot | None = None) -> Item:
    [member] = ask.members
    return Item(kind=member.kind, need=member.need, must=must, avoids=member.avoids,
                spot=None if spot is None else spot.index)  # fmt: skip
