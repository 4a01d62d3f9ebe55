"""Idle workers give way to those that wait: nothing is lost but the time to start them again.

Whoever computes is never stopped, whatever its priority; of the idle ones those of the lowest priority go first, then
those that have been idle for longest, and no more than one that waits needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from openrl.scheduler.asks import Ask, Member
from openrl.scheduler.resources import Action, Workload
from openrl.scheduler.room import Room, Spot
from openrl.scheduler.view import View

MOST_ASKS = 32
"""Of those that wait, so many are helped in one decision; the others are in the next."""


@dataclass(frozen=True, slots=True)
class _Idle:
    workload: Workload
    spot: Spot
    idle_s: float


def preemptions(view: View, waiting: Iterable[Ask], future: Room, staying: Iterable[Workload]) -> list[Action]:
    """Return the idle workers that make room. `future`: what there is once all that leaves now is gone."""
    idle = _idle(view, future, staying)
    actions: list[Action] = []
    for ask in list(waiting)[:MOST_ASKS]:
        for member in ask.members:
            # For one that stands, free devices are none that the cluster lets it have.
            spot = future.find(member.kind, member.need, claims_only=bool(ask.standing), avoids=member.avoids)
            if spot is None:
                spot, leaving = _cheapest(member, future, idle, ask.priority)
                actions += [_stop(each, ask) for each in leaving]
            if spot is None:
                break
            future.take(spot, member.need)
    return actions


def _idle(view: View, future: Room, staying: Iterable[Workload]) -> dict[str, list[_Idle]]:
    """Return by node who might give way, the first to go first."""
    found: dict[str, list[_Idle]] = defaultdict(list)
    for workload in staying:
        spot = future.spot_of(workload.claim) if workload.claim is not None else None
        if spot is None or not workload.is_to_run:
            continue
        idle_s = view.idle_s(workload)
        if idle_s >= view.policy.preempt_idle_s and view.workers(workload):
            found[spot.node].append(_Idle(workload, spot, idle_s))
    for each in found.values():
        each.sort(key=lambda one: (one.workload.need.priority, -one.idle_s, one.workload.name))
    return found


def _cheapest(
    member: Member, future: Room, idle: dict[str, list[_Idle]], priority: int
) -> tuple[Spot | None, list[_Idle]]:
    """Return the spot that is had by the fewest stops, and these; they are counted out of `future` and `idle`."""
    best: tuple[Spot, list[_Idle]] | None = None
    for node in sorted(idle.keys() - {member.avoids}):
        chosen: list[_Idle] = []
        # What is enough is found on each accelerator of the node: its own idle ones first, then its neighbours'.
        for spot in sorted({each.spot.index: each.spot for each in idle[node]}.values(), key=lambda spot: spot.index):
            chosen = _enough(member, spot, idle[node], future, priority)
            if chosen and (best is None or len(chosen) < len(best[1])):
                best = (spot, chosen)
        if best is not None and len(best[1]) == 1:
            break
    if best is None:
        return None, []
    spot, leaving = best
    for each in leaving:
        future.leave(each.spot, [each.workload.seat])
        idle[spot.node].remove(each)
    return spot, leaving


def _enough(member: Member, spot: Spot, idle: list[_Idle], future: Room, priority: int) -> list[_Idle]:
    """Return idle ones of the node whose end makes room at the spot, empty where all of them would not be enough."""
    ready = [each for each in idle if each.workload.need.priority <= priority]
    ready.sort(key=lambda each: each.spot is not spot)
    for number in range(1, len(ready) + 1):
        if future.would_admit(
            spot, member.kind, member.need, [(each.spot, each.workload.seat) for each in ready[:number]]
        ):
            return ready[:number]
    return []


def _stop(idle: _Idle, ask: Ask) -> Action:
    reason = f"idle for {idle.idle_s:.0f} s, and gives way to {ask.name}, which waits"
    return Action(verb="stop", workload=idle.workload, reason=reason, gives_way_to=ask.name)
