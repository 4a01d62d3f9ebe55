"""What is left on each accelerator and node while a decision is made: the books of one pass.

Workers at one claim take turns: each has the whole device while it computes, so what must fit is the largest of them
beside the little that parked ones leave there; their parked state lies in the memory of the node, all of it at once.
Best fit (Johnson 1973): the smallest device that does, and on it, to pack, the node with the least memory that still
suffices. Counts only down, but for `undo`.

An accelerator of this machine (a fixed claim) takes whoever is alone there, whatever its size is thought to be: an
estimate decides who shares, not whether somebody runs at all. Who is alone there parks nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from openrl.scheduler.resources import UNCLAIMED, Claim, Device, Kind, Need, Node, Policy, Seat, Seen

Key = tuple[float, int, int]
Signature = tuple[Kind, bool, bool | None, bool, str]


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
    sizes: list[int] = field(default_factory=list)
    """What each of its workers has on the device in its turn."""
    host_bytes: int = 0
    """What its workers park, all together."""
    key: Key = (0.0, 0, 0)

    @property
    def is_empty(self) -> bool:
        """Tell whether nobody has it."""
        return not self.seats

    @property
    def largest(self) -> int:
        """Return the most that one of its workers has on the device."""
        return max(self.sizes, default=0)

    @property
    def is_fixed(self) -> bool:
        """Tell whether it is a device of this machine, neither made nor dropped."""
        return self.claim is not None and self.claim.fixed

    @property
    def parked_bytes(self) -> int:
        """Return what counts of its node's memory."""
        return 0 if self.is_fixed and self.seats < 2 else self.host_bytes

    def parked_with(self, host_bytes: int) -> int:
        """Return what would count more with another worker."""
        after = 0 if self.is_fixed and not self.seats else self.host_bytes + host_bytes
        return after - self.parked_bytes


@dataclass(slots=True)
class _NodeRoom:
    node: Node
    left: float
    spots: list[Spot] = field(default_factory=list)
    closed: bool = False


@dataclass(frozen=True, slots=True)
class Taken:
    """A worker that was counted at a spot, for `undo`."""

    spot: Spot
    need: Need


