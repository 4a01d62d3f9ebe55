"""From what is seen to what is done: pure, so that every case is a test.

One workload serves a pool: it is wanted from the first operation on, kept while there is work, and let
go after an idle time. Applying a decision twice, or the same decision by two deciders, is harmless.
"""

from __future__ import annotations

from collections.abc import Iterable

from openrl.scheduler.resources import Action, Decision, Demand, Pool, Snapshot, Worker, Workload

HUNG_LEASES, HUNG_LEAST_S = 3.0, 30.0
"""A process that runs hangs when its lease ended so many leases ago, or so many seconds if that is longer."""


def decide(snapshot: Snapshot) -> Decision:
    """Return what brings what runs in line with what is asked for."""
    stops = [action for workload in _by_name(snapshot.workloads) if (action := _stop(workload, snapshot))]
    leaving = {action.workload.name for action in stops}
    staying = [workload for workload in snapshot.workloads if workload.name not in leaving]
    replaced = [action for workload in _by_name(staying) if (action := _replace(workload, snapshot))]
    return Decision(actions=(*stops, *replaced, *_starts(snapshot, staying)))


def _replace(workload: Workload, snapshot: Snapshot) -> Action | None:
    """Replace a process that runs and has lost its lease for so long that it must hang.

    One that never had a lease is still starting. A time in which the scheduler saw nothing doesn't count: the store
    or the whole machine may have stood still, and nobody could renew anything.
    """
    process, sign = snapshot.processes.get(workload.name), snapshot.signs.get(workload.name)
    if process is None or sign is None or (process.pid, process.generation) != (sign.pid, workload.generation):
        return None
    silent_s = snapshot.now - max(sign.at, snapshot.watched_since)
    if silent_s < snapshot.lease_s + max(HUNG_LEASES * snapshot.lease_s, HUNG_LEAST_S):
        return None
    reason = f"process {process.pid} runs and has not renewed its lease for {silent_s:.0f} s: it hangs"
    return Action(verb="replace", workload=workload, reason=reason)


def _stop(workload: Workload, snapshot: Snapshot) -> Action | None:
    demand = snapshot.demand.get(workload.pool)
    if demand is None:
        return Action(verb="stop", workload=workload, reason=f"{workload.base} is no longer served")
    if demand.depth:
        return None
    workers = [w for w in snapshot.workers if (w.kind, w.slug) == (workload.kind, workload.slug)]
    if any(worker.state in ("starting", "busy") for worker in workers):
        return None
    idle_s = snapshot.now - _last_use(workload, workers)
    if idle_s < snapshot.idle_timeout_s:
        return None
    reason = f"nothing to do for {idle_s:.0f} s (idle timeout {snapshot.idle_timeout_s:g} s)"
    return Action(verb="stop", workload=workload, reason=reason)


def _last_use(workload: Workload, workers: Iterable[Worker]) -> float:
    """Return when the pool last had work; one whose worker never came up counts from when it was wanted."""
    return max([workload.since, *(max(worker.started, worker.last_busy) for worker in workers)])


def _starts(snapshot: Snapshot, staying: list[Workload]) -> list[Action]:
    served = {workload.pool for workload in staying}
    actions = []
    for pool, demand in sorted(snapshot.demand.items(), key=_longest_waiting_first):
        if not demand.depth or pool in served:
            continue
        accelerator = _least_loaded(snapshot.accelerators, staying)
        workload = Workload(
            name=pool.workload_name,
            kind=pool.kind,
            base=pool.base,
            slug=pool.slug,
            accelerator=accelerator,
            since=snapshot.now,
        )
        staying = [*staying, workload]
        actions.append(Action(verb="start", workload=workload, reason=_why(demand, accelerator)))
    return actions


def _longest_waiting_first(item: tuple[Pool, Demand]) -> tuple[float, Pool]:
    pool, demand = item
    return -demand.oldest_s, pool


def _least_loaded(accelerators: int, workloads: Iterable[Workload]) -> int | None:
    """Return the accelerator with the fewest workloads, the lowest index among equals; None without any."""
    if not accelerators:
        return None
    load = [0] * accelerators
    for workload in workloads:
        if workload.accelerator is not None and workload.accelerator < accelerators:
            load[workload.accelerator] += 1
    return load.index(min(load))


def _why(demand: Demand, accelerator: int | None) -> str:
    operations = "1 operation waits" if demand.depth == 1 else f"{demand.depth} operations wait"
    where = "the CPU" if accelerator is None else f"accelerator {accelerator}"
    return f"{operations}, the oldest for {demand.oldest_s:.1f} s, and no worker is there; goes to {where}"


def _by_name(workloads: Iterable[Workload]) -> list[Workload]:
    return sorted(workloads, key=lambda workload: workload.name)
