"""Processes that take turns, as a model: what lies on the accelerator is known here, and held against the scripts.

Each actor does one thing at a time: ask, bring its state in, look, park, give back; it may be killed, with its engine
or without, stopped, fail while parking, and its calls may be lost, unanswered or doubled. Whatever happens, two
states never lie on the accelerator together, a stale token changes nothing, and nobody is kept waiting for longer than
the credits allow.
"""

from __future__ import annotations

import itertools
import random

from openrl.timeslice.errors import Refused
from openrl.timeslice.holder import Holder
from tests.timeslice.world import Fault, World, holder

GPU = "gpu-0"
FAULTS = ("lost", "unanswered", "doubled", "late")
FLOOR_US = 100_000
SWITCH_S = (0.01, 0.02)
ASK_US = 1_000_000
SHARE_US = 8 * 30_000 + FLOOR_US
"""No quantum is larger: all switches cost 0.03 s."""


class Actor:
    """One process of one owner. `engine` outlives it when only the parent is killed."""

    def __init__(self, owner: str, number: int) -> None:
        self.owner, self.seat, self.holder = owner, f"seat {number}", holder(number)
        self.token: int | None = None
        self.wants = self.lies = self.stopped = self.broken = self.dead = self.engine = self.unsure = False
        self.owes: tuple | None = None
        self.waits_since: int | None = None
        self.debt = 0.0
        self.asked = 0
        self.kept: dict[str, int] = {}

    @property
    def acts(self) -> bool:
        return not (self.stopped or self.broken or self.dead)


