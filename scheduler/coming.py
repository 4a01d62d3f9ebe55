"""Claims that stand for what has no place, as if each were allocated already, on a device and a node of its own.

So what waits is packed onto them in thought, and no more of them stand than it takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from openrl.scheduler.asks import Ask, Member
from openrl.scheduler.resources import Claim, Node, Policy, Seat, Seen
from openrl.scheduler.room import Room
from openrl.scheduler.sizes import in_words
from openrl.scheduler.view import View


class Coming:
    """The claims that stand, those of this decision among them."""

    def __init__(self, view: View) -> None:
        self._policy: Policy = view.policy
        self._largest = float(max(view.policy.tiers, default=0)) or math.inf
        self._host = view.policy.tier_host_bytes
        self.num = 0
        self._room = Room(Seen(), replace(view.policy, strategy="binpack"))
        for claim in sorted(view.seen.claims, key=lambda claim: claim.name):
            if claim.node is None and not claim.deleting and claim.seats:
                self._count(claim)

    @property
    def is_full(self) -> bool:
        """Tell whether no more claims are to be made."""
        return self.num >= self._policy.most_pending

    def beyond(self, ask: Ask) -> str:
        """Return why no claim could ever have it, "" if one could."""
        for member in ask.members:
            if member.need.device_bytes > self._largest:
                size, largest = in_words(member.need.device_bytes), in_words(self._largest)
                return f"{member.name} takes {size} of an accelerator, and the largest tier has {largest}"
            if self._host and member.need.host_bytes > self._host:
                size, host = in_words(member.need.host_bytes), in_words(self._host)
                return f"{member.name} takes {size} of memory, and a node to come has {host} for a claim"
        return ""

    def room_at(self, ask: Ask) -> str:
        """Return a claim to come that has room for the ask, and count it in; "" where none has.

        Those that go together have claims made for them: who joins one later would come alone.
        """
        if len(ask.members) > 1:
            return ""
        [member] = ask.members
        spot = self._room.find(member.kind, member.need, join=True)
        if spot is None:
            return ""
        self._room.take(spot, member.need)
        return spot.name

    def fits_one(self, ask: Ask) -> bool:
        """Tell whether all members could have one device, in turns."""
        needs = [member.need for member in ask.members]
        hosts = sum(need.host_bytes for need in needs)
        largest = max(need.device_bytes for need in needs) + self._policy.residue_bytes * (len(needs) - 1)
        alone = any(need.exclusive for need in needs) and len(needs) > 1
        return not alone and largest <= self._largest and (not self._host or hosts <= self._host)

    def add(self, claim: Claim, members: Sequence[Member]) -> None:
        """Count a claim that was just made, with those whom it was made for."""
        self._count(replace(claim, seats=tuple(_seat(member) for member in members)))

    def _count(self, claim: Claim) -> None:
        self.num += 1
        size = next((tier for tier in claim.tiers if tier >= claim.device_bytes), claim.device_bytes)
        allocated = replace(claim, node=claim.name, device_bytes=size)
        self._room.add_node(Node(name=claim.name, host_bytes=self._host), allocated)


def _seat(member: Member) -> Seat:
    need = member.need
    return Seat(
        workload=member.name, owner=need.owner, exclusive=need.exclusive, device_bytes=need.device_bytes,
        host_bytes=need.host_bytes,
    )  # fmt: skip
