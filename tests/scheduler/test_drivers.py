"""One suite for every driver: the same decisions do the same on this machine as on a cluster, here an emulated one.

What only Kubernetes can do to a scheduler is in `tests/kube`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from openrl.scheduler.clusters.kubernetes import KubernetesCluster
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.clusters.simulated import SimulatedCluster
from openrl.scheduler.decide import decide
from openrl.scheduler.resources import Cluster, Decision, Demand, Need, Policy, Pool, Process, Sign, Snapshot, Worker
from openrl.scheduler.trace import Latencies, Machines
from openrl.tasks import keys
from openrl.tasks.assignment import Assignments
from tests.kube.conftest import connect
from tests.kube.machines import Machines as Emulated
from tests.kube.world import SETTINGS

TRAINER, SAMPLER = (Pool(slug="tiny", kind=kind, base="Org/Tiny") for kind in ("trainer", "sampler"))
FULL = [Pool(slug=keys.pool_slug("tiny", "ann", "run"), kind=kind, base="Org/Tiny") for kind in ("trainer", "sampler")]
ACCELERATORS = 2
AT_ONCE = Latencies(allocate_s=0, start_s=0, stop_s=0, node_s=1e9, pass_s=1)


@dataclass
class World:
    """A driver, and a clock; on each tick time passes and the scheduler looks."""

    cluster: Any
    policy: Policy = field(default_factory=lambda: Policy(idle_timeout_s=60, drop_s=1, most_seats=2, most_pending=0))
    now: float = 1000.0
    machines: Emulated | None = None
    signs: dict[str, Sign] = field(default_factory=dict)

    def tick(self, asked: dict[Pool, int], *, cluster: Cluster | None = None) -> Decision:
        self.now += 1
        if isinstance(self.cluster, SimulatedCluster):
            self.cluster.advance(self.now)
        if self.machines:
            self.machines.step(1.0)
        chosen = cluster or self.cluster
        decision = decide(self.snapshot(asked))
        chosen.apply(decision.actions)
        return decision

    def snapshot(self, asked: dict[Pool, int]) -> Snapshot:
        pools = (TRAINER, SAMPLER, *FULL)
        seen = self.cluster.observe()
        workers = [
            Worker(worker_id=each.name, kind=each.kind, slug=each.slug, state="ready", started=each.since,
                   last_busy=self.now if asked.get(each.pool) else 0.0)
            for each in seen.workloads if each.is_to_run
        ]  # fmt: skip
        demand = {pool: Demand(depth=asked.get(pool, 0), oldest_s=1.0) for pool in pools}
        needs = {pool: Need(owner="ann" if pool.is_full else "") for pool in pools}
        return Snapshot(now=self.now, demand=demand, seen=seen, needs=needs, workers=tuple(workers), policy=self.policy,
                        signs=self.signs)  # fmt: skip

    def settle(self, asked: dict[Pool, int], *, ticks: int = 5) -> None:
        for _ in range(ticks):
            self.tick(asked)

    def places(self) -> dict[str, str | None]:
        return {each.name: each.claim for each in self.cluster.observe().workloads}


@pytest.fixture(params=["local", "simulated", "kubernetes"])
def world(request, store) -> Iterator[World]:
    if request.param == "local":
        yield World(LocalCluster(store, accelerators=ACCELERATORS))
    elif request.param == "simulated":
        machine = Machines(name="n", count=1, most=1, devices=ACCELERATORS, device_gib=24, host_gib=64)
        yield World(SimulatedCluster([machine], AT_ONCE))
    else:
        yield from emulated(store)


def emulated(store) -> Iterator[World]:
    """Run the Kubernetes driver on a cluster whose pods start and stop at once."""
    machines = Emulated()
    machines.start_s = machines.stop_s = 0.0
    machines.add_node("n", gpus=ACCELERATORS, gpu="24Gi", memory="64Gi")
    with machines.server:
        api = connect(machines)
        cluster = KubernetesCluster(api, SETTINGS, Assignments(store), clock=lambda: machines.clock_s)
        yield World(cluster, now=machines.clock_s, machines=machines)
        api.close()
    assert not machines.server.mistakes, machines.server.mistakes[0]


def test_demand_brings_a_worker_and_an_idle_time_takes_it_away(world):
    world.settle({TRAINER: 1})
    assert list(world.places()) == ["trainer-tiny"] and world.places()["trainer-tiny"] is not None
    world.settle({}, ticks=55)
    assert list(world.places()) == ["trainer-tiny"]
    world.settle({}, ticks=15)
    assert world.places() == {}
    world.settle({TRAINER: 1})
    assert list(world.places()) == ["trainer-tiny"]


def test_workers_spread_over_the_accelerators_and_then_share_them(world):
    world.settle({TRAINER: 1, SAMPLER: 1})
    assert len(set(world.places().values())) == 2
    world.settle({TRAINER: 1, SAMPLER: 1, FULL[0]: 1})
    claims = [claim for claim in world.cluster.observe().claims if claim.seats]
    assert sorted(len(claim.seats) for claim in claims) == [2, 2]


def test_a_full_run_has_a_place_for_its_sampler_from_the_start(world):
    world.settle({FULL[0]: 1})
    there = {each.kind: each for each in world.cluster.observe().workloads}
    assert set(there) == {"trainer", "sampler"} and None not in world.places().values()


def test_who_finds_no_room_waits_and_has_it_once_somebody_leaves(world):
    world.policy = Policy(idle_timeout_s=20, drop_s=1, most_seats=1, most_pending=0, preempt_idle_s=1000)
    world.settle({TRAINER: 1, SAMPLER: 1})
    world.settle({TRAINER: 1, SAMPLER: 1, FULL[0]: 1})
    assert [world.places()[pool.workload_name] for pool in FULL] == [None, None], "together or not at all"
    world.settle({FULL[0]: 1, FULL[1]: 1}, ticks=40)
    assert None not in [world.places()[pool.workload_name] for pool in FULL]


def test_a_second_scheduler_on_the_same_snapshot_changes_nothing(world):
    world.tick({TRAINER: 1, SAMPLER: 1})
    first = decide(world.snapshot({TRAINER: 1, SAMPLER: 1, FULL[0]: 1}))
    world.cluster.apply(first.actions)
    after = world.cluster.observe()
    assert world.cluster.apply(first.actions) == set()
    assert world.cluster.observe().claims == after.claims and world.cluster.observe().workloads == after.workloads


def test_it_comes_to_rest(world):
    asked = {TRAINER: 1, SAMPLER: 3, FULL[0]: 2, FULL[1]: 1}
    world.settle(asked, ticks=10)
    assert world.tick(asked).actions == ()


def test_a_worker_that_hangs_is_replaced_in_its_seat_on_every_driver(world):
    world.settle({TRAINER: 1})
    name, place = TRAINER.workload_name, world.places()
    if isinstance(world.cluster, LocalCluster):
        world.cluster.report({name: Process(pid=7, generation=0)})
    world.signs = {name: Sign(pid=7, at=world.now)}
    world.settle({TRAINER: 1}, ticks=3)
    assert [each.generation for each in world.cluster.observe().workloads] == [0], "it may yet renew its lease"
    world.now += 400
    if world.machines:
        world.machines.clock_s += 400
    assert [(each.verb, each.name) for each in world.tick({TRAINER: 1}).actions] == [("replace", name)]
    assert [each.generation for each in world.cluster.observe().workloads] == [1] and world.places() == place


def test_who_was_replaced_counts_its_idle_time_anew_on_every_driver(world):
    world.settle({TRAINER: 1})
    [before] = world.cluster.observe().workloads
    world.policy = replace(world.policy, version="next")
    world.settle({TRAINER: 1}, ticks=30)
    [after] = world.cluster.observe().workloads
    assert after.generation == 1 and after.version == "next"
    assert after.since > before.since
