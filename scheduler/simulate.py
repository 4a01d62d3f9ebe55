"""The real `decide` against a cluster in memory: what a policy makes of a trace, and how long a decision takes.

Between two passes each accelerator is shared by those who compute on it, in turns: a job that has it for half of its
time leaves the other half to its neighbours. Time is simulated, decisions are timed for real.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean, median

from openrl.scheduler.clusters.simulated import SimulatedCluster
from openrl.scheduler.decide import decide
from openrl.scheduler.resources import Decision, Demand, Kind, Need, Pool, Snapshot, Worker
from openrl.scheduler.trace import Job, Trace
from openrl.tasks import keys

END_S = 14 * 24 * 3600.0
"""Simulated time after which a trace that doesn't end is given up."""


QUIET_PASSES = 100
"""After so many passes in which nothing happens, nothing will."""


@dataclass(slots=True)
class _Running:
    """A job that has come and isn't done. `waited_s`: until its workers ran, None while they don't."""

    job: Job
    pools: dict[Kind, Pool]
    left_s: float
    waited_s: float | None = None
    last_busy: float = 0.0


@dataclass(slots=True)
class Outcome:
    """What a simulation measured. `unmet`: jobs that no machine of the trace could ever serve, and why."""

    trace: str
    jobs: int
    done: int = 0
    passes: int = 0
    actions: int = 0
    simulated_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    decide_s: list[float] = field(default_factory=list)
    busy_s: float = 0.0
    available_s: float = 0.0
    unusable: list[float] = field(default_factory=list)
    most_workloads: int = 0
    most_nodes: int = 0
    unmet: dict[str, str] = field(default_factory=dict)

    @property
    def utilisation(self) -> float:
        """Return the share of the accelerators' time in which somebody computed, while there was work."""
        return self.busy_s / self.available_s if self.available_s else 0.0

    @property
    def fragmentation(self) -> float:
        """Return the share of the nodes' memory that was free and of no use, on average over what waited in vain."""
        return mean(self.unusable) if self.unusable else 0.0

    @property
    def decisions_per_s(self) -> float:
        """Return how many actions were decided a second of real time."""
        spent = sum(self.decide_s)
        return self.actions / spent if spent else 0.0


