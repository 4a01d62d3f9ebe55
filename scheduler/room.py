"""What is left on each accelerator and node while a decision is made: the books of one pass.

Workers at one claim take turns: each has the whole device while it computes, so what must fit is the largest of them
beside the little that parked ones leave there; their parked state lies in the memory of the node, all of it at once.
Best fit (Johnson 1973): the smallest device that does, and on it, to pack, the node with the least memory that still
suffices. Counts only down, but for `undo`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from openrl.scheduler.resources import Claim, Device, Kind, Need, Node, Policy, Seat, Seen

Key = tuple[float, int, int]
Signature = tuple[Kind, bool, bool | None, bool]


@dataclass(slots=True)
class Spot:
    """One accelerator that workers may be placed on: an allocated claim, or a device without one."""

    index: int
    name: str
    node: str
    device_bytes: float
    claim: Claim | None
    """None for a device that a new claim would be allocated on."""
    seats: int = 0
    exclusive: bool = False
    largest: int = 0
    key: Key = (0.0, 0, 0)

    @property
    def is_empty(self) -> bool:
        """Tell whether nobody has it."""
        return not self.seats


@dataclass(slots=True)
class _NodeRoom:
    node: Node
    left: float
    spots: list[Spot] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """What a `take` changed, for `undo`."""

    spot: Spot
    need: Need
    largest: int
    exclusive: bool


class Room:
    """The accelerators of a cluster with what is left of each.

    `gone`: workloads whose seats are counted as free already.
    """

    def __init__(self, seen: Seen, policy: Policy, *, gone: Iterable[str] = ()) -> None:
        self._policy = policy
        self._gone = frozenset(gone)
        self._by_claim: dict[str, Spot] = {}
        self._free: dict[str, Spot] = {}
        self._nodes = {
            node.name: _NodeRoom(node, float(node.host_bytes or math.inf)) for node in seen.nodes if node.ready
        }
        self._shelves: dict[tuple[bool, float], list[Key]] = defaultdict(list)
        self._spots: list[Spot] = []
        self._refused: dict[Signature, list[tuple[int, int]]] = {}
        self._tentative = 0
        self.unspoken: list[str] = []
        """Pending claims for which no device is free."""
        self._add_claims(seen.claims)
        free = [device for device in seen.devices if not device.claim and device.node in self._nodes]
        for device in self._unspoken(free, seen.claims):
            self._free[device.name] = self._add(device.name, device.node, device.device_bytes, None, ())
        for spot in self._spots:
            self._shelve(spot)

    # What there is

    def find(self, kind: Kind, need: Need, *, join: bool | None = None, claims_only: bool = False) -> Spot | None:
        """Return the spot that suits best, None where there is none.

        `join`: whether it must have seats already. `claims_only`: no device that has no claim.
        """
        signature = (kind, need.exclusive, join, claims_only)
        if self._was_refused(signature, need):
            return None
        order = (False, True) if self._policy.strategy == "binpack" else (True, False)
        for empty in order if join is None else (not join,):
            if (spot := self._first(empty, kind, need, claims_only=claims_only)) is not None:
                return spot
        if not self._tentative:
            self._refused.setdefault(signature, []).append((need.device_bytes, need.host_bytes))
        return None

    def could_ever(self, kind: Kind, need: Need) -> bool:
        """Tell whether some accelerator would do if all others left it."""
        return any(
            (spot.device_bytes >= need.device_bytes)
            and kind in room.node.kinds
            and (room.node.host_bytes or math.inf) >= need.host_bytes
            for room in self._nodes.values()
            for spot in room.spots
        )

    def admits(self, spot: Spot, kind: Kind, need: Need) -> bool:
        """Tell whether a worker of this need may come to the spot now."""
        room = self._nodes[spot.node]
        if room.closed or kind not in room.node.kinds or room.left < need.host_bytes:
            return False
        return self._has_seat(spot, need)

    def would_admit(self, spot: Spot, kind: Kind, need: Need, leaving: Sequence[tuple[Spot, Seat]]) -> bool:
        """Tell whether a worker could come to the spot if these seats of its node were free."""
        room = self._nodes[spot.node]
        left = room.left + sum(seat.host_bytes for _, seat in leaving)
        if room.closed or kind not in room.node.kinds or left < need.host_bytes:
            return False
        here = [seat for at, seat in leaving if at is spot]
        after = Spot(spot.index, spot.name, spot.node, spot.device_bytes, spot.claim, seats=spot.seats - len(here))
        after.exclusive = spot.exclusive and not any(seat.exclusive for seat in here)
        after.largest = spot.largest if after.seats else 0
        return self._has_seat(after, need)

    # What changes

    def take(self, spot: Spot, need: Need) -> Taken:
        """Count a worker at the spot."""
        taken = Taken(spot, need, spot.largest, spot.exclusive)
        self._change(spot, seats=1, host_bytes=need.host_bytes)
        spot.largest = max(spot.largest, need.device_bytes)
        spot.exclusive = spot.exclusive or need.exclusive
        return taken

    def undo(self, taken: Taken) -> None:
        """Count the worker out again; only the last one that was counted."""
        taken.spot.largest, taken.spot.exclusive = taken.largest, taken.exclusive
        self._change(taken.spot, seats=-1, host_bytes=-taken.need.host_bytes)

    def leave(self, spot: Spot, seats: Iterable[Seat]) -> None:
        """Count out seats that are going to be free, and remember nothing that was refused before."""
        for seat in seats:
            self._change(spot, seats=-1, host_bytes=-seat.host_bytes)
            spot.exclusive = spot.exclusive and not seat.exclusive
        if spot.is_empty:
            spot.largest = 0
        self._refused.clear()

    def add_node(self, node: Node, claim: Claim) -> None:
        """Count in a node with one claim."""
        self._nodes[node.name] = _NodeRoom(node, float(node.host_bytes or math.inf))
        self._shelve(self._add_claim(claim, node.name))
        self._refused.clear()

    def trying(self) -> None:
        """Note that what is taken from now on may be undone."""
        self._tentative += 1

    def tried(self) -> None:
        """Note that what was taken stays, or was undone."""
        self._tentative -= 1

    def close(self, node: str) -> None:
        """Let nobody else onto this node: it is kept for one that has waited for long."""
        self._nodes[node].closed = True

    def spots(self) -> Iterator[Spot]:
        """Yield every spot of the nodes that are open."""
        for room in self._nodes.values():
            if not room.closed:
                yield from room.spots

    def spot_of(self, claim: str) -> Spot | None:
        """Return the spot of an allocated claim."""
        return self._by_claim.get(claim)

    def named(self, name: str) -> Spot | None:
        """Return the spot of an allocated claim or a free device."""
        return self._by_claim.get(name) or self._free.get(name)

    def node_could(self, spot: Spot, kind: Kind, need: Need) -> bool:
        """Tell whether the spot would do if everybody left its node."""
        node = self._nodes[spot.node].node
        fits = spot.device_bytes >= need.device_bytes and (node.host_bytes or math.inf) >= need.host_bytes
        return fits and kind in node.kinds

    # How

    def _add_claims(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            if claim.node is None or claim.node not in self._nodes:
                continue
            if claim.deleting:
                self._nodes[claim.node].left -= sum(seat.host_bytes for seat in claim.seats)
                continue
            self._add_claim(claim, claim.node)

    def _unspoken(self, free: list[Device], claims: Iterable[Claim]) -> list[Device]:
        """Return the free devices that are left once each pending claim has one, and count the memory of its seats."""
        waiting = [claim for claim in claims if claim.node is None and not claim.deleting and claim.seats]
        for claim in sorted(waiting, key=lambda claim: (claim.since, claim.name)):
            host_bytes = sum(seat.host_bytes for seat in claim.seats)
            for device in free:
                if device.device_bytes >= claim.device_bytes and self._nodes[device.node].left >= host_bytes:
                    free.remove(device)
                    self._nodes[device.node].left -= host_bytes
                    break
            else:
                self.unspoken.append(claim.name)
        return free

    def _add_claim(self, claim: Claim, node: str) -> Spot:
        seats = tuple(seat for seat in claim.seats if seat.workload not in self._gone)
        spot = self._by_claim[claim.name] = self._add(claim.name, node, claim.device_bytes, claim, seats)
        return spot

    def _add(self, name: str, node: str, size: int, claim: Claim | None, seats: tuple[Seat, ...]) -> Spot:
        spot = Spot(len(self._spots), name, node, float(size or math.inf), claim, seats=len(seats))
        spot.exclusive = any(seat.exclusive for seat in seats)
        spot.largest = max((seat.device_bytes for seat in seats), default=0)
        room = self._nodes[node]
        self._spots.append(spot)
        room.spots.append(spot)
        room.left -= sum(seat.host_bytes for seat in seats)
        return spot

    def _first(self, empty: bool, kind: Kind, need: Need, *, claims_only: bool) -> Spot | None:
        packs = self._policy.strategy == "binpack"
        for size in sorted(size for has_none, size in self._shelves if has_none == empty):
            if size < need.device_bytes:
                continue
            shelf = self._shelves[empty, size]
            begin = bisect_left(shelf, (float(need.host_bytes), -1 << 60, 0)) if packs else 0
            for position in range(begin, len(shelf)):
                spot = self._spots[shelf[position][2]]
                if not (claims_only and spot.claim is None) and self.admits(spot, kind, need):
                    return spot
        return None

    def _has_seat(self, spot: Spot, need: Need) -> bool:
        if spot.seats and (spot.exclusive or need.exclusive):
            return False
        if spot.seats >= self._policy.most_seats:
            return False
        beside = self._policy.residue_bytes * spot.seats
        return max(spot.largest, need.device_bytes) + beside <= spot.device_bytes

    def _was_refused(self, signature: Signature, need: Need) -> bool:
        """Tell whether one that takes no more than this was refused in this pass: room has only shrunk since."""
        earlier = self._refused.get(signature, ())
        return any(device <= need.device_bytes and host <= need.host_bytes for device, host in earlier)

    def _change(self, spot: Spot, *, seats: int, host_bytes: int) -> None:
        room = self._nodes[spot.node]
        moved = room.spots if self._policy.strategy == "binpack" and not math.isinf(room.left) else [spot]
        for each in moved:
            self._unshelve(each)
        spot.seats += seats
        room.left -= host_bytes
        for each in moved:
            self._shelve(each)

    def _shelve(self, spot: Spot) -> None:
        if self._policy.strategy == "binpack":
            spot.key = (self._nodes[spot.node].left, -spot.seats, spot.index)
        else:
            spot.key = (0.0, spot.seats, spot.index)
        insort(self._shelves[spot.is_empty, spot.device_bytes], spot.key)

    def _unshelve(self, spot: Spot) -> None:
        shelf = self._shelves[spot.is_empty, spot.device_bytes]
        del shelf[bisect_left(shelf, spot.key)]
