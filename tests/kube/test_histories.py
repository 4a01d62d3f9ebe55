"""Random histories: whatever people, machines, the API server and two schedulers do, the promises hold.

At every moment no accelerator has a worker without a seat and no workload two workers (`World.check`). When the trouble
is over, what is asked for runs, and when nothing is asked for, nothing is left.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from openrl.scheduler.clusters.kube_api import ApiError
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from tests.conftest import QUICK_OPTIONS, store_server
from tests.kube.machines import NAMESPACE, Machines
from tests.kube.server import Fault, Request
from tests.kube.test_crashes import FAULTS
from tests.kube.world import POLICY, SAMPLER, TRAINER, World, full

POOLS = (TRAINER, SAMPLER, full(1), full(1, "sampler"), full(2))
OWNERS = {full(1): "ann", full(1, "sampler"): "ann", full(2): "bob"}
NODES = ("n1", "n2")
SOON = replace(POLICY, idle_timeout_s=15.0, drop_s=5.0, migrate_idle_s=10.0, preempt_idle_s=5.0, patience_s=20.0)


@pytest.fixture(scope="module")
def quick_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A store without a disk, emptied for each history."""
    with store_server(QUICK_OPTIONS) as url:
        yield Store.connect(StoreSettings(redis_url=url, data_dir=tmp_path_factory.mktemp("data")))