class Simulation:
    """One trace, from its first job to the end of its last."""

    def __init__(self, trace: Trace, *, end_s: float = END_S) -> None:
        self._trace = trace
        self._end_s = end_s
        self.cluster = SimulatedCluster(trace.machines, trace.latencies)
        self._jobs = list(reversed(trace.jobs))
        self._running: list[_Running] = []
        self._outcome = Outcome(trace=trace.name, jobs=len(trace.jobs))
        self._needs: dict[Pool, Need] = {}

    def run(self) -> Outcome:
        """Simulate until nothing is left to do; return what was measured."""
        step = self._trace.latencies.pass_s
        now, quiet = 0.0, 0
        while (self._jobs or self._running) and now < self._end_s:
            self._arrive(now)
            self.cluster.advance(now)
            self._work(now, step)
            decision = self._decide(now)
            if not self._running and self._jobs:
                now = max(now + step, self._jobs[-1].at_s)
                continue
            quiet = quiet + 1 if self._is_stuck() and not decision.actions else 0
            if quiet == QUIET_PASSES:
                self._outcome.unmet |= decision.waits
                break
            now += step
        self._outcome.simulated_s = now
        return self._outcome

    def _arrive(self, now: float) -> None:
        while self._jobs and self._jobs[-1].at_s <= now:
            job = self._jobs.pop()
            slug = keys.pool_slug(job.name, job.need.owner, job.name) if job.full else job.name
            pools: dict[Kind, Pool] = {"trainer": Pool(slug=slug, kind="trainer", base=job.name)}
            self._needs[pools["trainer"]] = job.need
            if job.full and job.sampler is not None:
                pools["sampler"] = Pool(slug=slug, kind="sampler", base=job.name)
                self._needs[pools["sampler"]] = job.sampler
            self._running.append(_Running(job, pools, job.work_s))

    def _work(self, now: float, step: float) -> None:
        """Let each job whose workers run do its share of the step."""
        at: dict[str, list[_Running]] = {}
        for each in self._running:
            names = [pool.workload_name for pool in each.pools.values()]
            if not all(self.cluster.is_running(name) for name in names):
                continue
            if each.waited_s is None:
                each.waited_s = now - each.job.at_s
                self._outcome.waits_s.append(each.waited_s)
            each.last_busy = now
            for claim in {self.cluster.workloads[name].claim or "" for name in names}:
                at.setdefault(claim, []).append(each)
        slowed: dict[str, float] = {}
        for sharers in at.values():
            wanted = sum(each.job.duty for each in sharers)
            self._outcome.busy_s += step * min(wanted, 1.0)
            for each in sharers:
                slowed[each.job.name] = min(slowed.get(each.job.name, 1.0), 1.0 / max(wanted, 1.0))
        for each in self._running:
            each.left_s -= step * slowed.get(each.job.name, 0.0)
        self._outcome.done += sum(each.left_s <= 0 for each in self._running)
        self._running = [each for each in self._running if each.left_s > 0]
        if self._running:
            self._outcome.available_s += step * len(self.cluster.devices)

    def _decide(self, now: float) -> Decision:
        snapshot = self._snapshot(now)
        begun = time.perf_counter()
        decision = decide(snapshot)
        self._outcome.decide_s.append(time.perf_counter() - begun)
        self.cluster.apply(decision.actions)
        out = self._outcome
        out.passes += 1
        out.actions += len(decision.actions)
        out.most_workloads = max(out.most_workloads, len(self.cluster.workloads))
        out.most_nodes = max(out.most_nodes, len(self.cluster.nodes))
        if decision.waits:
            out.unusable.append(self._free_share())
        return decision

    def _snapshot(self, now: float) -> Snapshot:
        demand = {
            pool: Demand(depth=1, oldest_s=now - each.job.at_s if each.waited_s is None else 0.0)
            for each in self._running
            for pool in each.pools.values()
        }
        asked = {pool.workload_name for pool in demand}
        idle = {workload.pool: Demand() for workload in self.cluster.workloads.values() if workload.name not in asked}
        return Snapshot(
            now=now,
            demand=demand | idle,
            seen=self.cluster.observe(),
            needs=self._needs,
            workers=tuple(self._workers(now, asked)),
            policy=self._trace.policy,
        )

    def _workers(self, now: float, asked: set[str]) -> Iterable[Worker]:
        for name, workload in self.cluster.workloads.items():
            if self.cluster.is_running(name):
                state, busy = ("busy", now) if name in asked else ("ready", 0.0)
                yield Worker(worker_id=name, kind=workload.kind, slug=workload.slug, state=state,
                             started=workload.since, last_busy=busy)  # fmt: skip

    def _free_share(self) -> float:
        """Return the share of the nodes' memory that nobody has, while somebody waits."""
        total = sum(node.host_bytes for node in self.cluster.nodes.values())
        taken = sum(seat.host_bytes for each in self.cluster.claims.values() if each.claim.node is not None
                    for seat in each.seats.values())  # fmt: skip
        return 1.0 - taken / total if total else 0.0

    def _is_stuck(self) -> bool:
        """Tell whether nothing happens: none runs, none starts, and no machine comes."""
        return (
            bool(self._running)
            and not self.cluster.moves()
            and all(each.waited_s is None or each.left_s <= 0 for each in self._running)
        )


def simulate(trace: Trace, *, end_s: float = END_S) -> Outcome:
    """Run a trace to its end, or for so many seconds of its own."""
    return Simulation(trace, end_s=end_s).run()


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share of them lies; 0 of none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def figures(outcome: Outcome) -> list[dict[str, object]]:
    """Return what was measured, in the fields of docs/benchmarks.md."""
    name, waits, took = outcome.trace, outcome.waits_s, outcome.decide_s
    return [
        line(f"{name}_utilisation", outcome.utilisation, "x", baseline=1.0, ratio=outcome.utilisation),
        line(f"{name}_wait_median_s", median(waits) if waits else 0.0, "s", runs=len(waits)),
        line(f"{name}_wait_p99_s", percentile(waits, 0.99), "s", runs=len(waits)),
        line(f"{name}_fragmentation", outcome.fragmentation, "x", runs=len(outcome.unusable)),
        line(f"{name}_decisions_per_s", outcome.decisions_per_s, "1/s", runs=outcome.passes),
        line(f"{name}_decide_ms", 1e3 * median(took), "ms", runs=outcome.passes, spread=1e3 * (max(took) - min(took))),
        line(f"{name}_done", float(outcome.done), "jobs", baseline=float(outcome.jobs),
             ratio=outcome.done / max(outcome.jobs, 1)),
    ]  # fmt: skip


def line(
    name: str,
    value: float,
    unit: str,
    *,
    baseline: float = 0.0,
    ratio: float | None = None,
    runs: int = 1,
    spread: float = 0.0,
) -> dict[str, object]:
    """Return one figure."""
    return {
        "name": name, "value": round(value, 3), "unit": unit, "baseline": round(baseline, 3),
        "ratio": None if ratio is None else round(ratio, 3), "runs": runs, "spread": round(spread, 3),
    }  # fmt: skip
