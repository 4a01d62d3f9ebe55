"""What an operator reads with `kubectl describe`: events and conditions of a workload; nothing hangs on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from openrl.scheduler.clusters.kube_api import EVENTS, ApiError, KubeApi
from tests.kube.machines import Machines
from tests.kube.server import Fault
from tests.kube.world import TRAINER, World, full


@pytest.fixture
def world(machines: Machines, store):
    """A cluster of one node with one accelerator of 80 GiB."""
    machines.add_node("n1", gpus=1)
    made = World(machines, store)
    yield made
    made.close()


def said(world: World, workload: str = TRAINER.workload_name) -> list[tuple[str, str, str]]:
    """Return the events of a workload, in the order in which they were made."""
    there = [each for each in world.all("events") if each["involvedObject"]["name"] == workload]
    there.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
    return [(each["type"], each["reason"], each["message"]) for each in there]


def conditions(world: World) -> dict[str, tuple[str, str]]:
    [workload] = world.all("workloads")
    return {each["type"]: (each["status"], each["reason"]) for each in workload["status"]["conditions"]}


def turned(world: World, kind: str) -> Any:
    [workload] = world.all("workloads")
    return next(each["lastTransitionTime"] for each in workload["status"]["conditions"] if each["type"] == kind)


def test_a_life_is_told_from_its_place_to_its_end(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    world.until(lambda: conditions(world) == {"Placed": ("True", "Placed"), "Ready": ("True", "Running")})
    world.rest()
    world.until(world.is_empty, seconds=10)
    told = said(world)
    assert [(kind, reason) for kind, reason, _ in told] == [
        ("Normal", "Placed"), ("Normal", "Running"), ("Normal", "Stopped"),
    ]  # fmt: skip
    assert "no worker is there; goes to trainer-tiny-c1" in told[0][2]
    assert told[1][2].endswith("runs on n1") and told[2][2].startswith("nothing to do for")


def test_a_worker_that_fails_is_told_with_its_exit_code_and_its_conditions_turn(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    world.until(lambda: conditions(world)["Ready"] == ("True", "Running"))
    placed, ready = turned(world, "Placed"), turned(world, "Ready")
    [pod] = world.all("pods")
    world.machines.exit(pod["metadata"]["name"], 3)
    world.until(lambda: any(reason == "Failed" for _, reason, _ in said(world)))
    world.until(lambda: world.serves(TRAINER) and len([1 for _, reason, _ in said(world) if reason == "Running"]) == 2)
    assert conditions(world)["Ready"] == ("True", "Running")
    assert turned(world, "Ready") > ready, "it turned and turned back, seconds later"
    [(kind, _, message)] = [each for each in said(world) if each[1] == "Failed"]
    assert kind == "Warning" and f"{pod['metadata']['name']} on n1 ended: exit code 3" in message
    assert turned(world, "Placed") == placed, "its seat was its own all the time"


def test_what_has_no_room_says_so_once_and_why(machines, store):
    machines.add_node("n1", gpus=1, gpu="24Gi")
    world = World(machines, store)
    world.ask(TRAINER)
    world.tick(times=8)
    assert conditions(world)["Ready"] == ("False", "Unschedulable")
    told = [(kind, reason) for kind, reason, _ in said(world)]
    assert told == [("Normal", "Placed"), ("Normal", "Waiting"), ("Warning", "Unschedulable")]
    assert "cannot allocate all claims" in said(world)[2][2]
    world.close()


def test_the_next_pod_that_has_no_room_is_told_in_the_same_words(machines, store):
    machines.add_node("n1", gpus=1, gpu="24Gi")
    world = World(machines, store)
    world.ask(TRAINER)
    world.tick(times=4)
    [pod] = world.all("pods")
    machines.evict(pod["metadata"]["name"])
    world.tick(times=4)
    assert [reason for _, reason, _ in said(world)].count("Unschedulable") == 2
    world.close()


def test_each_loss_of_a_place_is_told(world):
    world.ask(TRAINER)
    for times in (1, 2):
        world.until(lambda: world.serves(TRAINER))
        [claim] = world.all("resourceclaims")
        kind = world.machines.objects.kinds["resource.k8s.io", "resourceclaims"]
        world.machines.objects.delete(kind, "openrl", claim["metadata"]["name"], {})
        world.scheduler.observe()
        world.scheduler.apply(())
        assert [reason for _, reason, _ in said(world)].count("Lost") == times
        world.tick(times=2)


@pytest.mark.parametrize("notices", [True, False])
def test_a_worker_that_went_with_its_node_is_told_so(world, notices):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    [pod] = world.all("pods")
    if notices:
        world.machines.lose_node("n1")
        world.tick(times=3)
    world.machines.remove_node("n1")
    world.tick(times=3)
    [message] = [text for _, reason, text in said(world) if reason == "Failed"]
    assert message.startswith(f"{pod['metadata']['name']} on n1 ended: its node is gone")


def test_a_worker_that_needs_no_claim_is_told_to_be_started(machines, store):
    machines.add_node("n1", gpus=0)
    world = World(machines, store)
    world.settings = replace(world.settings, device_class="")
    world.scheduler = world.new_scheduler()
    world.ask(TRAINER)
    for _ in range(4):
        assert world.reconcile()
        machines.step()
    assert [(kind, reason) for kind, reason, _ in said(world)] == [("Normal", "Started"), ("Normal", "Running")]
    world.close()


def test_an_idle_worker_that_gives_way_is_told_to_be_preempted_and_the_one_that_waits_says_why(world):
    world.ask(full(1), owner="ann", exclusive=True)
    world.until(lambda: world.serves(full(1)))
    world.rest()
    world.ask(full(2), owner="bob", exclusive=True, priority=5)
    world.until(lambda: world.serves(full(2)), ticks=120)
    names = {each["involvedObject"]["name"] for each in world.all("events")}
    told = {name: [reason for _, reason, _ in said(world, name)] for name in names}
    first, second = sorted(told)
    assert told[first] == ["Placed", "Running", "Preempted"]
    assert told[second][-1] == "Running" and {"Placed", "Running"} <= set(told[second])
    [message] = [text for _, reason, text in said(world, first) if reason == "Preempted"]
    assert f"gives way to {full(2).workload_name}, which waits" in message


@pytest.mark.parametrize("fault", [Fault("error", 500), Fault("error", 403), Fault("cut")], ids=str)
def test_nothing_hangs_on_an_event_that_can_not_be_written(world, fault):
    with world.machines.server.failing(lambda call: fault if call.plural == "events" else None):
        world.ask(TRAINER)
        world.until(lambda: world.serves(TRAINER))
        world.rest()
        world.until(world.is_empty, seconds=10)
    assert said(world) == []


def test_an_event_about_an_object_of_another_namespace_is_refused_by_the_server(api: KubeApi):
    about = {"apiVersion": "v1", "kind": "Pod", "namespace": "elsewhere", "name": "p", "uid": "1"}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "involvedObject": about}
    with pytest.raises(ApiError, match="does not match event"):
        api.create(EVENTS, event)
