"""Where workers go: onto claims that are allocated, onto free devices by a new claim, or before a claim that stands.

A claim that can't be allocated, with a worker that can't be scheduled, is what an autoscaler reacts to. So what has no
place is packed in thought onto claims to come, and one claim stands for each, with the first worker that it is for.
The others join once it is allocated, since only then is it known where it lies.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from openrl.scheduler.asks import Ask, Member, Queue, released
from openrl.scheduler.coming import Coming
from openrl.scheduler.exchange import Found, rearranged
from openrl.scheduler.resources import UNCLAIMED, Action, Claim, Phase
from openrl.scheduler.room import Room, Spot, Taken
from openrl.scheduler.sizes import in_words as _size
from openrl.scheduler.view import View

NAME_LENGTH = 63
_STRANGE = re.compile(r"[^a-z0-9.-]+")
MOST_KEPT = 16
"""Places that are kept for those who have waited for long, in one decision."""


@dataclass(slots=True)
class Placed:
    """What came of the asks. `waiting`: those without a place, and why. `claims`: names that were put to use."""

    actions: list[Action] = field(default_factory=list)
    waiting: list[tuple[Ask, str]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    taken: list[tuple[str, Member]] = field(default_factory=list)
    """Spot and worker of each place that was given."""
    standing: list[Ask] = field(default_factory=list)
    """Those before a claim that was made for them and can't be allocated yet."""