class History(RuleBasedStateMachine):
    """One cluster with two nodes, two schedulers, and everything that can happen to it."""

    store: Store

    def __init__(self) -> None:
        super().__init__()
        self.store.redis.flushall()
        self.machines = Machines()
        self.machines.server.__enter__()
        self.machines.stop_s = 2.0
        self.names = itertools.count(1)
        for name in NODES:
            self.machines.add_node(name, gpus=1)
        self.world = World(self.machines, self.store, policy=SOON)
        for pool in POOLS:
            self.world.ask(pool, 0, owner=OWNERS.get(pool, ""), device_bytes=20 << 30, host_bytes=30 << 30)
        self.other = self.world.new_scheduler()

    @rule(pool=st.sampled_from(POOLS), depth=st.integers(0, 3))
    def somebody_asks_or_rests(self, pool, depth):
        self.world.ask(pool, depth, owner=OWNERS.get(pool, ""), device_bytes=20 << 30, host_bytes=30 << 30)

    @rule(seconds=st.sampled_from([1.0, 3.0, 12.0]))
    def time_passes(self, seconds):
        self.world.step(seconds)

    @rule()
    def a_scheduler_looks(self):
        self.world.reconcile()

    @rule(times=st.integers(1, 4))
    def both_go_on(self, times):
        for _ in range(times):
            self.world.step()
            self.world.reconcile()
            self.world.check()
            self.world.reconcile(self.other)

    @rule()
    def two_decide_on_the_same_look(self):
        try:
            one, two = self.world.decide(self.world.scheduler), self.world.decide(self.other)
        except ApiError:
            return
        self.other.apply(two.actions)
        self.world.check()
        self.world.scheduler.apply(one.actions)

    @rule(after=st.integers(1, 24), what=st.sampled_from(["other", "other", "step", "rest", "delete", "evict"]))
    def something_happens_between_two_calls_of_a_scheduler(self, after, what):
        """Before its n-th call of this pass another scheduler makes a whole pass, or the cluster goes on."""
        last = len(self.machines.server.calls) + after
        is_done = False

        def act(request: Request) -> None:
            nonlocal is_done
            if is_done or request.number < last:
                return
            is_done = True
            self._do(what)

        with self.machines.server.failing(act):
            self.world.reconcile()

    def _do(self, what: str) -> None:
        match what:
            case "other":
                self.world.reconcile(self.other)
                self.world.step(3)
                self.world.reconcile(self.other)
            case "step":
                self.world.step(3)
            case "rest":
                self.world.rest()
                self.world.reconcile(self.other)
            case "delete":
                self.somebody_deletes_something(0, "workloads")
                self.world.reconcile(self.other)
                self.world.step(3)
                self.world.reconcile(self.other)
                self.world.reconcile(self.other)
            case "evict":
                self.a_pod_is_evicted(0)
                self.world.step(3)
                self.world.reconcile(self.other)
        self.world.check()

    @rule(after=st.integers(0, 6))
    def the_scheduler_dies(self, after):
        """It makes so many more writes; what it was about to do next never happens."""
        last = len(self.machines.server.writes) + after
        is_dead = False

        def cut(request: Request) -> Fault | None:
            # The server can't kill its client: it hears it no more from there on, and the client is thrown away.
            nonlocal is_dead
            is_dead = is_dead or request.write > last
            return FAULTS["cut"] if is_dead else None

        with self.machines.server.failing(cut):
            self.world.reconcile()
        self.world.scheduler = self.world.new_scheduler()

    @rule(kind=st.sampled_from(sorted(FAULTS)), every=st.integers(2, 5), times=st.integers(1, 3))
    def the_server_fails_now_and_then(self, kind, every, times):
        fault = FAULTS[kind]
        with self.machines.server.failing(lambda request: fault if request.number % every == 0 else None):
            for _ in range(times):
                self.world.step()
                self.world.reconcile()

    @rule(number=st.integers(0, 9))
    def a_pod_is_evicted(self, number):
        if pods := self.world.all("pods"):
            self.machines.evict(pods[number % len(pods)]["metadata"]["name"])

    @rule(number=st.integers(0, 9), code=st.sampled_from([0, 1]))
    def a_worker_ends(self, number, code):
        if running := sorted(self.machines.running()):
            self.machines.exit(running[number % len(running)], code)

    @rule(number=st.integers(0, 9), plural=st.sampled_from(["pods", "resourceclaims", "workloads"]))
    def somebody_deletes_something(self, number, plural):
        if there := self.world.all(plural):
            kind = self.machines._kind(plural)
            self.machines.objects.delete(kind, NAMESPACE, there[number % len(there)]["metadata"]["name"], {})

    @rule(number=st.integers(0, 9))
    def somebody_deletes_a_pod_by_force(self, number):
        if pods := self.world.all("pods"):
            name = pods[number % len(pods)]["metadata"]["name"]
            self.machines.objects.delete(self.machines._kind("pods"), NAMESPACE, name, {"gracePeriodSeconds": 0})

    @rule(name=st.sampled_from(NODES))
    def a_node_falls_silent(self, name):
        if name in self.machines._nodes():
            self.machines.lose_node(name)

    @rule(name=st.sampled_from(NODES))
    def a_node_comes_back(self, name):
        if name not in self.machines._nodes():
            self.machines.add_node(name, gpus=1)
        elif name in self.machines.silent:
            self.machines.reboot_node(name)

    @rule(name=st.sampled_from(NODES))
    def a_node_is_removed(self, name):
        if name in self.machines._nodes():
            self.machines.remove_node(name)

    @invariant()
    def the_promises_hold(self):
        self.world.check()

    def teardown(self) -> None:
        """The trouble is over: what is asked for comes, and goes."""
        try:
            for name in NODES:
                self.a_node_comes_back(name)
            asked = [pool for pool, demand in self.world.demand.items() if demand.depth]
            self._go_on(lambda: {pool.workload_name for pool in asked} <= self._served(), seconds=2.0)
            self.world.rest()
            self._go_on(self.world.is_empty, seconds=5.0)
            said = {self.store.redis.get(key) for key in self.store.redis.scan_iter("openrl:assignment:*")}
            assert said <= {b"ended"}, "a place is current that nobody has"
            assert not self.machines.server.mistakes, self.machines.server.mistakes[0]
        finally:
            self.world.close()
            self.machines.server.__exit__()

    def _served(self) -> set[str]:
        pods = {pod["metadata"]["name"]: pod for pod in self.world.all("pods")}
        return {
            pods[name]["metadata"]["annotations"]["openrl.io/name"]
            for name, assignment in self.machines.running().items()
            if assignment in self.world.seats()
        }

    def _go_on(self, is_so, *, seconds: float) -> None:
        for number in range(120):
            if is_so():
                return
            self.world.step(seconds)
            self.world.reconcile(self.other if number % 3 == 2 else None)
            self.world.check()
        raise AssertionError(f"it doesn't converge\n{self.world.words()}")


def walk(store: Store, *, examples: int, steps: int) -> None:
    History.store = store
    run_state_machine_as_test(
        History,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=not os.environ.get("OPENRL_TEST_RANDOM"),
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if os.environ.get("OPENRL_TEST_SHRINK") else [Phase.generate],
        ),
    )


def test_a_few_random_histories_keep_every_promise_and_converge(quick_store):
    walk(quick_store, examples=4, steps=15)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_random_histories_keep_every_promise_and_converge(quick_store):
    walk(quick_store, examples=int(os.environ.get("OPENRL_TEST_EXAMPLES", 40)), steps=40)
