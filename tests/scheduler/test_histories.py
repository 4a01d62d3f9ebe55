"""Whatever happens in whatever order, seats stay true, nothing is given twice, and all that can be served is.

Random histories on a cluster in memory: demand comes and goes, nodes are lost and come, pods are evicted, claims are
deleted under their users. After each step the invariants are looked at; after the last one, rest is waited for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrl.scheduler.clusters.simulated import SimulatedCluster
from openrl.scheduler.decide import decide
from openrl.scheduler.resources import Decision, Demand, Limit, Need, Policy, Pool, Snapshot, Worker
from openrl.scheduler.simulate import simulate
from openrl.scheduler.trace import GIB, Job, Latencies, Machines, Trace
from openrl.tasks import keys

QUICK = Latencies(allocate_s=0, start_s=4, stop_s=4, node_s=20, pass_s=5)
SIZES = (8, 16, 24, 60)


def pools() -> list[Pool]:
    """Three shared ones, and two full runs with a trainer and a sampler each."""
    shared = [Pool(slug=f"base-{n}", kind=kind, base=f"Base-{n}") for n, kind in enumerate(("trainer", "sampler") * 2)]
    runs = [keys.pool_slug("base-0", tenant, "run") for tenant in ("ann", "bob", "cho")]
    return shared + [Pool(slug=slug, kind=kind, base="Base-0") for slug in runs for kind in ("trainer", "sampler")]


POOLS = pools()
FULL = sorted({pool.slug for pool in POOLS if pool.is_full})


@st.composite
def needs(draw) -> dict[Pool, Need]:
    found = {}
    for pool in POOLS:
        owner = ("ann", "bob", "cho")[FULL.index(pool.slug)] if pool.is_full else ""
        found[pool] = Need(
            device_bytes=draw(st.sampled_from(SIZES)) * GIB,
            host_bytes=draw(st.sampled_from((4, 20, 40))) * GIB,
            exclusive=draw(st.integers(0, 9)) == 0,
            priority=draw(st.integers(0, 1)),
            owner=owner,
        )
    return found


policies = st.builds(
    Policy,
    strategy=st.sampled_from(("spread", "binpack")),
    idle_timeout_s=st.just(60.0),
    tiers=st.sampled_from(((), (24 * GIB, 80 * GIB))),
    residue_bytes=st.sampled_from((0, GIB)),
    most_seats=st.integers(1, 4),
    most_pending=st.integers(1, 8),
    patience_s=st.sampled_from((10.0, 60.0)),
    preempt_idle_s=st.just(5.0),
    migrate_idle_s=st.just(20.0),
    drop_s=st.just(5.0),
    limits=st.sampled_from(({}, {"ann": Limit(seats=2, weight=2.0)}, {"bob": Limit(seats=0)})),
)
machines = st.tuples(
    st.builds(Machines, name=st.just("small"), count=st.integers(0, 2), most=st.just(2), devices=st.integers(1, 2),
              device_gib=st.just(24), host_gib=st.just(64)),
    st.builds(Machines, name=st.just("large"), count=st.integers(0, 2), most=st.just(2), devices=st.integers(1, 2),
              device_gib=st.just(80), host_gib=st.just(128)),
)  # fmt: skip
happening = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(POOLS)),
    st.tuples(st.just("done"), st.sampled_from(POOLS)),
    st.tuples(st.just("lose"), st.integers(0, 3)),
    st.tuples(st.just("evict"), st.sampled_from(POOLS)),
    st.tuples(st.just("delete"), st.integers(0, 5)),
    st.tuples(st.just("wait"), st.integers(1, 30)),
)
happenings = st.lists(happening, max_size=25)
long_happenings = st.lists(happening, min_size=20, max_size=60)


class World:
    """A cluster, what is asked of it, and a scheduler that looks every five seconds."""

    def __init__(self, machines, needs, policy) -> None:
        self.cluster = SimulatedCluster(machines, QUICK)
        self.needs, self.policy = needs, policy
        self.asked: dict[Pool, float] = {}
        self.now = 0.0

    def snapshot(self) -> Snapshot:
        demand = {}
        for pool in POOLS:
            since = self.asked.get(pool)
            demand[pool] = Demand() if since is None else Demand(depth=2, oldest_s=self.now - since)
        workers = [
            Worker(worker_id=name, kind=w.kind, slug=w.slug, state="ready", started=w.since,
                   last_busy=self.now if w.pool in self.asked else 0.0)
            for name, w in self.cluster.workloads.items() if self.cluster.is_running(name)
        ]  # fmt: skip
        return Snapshot(
            now=self.now, demand=demand, seen=self.cluster.observe(), needs=self.needs, workers=tuple(workers),
            policy=self.policy,
        )  # fmt: skip

    def step(self) -> Decision:
        self.now += 5.0
        self.cluster.advance(self.now)
        before = self.seated()
        snapshot = self.snapshot()
        decision = decide(snapshot)
        assert decision == decide(shuffled(snapshot)), "the same snapshot, the same decision"
        self.cluster.apply(decision.actions)
        self.check(before)
        return decision

    def happen(self, what: str, which) -> None:
        if what == "ask":
            self.asked.setdefault(which, self.now)
        elif what == "done":
            self.asked.pop(which, None)
        elif what == "lose" and self.cluster.nodes:
            names = sorted(self.cluster.nodes)
            self.cluster.lose_node(names[which % len(names)])
        elif what == "evict":
            self.cluster.evict(which.workload_name)
        elif what == "delete" and self.cluster.claims:
            names = sorted(self.cluster.claims)
            self.cluster.delete_claim(names[which % len(names)])

    def seated(self) -> set[str]:
        return {name for each in self.cluster.claims.values() for name in each.seats}

    def check(self, before: set[str]) -> None:
        seen = self.cluster.observe()
        seats = Counter(seat.workload for claim in seen.claims for seat in claim.seats)
        assert not seats or max(seats.values()) == 1, "a worker has one seat"
        at = {workload.name: workload.claim for workload in seen.workloads if workload.claim is not None}
        assert set(at) == set(seats), "a seat for each worker that has a place, and no other"
        hosts: dict[str, int] = defaultdict(int)
        for claim in seen.claims:
            if claim.node is not None:
                hosts[claim.node] += sum(seat.host_bytes for seat in claim.seats)
            if claim.seats:
                self.check_claim(claim)
        for node in seen.nodes:
            assert hosts[node.name] <= node.host_bytes, "what is parked has room in its node's memory"
        self.check_gangs(before)
        owners = Counter(seat.owner for claim in seen.claims for seat in claim.seats)
        for tenant, limit in self.policy.limits.items():
            assert limit.seats is None or owners[tenant] <= limit.seats

    def check_claim(self, claim) -> None:
        assert len(claim.seats) == 1 or not any(seat.exclusive for seat in claim.seats)
        assert len(claim.seats) <= max(self.policy.most_seats, 2 if claim.node is None else 0, 2)
        if claim.node is not None:
            largest = max(seat.device_bytes for seat in claim.seats)
            assert largest + self.policy.residue_bytes * (len(claim.seats) - 1) <= claim.device_bytes

    def check_gangs(self, before: set[str]) -> None:
        now = self.seated()
        for slug in FULL:
            names = {pool.workload_name for pool in POOLS if pool.slug == slug}
            # Whoever came first did not come alone; one that was let go later, or moves, may be away.
            if not names & before and names & now:
                known = {name for name in names if name in self.cluster.workloads}
                assert names <= now or any(self.cluster.workloads[name].placed > 1 for name in known)


def shuffled(snapshot: Snapshot) -> Snapshot:
    """Return the same, seen in another order."""
    seen = snapshot.seen
    turned = replace(
        seen, nodes=seen.nodes[::-1], devices=seen.devices[::-1], claims=seen.claims[::-1],
        workloads=seen.workloads[::-1], processes=dict(reversed(list(seen.processes.items()))),
    )  # fmt: skip
    return replace(
        snapshot, seen=turned, demand=dict(reversed(list(snapshot.demand.items()))), workers=snapshot.workers[::-1]
    )


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(machines=machines, needs=needs(), policy=policies, history=happenings)
def test_seats_stay_true_in_every_history_and_it_comes_to_rest(machines, needs, policy, history):
    walk(machines, needs, policy, history)


@pytest.mark.full
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(machines=machines, needs=needs(), policy=policies, history=long_happenings)
def test_seats_stay_true_in_many_longer_histories_too(machines, needs, policy, history):
    walk(machines, needs, policy, history)


def walk(machines, needs, policy, history) -> None:
    """Let a history happen, and wait for rest."""
    world = World(machines, needs, policy)
    for what, which in history:
        world.happen(what, which)
        for _ in range(which if what == "wait" else 1):
            world.step()
    quiet = 0
    for _ in range(400):
        quiet = quiet + 1 if not world.step().actions and not world.cluster.is_changing() else 0
        if quiet > 5:
            break
    assert quiet > 5, "nothing is asked for any more, and still something is changed"
    if not world.asked:
        for _ in range(60):
            world.step()
        assert world.cluster.workloads == {} and world.cluster.claims == {}, "all is given back"


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_is_left_one_accelerator_for_two_that_share_none_comes_to_rest(lost):
    alone = {pool: Need(device_bytes=8 * GIB, host_bytes=4 * GIB, exclusive=pool.is_full) for pool in POOLS}
    large = Machines(name="large", count=2, most=2, devices=1, device_gib=80, host_gib=128)
    [sampler] = [pool for pool in POOLS if pool.slug == FULL[0] and pool.kind == "sampler"]
    history = [("ask", sampler), ("wait", 30), ("lose", lost)]
    walk((large,), alone, Policy(idle_timeout_s=60.0, preempt_idle_s=5.0, drop_s=5.0), history)


jobs = st.lists(
    st.builds(
        lambda at, work, device, host, full, exclusive, owner, priority: (
            at, work, Need(device_bytes=device * GIB, host_bytes=host * GIB, exclusive=exclusive,
                           owner=owner if full else "", priority=priority), full),
        st.integers(0, 300), st.integers(5, 200), st.sampled_from((*SIZES, 100)), st.sampled_from((4, 30, 50, 90)),
        st.booleans(), st.booleans(), st.sampled_from(("ann", "bob")), st.integers(0, 1),
    ),
    min_size=1, max_size=12,
)  # fmt: skip


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(machines=machines, policy=policies, drawn=jobs)
def test_whatever_could_be_served_alone_is_served_in_the_end(machines, policy, drawn):
    made = tuple(
        Job(name=f"j{n}", at_s=float(at), work_s=float(work), duty=0.5, need=need, full=full,
            sampler=replace(need, device_bytes=8 * GIB, host_bytes=4 * GIB) if full else None)
        for n, (at, work, need, full) in enumerate(drawn)
    )  # fmt: skip
    policy = replace(policy, limits={}, most_pending=64)
    outcome = simulate(Trace(name="t", machines=machines, jobs=tuple(sorted(made, key=lambda j: (j.at_s, j.name))),
                             policy=policy, latencies=QUICK), end_s=6000.0)  # fmt: skip
    possible = [job for job in made if could_be_served(job, machines, policy)]
    assert outcome.done >= len(possible)


def could_be_served(job: Job, machines, policy: Policy) -> bool:
    """Tell whether an empty cluster at its largest has room for all of the job, each worker on a device of its own."""
    largest = max(policy.tiers, default=1 << 62)
    fitting = [
        each for each in machines
        if job.need.device_bytes <= min(each.device_gib * GIB, largest) and job.need.host_bytes <= each.host_gib * GIB
    ]  # fmt: skip
    if not job.full:
        return bool(fitting)
    assert job.sampler is not None
    return any(
        job.need.host_bytes + job.sampler.host_bytes <= each.host_gib * GIB and each.devices >= 2 for each in fitting
    )
