"""A snapshot, looked up: which workload serves which pool, what its worker does, how long it has had nothing to do.

Made once a decision; changes nothing and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property

from openrl.scheduler.resources import Claim, Demand, Need, Pool, Process, Snapshot, Worker, Workload

NO_DEMAND = Demand()
NO_NEED = Need()


class View:
    """What decisions ask of a snapshot, each in constant time."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.seen = snapshot.seen
        self.policy = snapshot.policy
        self.now = snapshot.now
        self.workloads = sorted(snapshot.seen.workloads, key=lambda workload: workload.name)
        self.by_name = {workload.name: workload for workload in self.workloads}
        self.claims: dict[str, Claim] = {claim.name: claim for claim in snapshot.seen.claims}
        self.pools: dict[str, Pool] = {workload.name: workload.pool for workload in self.workloads}
        self.replicas: defaultdict[Pool, list[Workload]] = defaultdict(list)
        for workload in self.workloads:
            self.replicas[self.pools[workload.name]].append(workload)
        self._workers: dict[str, Worker] = {}
        self._of_pool: defaultdict[tuple[str, str], list[Worker]] = defaultdict(list)
        for worker in snapshot.workers:
            self._workers[worker.worker_id] = worker
            self._of_pool[worker.kind, worker.slug].append(worker)

    def demand(self, workload: Workload) -> Demand | None:
        """Return what its pool has before it; None where the pool isn't served any more."""
        return self.snapshot.demand.get(self.pools[workload.name])

    def need(self, pool: Pool) -> Need:
        """Return what a worker of the pool takes."""
        return self.snapshot.needs.get(pool, NO_NEED)

    def process(self, workload: Workload) -> Process | None:
        """Return what runs for it."""
        return self.seen.processes.get(workload.name)

    def is_stuck(self, workload: Workload) -> bool:
        """Tell whether no node takes its pod for so long that it isn't only that nobody has looked yet."""
        process = self.process(workload)
        return (
            process is not None
            and process.unschedulable
            and not process.leaving
            and process.generation == workload.generation
            and self.now - process.unschedulable_since >= self.policy.unschedulable_s
        )

    @cached_property
    def stuck_claims(self) -> set[str]:
        """Return the pending claims that no device is found for: for so long that none which looks free can be."""
        pending = {claim.name for claim in self.seen.claims if claim.node is None}
        return {each.claim for each in self.workloads if each.claim in pending and self.is_stuck(each)}

    def avoided(self, workload: Workload) -> str:
        """Return where it is not to be placed now, "" for nowhere."""
        return workload.avoids if self.now - workload.since < self.policy.avoid_s else ""

    def claim(self, workload: Workload) -> Claim | None:
        """Return the claim that it has a seat at, None where it has none or that is gone."""
        return self.claims.get(workload.claim) if workload.claim is not None else None

    def workers(self, workload: Workload) -> list[Worker]:
        """Return its live worker: the one of its name, else those of its pool."""
        mine = self._workers.get(workload.name)
        if mine is not None:
            return [mine]
        return self._of_pool[workload.kind, workload.slug] if len(self.replicas[self.pools[workload.name]]) == 1 else []

    def idle_s(self, workload: Workload) -> float:
        """Return for how long it has had nothing to do; 0 while there is work, or its worker starts or computes.

        One whose worker never came up counts from when it was wanted.
        """
        demand = self.demand(workload)
        if demand is not None and demand.depth and not self._is_surplus(workload, demand):
            return 0.0
        workers = self.workers(workload)
        if any(worker.state in ("starting", "busy") for worker in workers):
            return 0.0
        last = max([workload.since, *(max(worker.started, worker.last_busy) for worker in workers)])
        return max(self.now - last, 0.0)

    def num_wanted(self, pool: Pool, demand: Demand) -> int:
        """Return how many workers the pool's demand calls for: more than one for samplers alone."""
        if not demand.depth:
            return 0
        if pool.kind != "sampler":
            return 1
        return max(1, min(self.policy.sampler_replicas, -(-demand.depth // self.policy.replica_depth)))

    def _is_surplus(self, workload: Workload, demand: Demand) -> bool:
        """Tell whether the pool's demand could do without this one: its number is beyond what is called for."""
        pool = self.pools[workload.name]
        kept = {pool.replica_name(number) for number in range(self.num_wanted(pool, demand))}
        return workload.name not in kept