class Floor:
    """Actors around one accelerator."""

    def __init__(self, world: World, owners: str = "abcde", *, faults: bool = True) -> None:
        self.world, self.faults = world, faults
        self._numbers = itertools.count(1)
        self.actors = [Actor(owner, next(self._numbers)) for owner in owners]
        self.past: list[Actor] = []
        self.turns = self.kills = self.refusals = 0
        self.longest_us = 0
        self._since = 0

    def lying(self) -> list[Actor]:
        return [actor for actor in (*self.actors, *self.past) if actor.lies]

    def want(self, actor: Actor, fault: str = "") -> None:
        """Ask, and come in where the turn is granted."""
        if actor.owes:
            self.settle(actor)
        if not actor.acts or actor.lies or actor.owes:
            return
        if not actor.wants:
            actor.seat = f"seat {next(self._numbers)}"
        actor.wants, actor.asked = True, self.world.now_us
        if actor.waits_since is None:
            actor.waits_since, actor.kept = self.world.now_us, {}
            actor.debt = -min(0.0, float(self.world.redis.hget(f"openrl:accelerator:{GPU}:credit", actor.owner) or 0))
        self.world.fault = fault
        try:
            token = self.world.ask(GPU, actor.owner, actor.seat, actor.holder)
        except Fault:
            return
        if token is not None:
            self._come_in(actor, token)

    def _come_in(self, actor: Actor, token: int) -> None:
        assert not self.lying(), f"{actor.owner} came in while {[other.owner for other in self.lying()]} lay there"
        others = [other.token or 0 for other in (*self.actors, *self.past) if other is not actor]
        assert token > max(others) and token >= (actor.token or 0), "a token did not grow"
        for other, kept in actor.kept.items():
            bound = 2 * SHARE_US + actor.debt + 2 * self.longest_us
            assert kept <= bound, f"{actor.owner} was kept waiting {kept} us by {other}, more than {bound}"
        actor.token, actor.lies, actor.engine, actor.wants, actor.waits_since = token, True, True, False, None
        self._since = self.world.now_us
        self.world.note(GPU, token, state="resident", park=SWITCH_S[0], restore=SWITCH_S[1])
        self.turns += 1

    def use(self, actor: Actor, microseconds: int) -> None:
        """Let time pass; everybody who waits asks again within his patience."""
        self.world.pass_us(microseconds)
        for other in self.actors:
            if other.wants and other.waits_since is not None and self.world.now_us - other.asked >= ASK_US:
                self.want(other)

    def look(self, actor: Actor, *, idle_us: int | None, fault: str = "") -> None:
        """Look, and hand on where that is asked for."""
        if not actor.acts or not actor.lies:
            return
        idle_s = None if idle_us is None else idle_us / 1e6
        if self.world.look(GPU, actor.token, idle_s=idle_s).hand_on:
            self._left(actor)
            actor.owes = ("release", actor.token)
            self.settle(actor, fault)

    def settle(self, actor: Actor, fault: str = "") -> None:
        """Tell the store that the state is parked, or that the line was left."""
        if actor.owes is None or not actor.acts:
            return
        self.world.fault = fault
        actor.unsure |= bool(fault)
        what, which = actor.owes
        try:
            if what == "withdraw":
                self.world.withdraw(GPU, actor.owner, which)
                seat = self.world.redis.hget(f"openrl:accelerator:{GPU}", "seat")
                assert seat != which.encode(), f"{actor.owner} has left and still holds"
            else:
                self.world.release(GPU, which, busy_s=0.001, park_s=SWITCH_S[0])
        except Fault:
            return
        except Refused:
            assert actor.unsure, "a turn was ended whose holder lives"
        actor.unsure = False
        actor.owes = None

    def leave_line(self, actor: Actor, fault: str = "") -> None:
        """Give up waiting."""
        if not actor.acts or not actor.wants or actor.owes:
            return
        actor.wants, actor.waits_since, actor.owes = False, None, ("withdraw", actor.seat)
        self.settle(actor, fault)

    def fail(self, actor: Actor) -> None:
        """Parking fails: the actor does nothing more, and keeps its turn."""
        if actor.acts and actor.lies:
            actor.broken = True

    def kill(self, actor: Actor, *, engine: bool) -> None:
        """Kill the process, with its engine or without; another of the same owner starts."""
        actor.dead, self.kills = True, self.kills + 1
        actor.engine = actor.engine and actor.lies and not engine
        if actor.lies and not actor.engine:
            self._left(actor)
        self.past.append(actor)
        self.actors[self.actors.index(actor)] = Actor(actor.owner, next(self._numbers))

    def kill_engine(self, actor: Actor) -> None:
        if actor.dead and actor.lies:
            actor.engine = False
            self._left(actor)

    def stop(self, actor: Actor, *, on: bool) -> None:
        """Stop or continue. Who was stopped has waited for nothing."""
        actor.stopped = on
        if actor.waits_since is not None and not actor.dead:
            actor.waits_since = None if on else self.world.now_us
            actor.kept = {}

    def sweep(self, fault: str = "") -> None:
        """What the beat does."""
        known = {actor.holder: actor for actor in (*self.actors, *self.past)}

        def is_gone(one: Holder) -> bool:
            return known[one].dead and not known[one].engine

        self.world.fault = fault
        try:
            self.world.sweep(GPU, is_gone=is_gone)
        except Fault:
            pass
        self.world.fault = ""

    def try_stale(self, actor: Actor) -> None:
        """A token whose turn has ended changes nothing."""
        self.world.deliver(len(self.world.late))
        present = self.world.redis.hmget(f"openrl:accelerator:{GPU}", ["token", "released", "owner"])
        if actor.token is None or (present[2] and int(present[0]) == actor.token):
            return
        before = self.world.dump()
        calls = [
            lambda: self.world.note(GPU, actor.token, state="resident"),
            lambda: self.world.look(GPU, actor.token, idle_s=None),
        ]
        if int(present[1] or 0) != actor.token:
            calls.append(lambda: self.world.release(GPU, actor.token))
        for call in calls:
            try:
                call()
            except Refused:
                self.refusals += 1
            else:
                raise AssertionError(f"the stale token of {actor.owner} was taken")
        assert self.world.dump() == before

    def run_out(self) -> None:
        """Mend everything: whoever waits must be served, one after the other."""
        for actor in list(self.actors):
            if actor.broken or actor.stopped:
                self.kill(actor, engine=True)
        for actor in self.past:
            self.kill_engine(actor)
        for actor in self.actors:
            self.settle(actor)
        self.sweep()
        left = {actor.owner for actor in self.actors if actor.wants}
        for _ in range(40 * len(self.actors)):
            self.world.pass_us(ASK_US)
            for actor in self.actors:
                if actor.wants:
                    self.want(actor)
                if actor.lies:
                    left.discard(actor.owner)
                    self.use(actor, SHARE_US // 4)
                    self.look(actor, idle_us=SHARE_US)
        assert not left, f"{left} were never served"

    def _left(self, actor: Actor) -> None:
        """Note that the state is off the accelerator, and for how long others were kept waiting."""
        actor.lies = False
        took = self.world.now_us - self._since
        self.longest_us = max(self.longest_us, took)
        for other in self.actors:
            if other is not actor and other.waits_since is not None:
                kept = self.world.now_us - max(self._since, other.waits_since)
                other.kept[actor.owner] = other.kept.get(actor.owner, 0) + kept


def storm(floor: Floor, draw: random.Random, *, turns: int) -> None:
    """Let random things happen until so many turns were granted."""
    while floor.turns < turns:
        actor = draw.choice(floor.actors)
        fault = draw.choice(FAULTS) if floor.faults and draw.random() < 0.1 else ""
        for holding in (one for one in floor.actors if one.lies):
            floor.use(holding, draw.randint(1, 200_000))
            floor.look(holding, idle_us=draw.choice((None, None, 0, 50_000)), fault=fault)
        floor.want(actor, fault)
        floor.settle(draw.choice(floor.actors), fault)
        if draw.random() < 0.15:
            disturb(floor, draw)
        if not any(one.lies and one.acts for one in floor.actors):
            floor.use(actor, draw.randint(1, 500_000))
            floor.sweep(fault)


def disturb(floor: Floor, draw: random.Random) -> None:
    """Let one thing go wrong, or come right."""
    actor = draw.choice(floor.actors)
    what = draw.randrange(7)
    if what == 0:
        floor.kill(actor, engine=draw.random() < 0.5)
    elif what == 1:
        floor.stop(actor, on=draw.random() < 0.4)
    elif what == 2:
        floor.fail(actor)
    elif what == 3:
        floor.leave_line(actor, draw.choice(("", *FAULTS)))
    elif what == 4 and floor.past:
        floor.try_stale(draw.choice(floor.past))
    elif what == 5:
        floor.try_stale(actor)
    elif what == 6 and floor.past:
        dead = next((one for one in floor.past if one.lies), floor.past[-1])
        heir = next(one for one in floor.actors if one.owner == dead.owner)
        floor.want(heir, draw.choice(("", "unanswered")))
        floor.leave_line(heir)
    for one in floor.actors:
        if (one.broken or one.stopped) and draw.random() < 0.3:
            floor.kill(one, engine=draw.random() < 0.5) if one.broken else floor.stop(one, on=False)
    for one in floor.past:
        if one.lies and draw.random() < 0.5:
            floor.kill_engine(one)
    del floor.past[: max(0, len(floor.past) - 8 if not any(one.lies for one in floor.past[:-8]) else 0)]