class Room:
    """The accelerators of a cluster with what is left of each.

    `gone`: workloads whose seats are counted as free already. `stuck`: pending claims that the cluster finds no device
    for, though one may look free here: it is held by others, broken, or kept from our pods.
    """

    def __init__(self, seen: Seen, policy: Policy, *, gone: Iterable[str] = (), stuck: Iterable[str] = ()) -> None:
        self._policy = policy
        self._gone = frozenset(gone)
        self._stuck = frozenset(stuck)
        self._has_fixed = any(claim.fixed for claim in seen.claims)
        self._by_claim: dict[str, Spot] = {}
        self._free: dict[str, Spot] = {}
        self._nodes = {
            node.name: _NodeRoom(node, float(node.host_bytes or math.inf), closed=not node.takes_new)
            for node in seen.nodes
            if node.ready
        }
        self._shelves: dict[tuple[bool, float], list[Key]] = defaultdict(list)
        self._spots: list[Spot] = []
        self._refused: dict[Signature, list[tuple[int, int]]] = {}
        self._tentative = 0
        self.unspoken: list[str] = []
        """Pending claims for which no device is free, and those that are stuck."""
        # What is seen comes in any order; of places that suit equally well the claim that is as it is for longest wins.
        self._add_claims(sorted(seen.claims, key=lambda claim: (claim.since, claim.name)))
        free = [
            device for device in sorted(seen.devices, key=lambda device: device.name)
            if not device.claim and device.node in self._nodes and not self._nodes[device.node].closed
        ]  # fmt: skip
        for device in self._unspoken(free, seen.claims):
            self._free[device.name] = self._add(device.name, device.node, device.device_bytes, None, ())
        for spot in self._spots:
            self._shelve(spot)

    # What there is

    def find(
        self, kind: Kind, need: Need, *, join: bool | None = None, claims_only: bool = False, avoids: str = ""
    ) -> Spot | None:
        """Return the spot that suits best, None where there is none.

        `join`: whether it must have seats already. `claims_only`: no device that has no claim. `avoids`: not on this
        node, UNCLAIMED meaning what `claims_only` does.
        """
        claims_only = claims_only or avoids == UNCLAIMED
        signature = (kind, need.exclusive, join, claims_only, avoids)
        if self._was_refused(signature, need):
            return None
        order = (False, True) if self._policy.strategy == "binpack" else (True, False)
        for empty in order if join is None else (not join,):
            if (spot := self._first(empty, kind, need, claims_only=claims_only, avoids=avoids)) is not None:
                return spot
        if not self._tentative:
            self._refused.setdefault(signature, []).append((need.device_bytes, need.host_bytes))
        return None

    def could_ever(self, kind: Kind, need: Need) -> bool:
        """Tell whether some accelerator would do if all others left it."""
        return any(
            kind in room.node.kinds and (spot.is_fixed or _would_do(spot, room.node, need))
            for room in self._nodes.values()
            for spot in room.spots
        )

    def admits(self, spot: Spot, kind: Kind, need: Need) -> bool:
        """Tell whether a worker of this need may come to the spot now."""
        room = self._nodes[spot.node]
        if room.closed or kind not in room.node.kinds:
            return False
        return _is_its_own(spot) or (room.left >= spot.parked_with(need.host_bytes) and self._has_seat(spot, need))

    def would_admit(self, spot: Spot, kind: Kind, need: Need, leaving: Sequence[tuple[Spot, Seat]]) -> bool:
        """Tell whether a worker could come to the spot if these seats of its node were free."""
        room = self._nodes[spot.node]
        if room.closed or kind not in room.node.kinds:
            return False
        left, after = room.left, spot
        for place in {at.index: at for at, _ in leaving}.values():
            then = _without(place, [seat for at, seat in leaving if at is place])
            left += place.parked_bytes - then.parked_bytes
            after = then if place is spot else after
        return _is_its_own(after) or (left >= after.parked_with(need.host_bytes) and self._has_seat(after, need))

    # What changes

    def take(self, spot: Spot, need: Need) -> Taken:
        """Count a worker at the spot."""
        self._change(spot, seats=1, host_bytes=need.host_bytes)
        spot.sizes.append(need.device_bytes)
        spot.exclusive = spot.exclusive or need.exclusive
        return Taken(spot, need)

    def undo(self, taken: Taken) -> None:
        """Count the worker out again."""
        taken.spot.sizes.remove(taken.need.device_bytes)
        # Who is exclusive is alone.
        taken.spot.exclusive = False
        self._change(taken.spot, seats=-1, host_bytes=-taken.need.host_bytes)

    def leave(self, spot: Spot, seats: Iterable[Seat]) -> None:
        """Count out seats that are going to be free, and remember nothing that was refused before."""
        for seat in seats:
            self._change(spot, seats=-1, host_bytes=-seat.host_bytes)
            spot.sizes.remove(seat.device_bytes)
            spot.exclusive = spot.exclusive and not seat.exclusive
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

    @property
    def packs(self) -> bool:
        """Tell whether memory is put to use as well as it can be, rather than workers spread."""
        return self._policy.strategy == "binpack" and not self._has_fixed

    def roomiest(self) -> list[str]:
        """Return the open nodes, those with the most memory left first."""
        rooms = [room for room in self._nodes.values() if room.spots and not room.closed]
        return [room.node.name for room in sorted(rooms, key=lambda room: (-room.left, room.node.name))]

    def node(self, name: str) -> tuple[Node, float, list[Spot]]:
        """Return a node, what is left of its memory, and its accelerators."""
        room = self._nodes[name]
        return room.node, room.left, room.spots

    def at(self, index: int) -> Spot:
        """Return the spot of an index."""
        return self._spots[index]

    def forget_refusals(self) -> None:
        """Remember nothing that was refused before: places were exchanged."""
        self._refused.clear()

    def spot_of(self, claim: str) -> Spot | None:
        """Return the spot of an allocated claim."""
        return self._by_claim.get(claim)

    def named(self, name: str) -> Spot | None:
        """Return the spot of an allocated claim or a free device."""
        return self._by_claim.get(name) or self._free.get(name)

    def node_could(self, spot: Spot, kind: Kind, need: Need) -> bool:
        """Tell whether the spot would do if everybody left its node."""
        node = self._nodes[spot.node].node
        return kind in node.kinds and (spot.is_fixed or _would_do(spot, node, need))

    # How

    def _add_claims(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            if claim.node is None or claim.node not in self._nodes:
                continue
            if claim.deleting:
                self._nodes[claim.node].left -= sum(seat.host_bytes for seat in claim.seats)  # its pods are there yet
                continue
            self._add_claim(claim, claim.node)

    def _unspoken(self, free: list[Device], claims: Iterable[Claim]) -> list[Device]:
        """Return the free devices that are left once each pending claim has one, and count the memory of its seats.

        One that is stuck is given none, and yet one less is left: what looks free isn't.
        """
        waiting = [claim for claim in claims if claim.node is None and not claim.deleting and claim.seats]
        for claim in sorted(waiting, key=lambda claim: (claim.since, claim.name)):
            host_bytes = sum(seat.host_bytes for seat in claim.seats)
            for device in free:
                if device.device_bytes >= claim.device_bytes and self._nodes[device.node].left >= host_bytes:
                    free.remove(device)
                    if claim.name in self._stuck:
                        self.unspoken.append(claim.name)
                    else:
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
        spot.sizes = [seat.device_bytes for seat in seats]
        spot.host_bytes = sum(seat.host_bytes for seat in seats)
        room = self._nodes[node]
        self._spots.append(spot)
        room.spots.append(spot)
        room.left -= spot.parked_bytes
        return spot

    def _first(self, empty: bool, kind: Kind, need: Need, *, claims_only: bool, avoids: str) -> Spot | None:
        for size in self._sizes(empty, need):
            shelf = self._shelves[empty, size]
            begin = bisect_left(shelf, (float(need.host_bytes), -1 << 60, 0)) if self.packs else 0
            for position in range(begin, len(shelf)):
                spot = self._spots[shelf[position][2]]
                if (claims_only and spot.claim is None and spot.is_empty) or (avoids and spot.node == avoids):
                    continue
                if self.admits(spot, kind, need):
                    return spot
        return None

    def _sizes(self, empty: bool, need: Need) -> list[float]:
        """Return the sizes of device to look at: those that suffice, smallest first, then this machine's own."""
        sizes = sorted(size for has_none, size in self._shelves if has_none == empty)
        fitting = [size for size in sizes if size >= need.device_bytes]
        smaller = sizes[: len(sizes) - len(fitting)] if empty and self._has_fixed else []
        return fitting + smaller[::-1]

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
        before = spot.parked_bytes
        spot.seats += seats
        spot.host_bytes += host_bytes
        room.left -= spot.parked_bytes - before
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


def _is_its_own(spot: Spot) -> bool:
    """Tell whether who comes to the spot is alone on a device of this machine: sizes don't bind it there."""
    return spot.is_fixed and spot.is_empty


def _would_do(spot: Spot, node: Node, need: Need) -> bool:
    return spot.device_bytes >= need.device_bytes and (node.host_bytes or math.inf) >= need.host_bytes


def _without(spot: Spot, seats: Sequence[Seat]) -> Spot:
    """Return the spot as it is once these seats of it are free."""
    after = replace(spot, seats=spot.seats - len(seats), sizes=list(spot.sizes))
    for seat in seats:
        after.sizes.remove(seat.device_bytes)
    after.host_bytes -= sum(seat.host_bytes for seat in seats)
    after.exclusive = spot.exclusive and not any(seat.exclusive for seat in seats)
    return after
