"""From what is seen to what is done: pure, so that every case is a test.

A worker is wanted from the first operation of its pool on, kept while there is work, and let go after an idle time.
Where there are accelerators it takes a seat at one, alone or in turns with others. Applying a decision twice, or the
same decision by two deciders, is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from openrl.scheduler.asks import Ask, Queue, asks, standing_asks, waiting
from openrl.scheduler.letting_go import drops, stops
from openrl.scheduler.moving import lost, moves
from openrl.scheduler.placement import Placed, Placer
from openrl.scheduler.preemption import preemptions
from openrl.scheduler.renewal import replacements
from openrl.scheduler.resources import Action, Decision, Snapshot, Workload
from openrl.scheduler.room import Room
from openrl.scheduler.view import View


def decide(snapshot: Snapshot) -> Decision:
    """Return what brings what runs in line with what is asked for."""
    view = View(snapshot)
    stopped = stops(view)
    released = lost(view, _without(view.workloads, stopped))
    staying = _without(view.workloads, [*stopped, *released])
    replaced = replacements(view, (workload for workload in staying if workload.is_to_run))
    leaving = {action.name for action in stopped}
    woken = [action for workload in staying if (action := _wake(workload, view))]
    if not snapshot.seen.has_claims:
        return Decision(actions=(*stopped, *replaced, *_on_the_cpu(view)))
    # Where claims can be made, a seat is free once its process is gone; a machine's own devices are in turns anyway.
    gone = () if snapshot.seen.can_claim else leaving
    room = Room(snapshot.seen, snapshot.policy, gone=gone, stuck=view.stuck_claims)
    waiting_ones = [*asks(view, leaving=leaving), *standing_asks(view, room.unspoken, leaving=leaving)]
    placed = Placer(view, room).place(Queue(waiting_ones, view))
    settled = _without(staying, placed.actions)
    moved = moves(view, room, settled)
    settled = _without(settled, moved)
    evicted = _evicted(view, placed, settled, leaving=leaving | {action.name for action in (*released, *moved)})
    dropped = drops(view, used=placed.used | {spot for spot, _ in placed.taken})
    changes = (*stopped, *released, *replaced, *woken, *placed.actions, *moved, *evicted, *dropped)
    return Decision(actions=(*changes, *_notes(placed, view)), waits=_waits(placed))


def _wake(workload: Workload, view: View) -> Action | None:
    """Let the process of a reserved seat start once somebody asks for it."""
    demand = view.demand(workload)
    if workload.phase != "Reserved" or demand is None or not demand.depth:
        return None
    reason = f"{waiting(demand.depth, demand.oldest_s)}; its place at {workload.claim} was kept"
    after = replace(workload, phase="Placing", reason=reason)
    return Action(verb="wake", workload=workload, after=after, reason=reason)


def _on_the_cpu(view: View) -> list[Action]:
    """Start what is asked for where nobody needs a place, those that have waited longest first."""
    actions = []
    for ask in sorted(asks(view), key=lambda ask: (-ask.waited_s, ask.name)):
        for member in ask.members:
            if member.asked and member.workload is None:
                reason = f"{ask.in_words}, and no worker is there; goes to the CPU"
                fresh = member.fresh(view, reason)
                actions.append(Action(verb="start", workload=fresh, after=fresh, reason=reason))
    return actions


def _evicted(view: View, placed: Placed, staying: list[Workload], *, leaving: set[str]) -> list[Action]:
    """Let idle workers give way to those that have no place."""
    limits = Queue([], view)
    unmet = [ask for ask, _ in placed.waiting if _is_asked(ask) and not limits.beyond_limit(ask)]
    if not (unmet or placed.standing):
        return []
    gone = leaving | {each.name for each in view.workloads if each.phase == "Stopping"}
    future = Room(view.seen, view.policy, gone=gone, stuck=view.stuck_claims)
    for name, member in placed.taken:
        spot = future.named(name)
        if spot is not None:
            future.take(spot, member.need)
    return preemptions(view, [*unmet, *placed.standing], future, staying)


def _is_asked(ask: Ask) -> bool:
    return any(member.asked for member in ask.members)


def _notes(placed: Placed, view: View) -> list[Action]:
    """Say of each that waits why it does, where that is news."""
    actions = []
    for ask, reason in placed.waiting:
        for member in ask.members:
            if member.workload is None:
                fresh = replace(member.fresh(view, reason), phase="Pending")
                actions.append(Action(verb="start", workload=fresh, after=fresh, reason=reason))
            elif member.workload.reason != reason:
                after = replace(member.workload, reason=reason)
                actions.append(Action(verb="note", workload=member.workload, after=after, reason=reason))
    return actions


def _waits(placed: Placed) -> dict[str, str]:
    return {member.name: reason for ask, reason in placed.waiting for member in ask.members}


def _without(workloads: Iterable[Workload], actions: Iterable[Action]) -> list[Workload]:
    gone = {action.name for action in actions}
    return [workload for workload in workloads if workload.name not in gone]
