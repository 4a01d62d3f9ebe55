"""A scheduler that dies between any two calls, and an API server that fails at any: the right objects in the end.

Between two writes nothing of a scheduler's own is left in the cluster, so a death before each write stands for all of
them: whatever it had read dies with it. The life that is walked through is: asked for, running, idle, gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kubernetes import client

from openrl.scheduler.clusters.kube_api import KubeApi
from openrl.scheduler.clusters.kubernetes import KubernetesCluster
from openrl.tasks.assignment import Assignments
from tests.kube.machines import NAMESPACE, Machines
from tests.kube.server import WRITES, Fault, Request
from tests.kube.world import POLICY, SAMPLER, TRAINER, World, full

QUICK = replace(POLICY, idle_timeout_s=10.0, drop_s=5.0)
FAULTS = {
    "lost": Fault("lost"),
    "cut": Fault("cut"),
    "500": Fault("error", 500),
    "409": Fault("error", 409),
    "429": Fault("error", 429),
}


class Death(BaseException):
    """The process is no more."""


class Mortal(client.ApiClient):
    """A connection whose process dies just before its n-th write."""

    def __init__(self, settings: client.Configuration, last: int) -> None:
        super().__init__(settings)
        self._left = last

    def call_api(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method in WRITES:
            self._left -= 1
            if self._left < 0:
                raise Death
        return super().call_api(method, *args, **kwargs)


def live(world: World, pass_: Callable[[World], None]) -> None:
    """Ask, wait until it runs, rest, wait until all is gone."""
    asked = list(world.demand)
    for seconds, is_so in ((1.0, lambda: world.serves(*asked)), (5.0, world.is_empty)):
        for _ in range(60):
            world.step(seconds)
            pass_(world)
            world.check()
            if is_so():
                break
        else:
            raise AssertionError(f"it doesn't converge\n{world.words()}")
        world.rest()


def num_writes(machines: Machines, store, ask: Callable[[World], None]) -> int:
    """Return how many writes an undisturbed life takes."""
    world = new_world(machines, store, ask)
    live(world, lambda world: world.reconcile())
    world.close()
    return len(machines.server.writes)


def new_world(machines: Machines, store, ask: Callable[[World], None]) -> World:
    store.redis.flushall()
    machines.add_node("n1", gpus=1)
    world = World(machines, store, policy=QUICK)
    ask(world)
    return world


def dies_at(number: int, store, ask: Callable[[World], None]) -> None:
    """Live with a scheduler that dies before its n-th write and is followed by another."""
    machines = Machines()
    with machines.server:
        world = new_world(machines, store, ask)
        settings = client.Configuration(host=machines.server.url)
        settings.retries = False
        mortal = KubeApi(Mortal(settings, number), NAMESPACE)
        world.scheduler = KubernetesCluster(mortal, world.settings, Assignments(store), clock=lambda: machines.clock_s)
        deaths = 0

        def go(world: World) -> None:
            nonlocal deaths
            try:
                world.reconcile()
            except Death:
                deaths += 1
                world.scheduler = world.new_scheduler()

        live(world, go)
        assert deaths == 1, f"write {number + 1} was never reached"
        world.close()
        mortal.close()
    assert not machines.server.mistakes, machines.server.mistakes[0]


def fails_at(number: int, fault: Fault, store, ask: Callable[[World], None]) -> None:
    """Live with a server that fails at the n-th write."""
    machines = Machines()
    with machines.server:
        world = new_world(machines, store, ask)
        hits: list[Request] = []

        def at_that(request: Request) -> Fault | None:
            if request.write != number:
                return None
            hits.append(request)
            return fault

        with machines.server.failing(at_that):
            live(world, lambda world: world.reconcile())
        assert len(hits) == 1
        world.close()
    assert not machines.server.mistakes, machines.server.mistakes[0]


def one(world: World) -> None:
    world.ask(TRAINER)


def four(world: World) -> None:
    world.ask(TRAINER)
    world.ask(SAMPLER)
    world.ask(full(1), owner="ann", priority=5)
    world.ask(full(1, "sampler"), owner="ann")


@pytest.fixture
def spare() -> Iterator[Machines]:
    """A second cluster, for counting."""
    machines = Machines()
    with machines.server:
        yield machines


def test_whichever_write_a_scheduler_dies_before_the_next_one_brings_the_right_objects(store, spare):
    for number in range(num_writes(spare, store, one)):
        dies_at(number, store, one)


@pytest.mark.full
def test_whichever_answer_is_lost_the_objects_are_right_in_the_end(store, spare):
    for number in range(1, num_writes(spare, store, one) + 1):
        fails_at(number, FAULTS["lost"], store, one)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_of_four_workers_at_one_accelerator_none_is_lost_whichever_write_the_scheduler_dies_before(store, spare):
    for number in range(num_writes(spare, store, four)):
        dies_at(number, store, four)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_of_four_workers_none_is_lost_whichever_write_fails_in_whichever_way(store, spare):
    for number, kind in zip(range(1, num_writes(spare, store, four) + 1), itertools.cycle(FAULTS), strict=False):
        fails_at(number, FAULTS[kind], store, four)


@pytest.mark.parametrize("kind", ["cut", "500"])
def test_a_server_that_fails_at_every_third_call_only_delays(machines, store, kind):
    world = new_world(machines, store, one)
    with machines.server.failing(lambda request: FAULTS[kind] if request.number % 3 == 0 else None):
        for _ in range(40):
            world.step()
            world.reconcile()
            world.check()
    world.until(lambda: world.serves(TRAINER))
    world.rest()
    world.until(world.is_empty, seconds=5)
    world.close()