class Placer:
    """Gives places in one decision."""

    def __init__(self, view: View, room: Room) -> None:
        self._view = view
        self._room = room
        self._placed = Placed()
        self._names = set(view.claims)
        self._kept = 0

    def place(self, queue: Queue) -> Placed:
        """Give each ask its places, or say why it has none."""
        unmet: list[Ask] = []
        found: list[Found] = []
        for ask in queue:
            if reason := queue.beyond_limit(ask):
                self._placed.waiting.append((ask, reason))
            elif taken := self._find(ask):
                queue.given(ask)
                found.append(Found(ask, taken))
            elif ask.standing:
                self._keep(ask)
                reason = f"{ask.standing} can't be allocated yet: no device is free for it"
                self._placed.waiting.append((ask, reason))
            else:
                unmet.append(ask)
                self._keep(ask)
        if self._room.packs and unmet and found:
            found, unmet = rearranged(found, unmet, self._room, self._view.policy)
        for each in found:
            (self._move if each.ask.standing else self._give)(each.ask, each.spots)
        self._stand(unmet)
        return self._placed

    # Places that are there

    def _find(self, ask: Ask) -> list[Taken]:
        """Count a spot for each member as taken; empty where not all have one."""
        if len(ask.members) == 1:
            return self._try(ask.members, claims_only=bool(ask.standing))
        self._room.trying()
        try:
            for order in _orders(ask.members):
                if taken := self._try(order, claims_only=bool(ask.standing)):
                    by_name = dict(zip([member.name for member in order], taken, strict=True))
                    return [by_name[member.name] for member in ask.members]
        finally:
            self._room.tried()
        return []

    def _try(self, members: Iterable[Member], *, claims_only: bool) -> list[Taken]:
        taken: list[Taken] = []
        for member in members:
            spot = self._room.find(member.kind, member.need, claims_only=claims_only, avoids=member.avoids)
            if spot is None:
                for each in reversed(taken):
                    self._room.undo(each)
                return []
            taken.append(self._room.take(spot, member.need))
        return taken

    def _give(self, ask: Ask, spots: list[Spot]) -> None:
        """Say what gives each member its place: a new claim for a device that has none, then the worker itself."""
        started: set[int] = set()
        for member, spot in sorted(zip(ask.members, spots, strict=True), key=lambda pair: not pair[0].asked):
            if spot.claim is None:
                why = f"a device of {_size(spot.device_bytes)} is free on {spot.node}"
                spot.claim = self._claim(member, why, needed=self._together(spot.sizes))
            sleeps = not member.asked and (spot.claim.is_allocated or spot.index in started)
            where = f"{spot.claim.name} on {spot.node}" if not spot.claim.fixed else spot.claim.name
            self._seat(ask, member, spot.claim, where, phase="Reserved" if sleeps else "Placing")
            self._placed.taken.append((spot.name, member))
            started.add(spot.index)

    def _move(self, ask: Ask, spots: list[Spot]) -> None:
        """Let those who stand before a pending claim go to seats that came free: they are placed in the next round."""
        for member, spot in zip(ask.members, spots, strict=True):
            assert member.workload is not None
            reason = f"{ask.standing} isn't allocated, and {spot.name} has room now"
            avoids = UNCLAIMED if ask.standing in self._view.stuck_claims else ""
            self._placed.actions.append(released(member.workload, reason, self._view, avoids=avoids))
            self._placed.used.add(spot.name)
            self._placed.taken.append((spot.name, member))

    def _seat(self, ask: Ask, member: Member, claim: Claim, where: str, *, phase: Phase) -> None:
        self._placed.used.add(claim.name)
        reason = f"{_why(ask, member)}; goes to {where}"
        if phase == "Reserved":
            reason = f"a place at {where} is kept for it beside its run's {ask.members[0].kind}"
        seen = member.workload or member.fresh(self._view, reason)
        after = replace(seen, claim=claim.name, placed=seen.placed + 1, phase=phase, reason=reason)
        if member.workload is None:
            action = Action(verb="start", workload=after, after=after, claim=claim, reason=reason)
        else:
            action = Action(verb="place", workload=seen, after=after, claim=claim, reason=reason)
        self._placed.actions.append(action)

    # Places that are kept, and those to come

    def _keep(self, ask: Ask) -> None:
        """Keep room for one that has waited for long: nobody else comes to the node that is nearest to having it."""
        if ask.waited_s < self._view.policy.patience_s or self._kept >= MOST_KEPT:
            return
        for member in ask.members:
            fitting = [spot for spot in self._room.spots() if self._room.node_could(spot, member.kind, member.need)]
            if fitting:
                self._room.close(min(fitting, key=lambda spot: (spot.seats, spot.index)).node)
                self._kept += 1

    def _stand(self, unmet: list[Ask]) -> None:
        """Let claims stand for what has no place, as few as would have room for all of it."""
        if not (self._view.seen.can_claim and unmet):
            self._placed.waiting += [(ask, self._why_not(ask)) for ask in unmet]
            return
        coming = Coming(self._view)
        for ask in unmet:
            if reason := coming.beyond(ask):
                self._placed.waiting.append((ask, reason))
            elif claim := coming.room_at(ask):
                self._placed.waiting.append((ask, f"waits until {claim} is allocated, and joins it"))
                self._placed.used.add(claim)
            elif coming.is_full:
                self._placed.waiting.append((ask, f"{coming.num} claims stand already, and more aren't made"))
            else:
                self._stand_for(ask, coming)

    def _stand_for(self, ask: Ask, coming: Coming) -> None:
        shared = coming.fits_one(ask)
        sizes = [member.need.device_bytes for member in ask.members]
        needed = self._together(sizes) if shared else max(sizes)
        claims: list[Claim] = []
        for member in ask.members:
            if not claims or not shared:
                claims.append(self._claim(member, "no device is free for it: the cluster has to grow", needed=needed))
            phase: Phase = "Placing" if member.asked or not shared or member is ask.members[0] else "Reserved"
            self._seat(ask, member, claims[-1], f"{claims[-1].name}, which has to be allocated", phase=phase)
        self._placed.standing.append(ask)
        for number, claim in enumerate(claims):
            coming.add(claim, ask.members if shared else ask.members[number : number + 1])

    def _together(self, sizes: list[int]) -> int:
        """Return what workers in turns need of a device: the largest, beside the little that the others leave."""
        return max(sizes) + self._view.policy.residue_bytes * (len(sizes) - 1)

    def _claim(self, member: Member, why: str, *, needed: int) -> Claim:
        """Make a claim on a device of at least `needed` bytes."""
        tiers = tuple(size for size in self._view.policy.tiers if size >= needed)
        claim = Claim(name=self._name(member), device_bytes=needed, tiers=tiers, since=self._view.now)
        self._placed.actions.append(Action(verb="claim", claim=claim, reason=f"for {member.name}: {why}"))
        return claim

    def _name(self, member: Member) -> str:
        number = (member.workload.placed if member.workload else 0) + 1
        while (name := _object_name(member.name, f"-c{number}")) in self._names:
            number += 1
        self._names.add(name)
        return name

    def _why_not(self, ask: Ask) -> str:
        """Say what is missing."""
        lacking = [member for member in ask.members if not self._room.could_ever(member.kind, member.need)]
        if lacking:
            need = lacking[0].need
            takes = f"{_size(need.device_bytes)} of an accelerator and {_size(need.host_bytes)} of memory"
            return f"no machine here has room for {lacking[0].name}: it takes {takes}"
        names = " and ".join(member.name for member in ask.members)
        return f"no accelerator has room for {names} beside those that are there"


def _object_name(name: str, end: str) -> str:
    """Return a name that Kubernetes takes for an object and for a label's value, another one for each name."""
    plain = _STRANGE.sub("-", name.lower()).strip("-.")
    if plain != name or len(plain) > NAME_LENGTH - len(end):
        plain = f"{plain[: NAME_LENGTH - len(end) - 9].rstrip('-.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return plain + end


def _orders(members: tuple[Member, ...]) -> Iterable[tuple[Member, ...]]:
    """Return the orders in which to look for places: the largest first, then the other way round."""
    largest = tuple(sorted(members, key=lambda each: (-each.need.host_bytes, -each.need.device_bytes, each.name)))
    return largest, largest[::-1]


def _why(ask: Ask, member: Member) -> str:
    if not member.asked:
        return f"its run's {next((each.kind for each in ask.members if each.asked), 'worker')} is asked for"
    return f"{ask.in_words}, and no worker is there"
