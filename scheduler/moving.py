"""Who gives up a seat and is placed anew: its claim or its node is gone, its node has no room for its pod after all, or
a device that suits it better is free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from openrl.scheduler.asks import released
from openrl.scheduler.resources import Action, Claim, Workload
from openrl.scheduler.room import Room
from openrl.scheduler.sizes import in_words
from openrl.scheduler.view import View


def lost(view: View, staying: Iterable[Workload]) -> list[Action]:
    """Release whoever has a seat at what is gone. A process that may still run is asked to end first."""
    nodes = {node.name: node for node in view.seen.nodes}
    found = []
    for workload in staying:
        if workload.claim is None or workload.phase == "Stopping":
            continue
        claim = view.claims.get(workload.claim)
        if claim is None or claim.deleting:
            found.append(released(workload, f"claim {workload.claim} is gone", view))
        elif claim.node is not None and (claim.node not in nodes or not nodes[claim.node].ready):
            found.append(released(workload, f"node {claim.node} is lost", view))
        elif claim.node is not None and view.is_stuck(workload):
            reason = f"node {claim.node}, where {claim.name} lies, has no room for its pod"
            found.append(released(workload, reason, view, avoids=claim.node))
    return found


def moves(view: View, room: Room, staying: Iterable[Workload]) -> list[Action]:
    """Release idle workers from a device that is larger than was preferred, once a preferred one is free."""
    groups: dict[str, list[Workload]] = defaultdict(list)
    for workload in staying:
        claim = view.claim(workload)
        if claim is not None and _is_larger(claim) and workload.phase != "Stopping":
            groups[claim.name].append(workload)
    return [action for name in sorted(groups) for action in _back(view.claims[name], groups[name], room, view)]


def _is_larger(claim: Claim) -> bool:
    """Tell whether the claim lies on a device beyond its preferred tier."""
    return claim.is_allocated and not claim.fixed and bool(claim.tiers) and claim.device_bytes > claim.tiers[0]


def _back(claim: Claim, members: list[Workload], room: Room, view: View) -> list[Action]:
    """Move idle workers back from a device that is larger than was preferred, once a preferred one is free."""
    if len(members) != len(claim.seats):
        return []
    if any(view.idle_s(workload) < view.policy.migrate_idle_s or not _rests(workload, view) for workload in members):
        return []
    largest = max(members, key=lambda workload: workload.need.device_bytes)
    host_bytes = sum(workload.need.host_bytes for workload in members)
    need = replace(largest.need, host_bytes=host_bytes)
    spot = room.find(largest.kind, need, join=False)
    if spot is None or spot.device_bytes > claim.tiers[0]:
        return []
    room.take(spot, need)
    reason = f"idle on a device of {in_words(claim.device_bytes)}, and one of {in_words(spot.device_bytes)} is free"
    return [released(each, reason, view) for each in members]


def _rests(workload: Workload, view: View) -> bool:
    process = view.process(workload)
    return workload.phase == "Reserved" or (process is not None and process.phase == "running" and not process.leaving)
