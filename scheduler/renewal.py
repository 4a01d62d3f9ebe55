"""Which processes are replaced in their place: those that hang, and those of another version, a few at a time.

A process that is replaced is asked to end: a worker then finishes its pass and hands back its runs, so a fresh one goes
on where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from openrl.scheduler.resources import Action, Process, Sign, Workload
from openrl.scheduler.view import View

HUNG_LEASES, HUNG_LEAST_S = 3.0, 30.0
"""A process that runs hangs when its lease ended so many leases ago, or so many seconds if that is longer."""


def replacements(view: View, staying: Iterable[Workload]) -> list[Action]:
    """Return the processes to replace."""
    staying = list(staying)
    hung = [action for workload in staying if (action := _hung(workload, view))]
    return [*hung, *_outdated(view, staying, busy={action.name for action in hung})]


def _hung(workload: Workload, view: View) -> Action | None:
    """Replace a process that runs and has lost its lease for so long that it must hang.

    One that never had a lease is still starting. A time in which the scheduler saw nothing doesn't count: the store
    or the whole machine may have stood still, and nobody could renew anything.
    """
    snapshot = view.snapshot
    process, sign = view.process(workload), snapshot.signs.get(workload.name)
    if process is None or sign is None or not _is_its_sign(process, sign) or process.leaving:
        return None
    if process.phase != "running" or process.generation != workload.generation:
        return None
    silent_s = view.now - max(sign.at, snapshot.watched_since)
    if silent_s < snapshot.lease_s + max(HUNG_LEASES * snapshot.lease_s, HUNG_LEAST_S):
        return None
    who = f"process {process.pid}" if process.pid else "its pod"
    reason = f"{who} runs and has not renewed its lease for {silent_s:.0f} s: it hangs"
    return _renewed(workload, workload.version, reason, view)


def _is_its_sign(process: Process, sign: Sign) -> bool:
    """Tell whether the sign of life is of this process, and not of the one before: of a pod, by when it started."""
    return process.pid == sign.pid if process.pid else sign.at >= process.started


def _outdated(view: View, staying: list[Workload], *, busy: set[str]) -> list[Action]:
    """Replace workers of another version, the idle ones first, while no more than `surge` are on their way up."""
    version = view.policy.version
    if not version:
        return []
    old = [each for each in staying if each.is_to_run and each.version != version and each.name not in busy]
    room = view.policy.surge - len(busy) - sum(_is_coming(each, view) for each in staying if each.version == version)
    chosen = sorted(old, key=lambda each: (-view.idle_s(each), each.since, each.name))[: max(room, 0)]
    return [
        _renewed(each, version, f"runs {each.version or 'an unknown version'}; {version} follows", view)
        for each in chosen
    ]


def _is_coming(workload: Workload, view: View) -> bool:
    """Tell whether its fresh process is not yet at work. One that stands before a claim may wait for days: not that."""
    process, claim = view.process(workload), view.claim(workload)
    if not workload.is_to_run or (claim is not None and claim.node is None and process and process.unschedulable):
        return False
    if process is None or process.phase != "running" or process.generation != workload.generation:
        return True
    return not view.workers(workload)


def _renewed(workload: Workload, version: str, reason: str, view: View) -> Action:
    # Wanted anew: one that was idle is not let go while its fresh process still starts.
    after = replace(workload, generation=workload.generation + 1, version=version, since=view.now)
    return Action(verb="replace", workload=workload, after=after, reason=reason)
