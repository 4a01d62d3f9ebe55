"""The scheduler on an emulated cluster: from demand to a running worker and back to nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest

from openrl.scheduler.clusters import kube_ledger
from openrl.scheduler.clusters.kube_api import CLAIMS, LEDGERS, WORKLOADS, Conflict
from openrl.scheduler.clusters.kube_events import Events
from openrl.scheduler.clusters.kube_objects import with_status, workload_object
from openrl.scheduler.clusters.kube_settle import Settler
from openrl.scheduler.clusters.kube_view import View
from openrl.scheduler.resources import Claim, Workload
from openrl.tasks.assignment import Assignments
from tests.kube.machines import Machines
from tests.kube.server import Fault
from tests.kube.world import GIB, SAMPLER, SETTINGS, TRAINER, World, full


@pytest.fixture
def world(machines: Machines, store) -> Iterator[World]:
    """A cluster of one node with two accelerators, and a scheduler."""
    machines.add_node("n1", gpus=2)
    made = World(machines, store)
    yield made
    made.close()


def test_demand_brings_a_worker_and_its_end_takes_everything_away(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    world.rest()
    world.until(world.is_empty, seconds=10)
    assert list(world.store.redis.scan_iter("openrl:assignment:*")) != []
    assert {world.store.redis.get(key) for key in world.store.redis.scan_iter("openrl:assignment:*")} == {b"ended"}


def test_two_tenants_runs_take_turns_at_one_claim_when_there_is_but_one_accelerator(machines, store):
    machines.add_node("n1", gpus=1)
    world = World(machines, store)
    for number, owner in ((1, "ann"), (2, "bob")):
        world.ask(full(number), owner=owner)
    world.until(lambda: world.serves(full(1), full(2)))
    [ledger] = world.all("claimledgers")
    assert sorted(seat["ownerID"] for seat in ledger["spec"]["seats"]) == ["ann", "bob"]
    assert ledger["status"] == {"nodeName": "n1", "devices": 1, "memoryPerDevice": "80Gi"}
    [claim] = world.all("resourceclaims")
    assert len(claim["status"]["reservedFor"]) == 2
    world.close()


def test_what_no_node_has_room_for_stands_as_a_pending_claim_with_an_unschedulable_pod(machines, store):
    machines.add_node("n1", gpus=1, gpu="24Gi")
    world = World(machines, store)
    world.ask(TRAINER)
    world.tick(times=8)
    [claim], [pod], [workload] = world.all("resourceclaims"), world.all("pods"), world.all("workloads")
    assert claim.get("status", {}) == {}
    assert pod["status"]["conditions"][0]["reason"] == "Unschedulable"
    assert workload["status"]["reason"] == "Unschedulable"
    # The autoscaler has seen it.
    machines.add_node("n2", gpus=1)
    world.until(lambda: world.serves(TRAINER))
    assert world.claims() == {claim["metadata"]["name"]}
    world.close()


def test_a_pod_that_was_evicted_is_made_anew_in_the_same_seat(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    (old,), seats = world.all("pods"), world.seats()
    world.machines.evict(old["metadata"]["name"])
    world.tick()
    world.until(lambda: world.serves(TRAINER))
    assert world.seats() == seats
    assert world.all("pods")[0]["metadata"]["uid"] != old["metadata"]["uid"]


def test_a_worker_that_ends_by_itself_is_started_again_later_each_time(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    starts = []
    for _ in range(3):
        [pod] = world.all("pods")
        world.machines.exit(pod["metadata"]["name"], 1)
        ended = world.machines.clock_s
        world.tick(times=2)
        world.until(lambda: len(world.all("pods")) == 1)
        starts.append(world.machines.clock_s - ended)
        world.until(lambda: world.serves(TRAINER))
    assert starts == sorted(starts)
    assert starts[0] < starts[-1]


def test_a_claim_deleted_under_its_workers_is_left_and_another_is_cut(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    [claim] = world.all("resourceclaims")
    kind = world.machines.objects.kinds["resource.k8s.io", "resourceclaims"]
    world.machines.objects.delete(kind, "openrl", claim["metadata"]["name"], {})

    def is_moved() -> bool:
        uids = [each["metadata"]["uid"] for each in world.all("resourceclaims")]
        return world.serves(TRAINER) and uids != [claim["metadata"]["uid"]]

    world.until(is_moved)


def test_of_a_lost_node_nothing_is_forced_and_its_removal_sets_the_worker_free(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    [pod] = world.all("pods")
    world.machines.lose_node("n1")
    world.machines.add_node("n2", gpus=1)
    world.tick(times=20)
    # Its containers may still run: the seat stays, and so does the pod.
    assert [each["metadata"]["uid"] for each in world.all("pods")] == [pod["metadata"]["uid"]]
    assert not world.store.redis.exists(f"openrl:pod-ended:{pod['metadata']['uid']}")
    world.machines.remove_node("n1")
    world.until(lambda: world.serves(TRAINER) and world.all("pods")[0]["spec"]["nodeName"] == "n2")
    assert world.store.redis.exists(f"openrl:pod-ended:{pod['metadata']['uid']}")


def test_a_pod_deleted_by_force_keeps_its_seat_until_its_containers_have_ended(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    (pod,), seats = world.all("pods"), world.seats()
    kind = world.machines.objects.kinds["", "pods"]
    world.machines.silent.add("n1")
    world.machines.objects.delete(kind, "openrl", pod["metadata"]["name"], {"gracePeriodSeconds": 0})
    world.tick(times=5)
    assert [each["metadata"]["uid"] for each in world.all("pods")] == [pod["metadata"]["uid"]]
    assert world.seats() == seats
    world.machines.silent.clear()
    world.until(lambda: world.serves(TRAINER) and world.all("pods")[0]["metadata"]["uid"] != pod["metadata"]["uid"])


def test_a_runs_trainer_and_sampler_share_the_one_accelerator_that_there_is(machines, store):
    machines.add_node("n1", gpus=1)
    world = World(machines, store)
    world.ask(full(1), owner="ann")
    world.ask(full(1, "sampler"), owner="ann")
    world.until(lambda: world.serves(full(1), full(1, "sampler")))
    [ledger] = world.all("claimledgers")
    assert len(ledger["spec"]["seats"]) == 2
    world.close()


def test_trainer_and_sampler_of_a_base_each_get_an_accelerator_of_their_own_while_there_are_two(world):
    world.ask(TRAINER)
    world.ask(SAMPLER)
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    assert len(world.claims()) == 2


def test_another_image_rolls_the_workers_one_after_the_other_in_their_seats(world):
    world.ask(TRAINER)
    world.ask(SAMPLER)
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    seats = sorted(world.seats())
    world.settings = dataclasses.replace(world.settings, trainer_image="trainer:2", sampler_image="sampler:2")
    world.policy = dataclasses.replace(world.policy, version=world.settings.version)
    world.scheduler = world.new_scheduler()
    fewest = 2

    def is_rolled() -> bool:
        nonlocal fewest
        fewest = min(fewest, len(world.machines.running()))
        images = {pod["spec"]["containers"][0]["image"] for pod in world.all("pods")}
        return images == {"trainer:2", "sampler:2"} and world.serves(TRAINER, SAMPLER)

    world.until(is_rolled)
    assert fewest == 1
    assert sorted(world.seats()) == seats
    world.rest()
    world.until(world.is_empty, seconds=10)


def test_a_service_that_was_stopped_by_the_book_starts_where_it_was(world):
    """docs/install.md, "Stop and start": no scheduler, pods deleted, a wait for containers; objects stay."""
    world.ask(TRAINER)
    world.ask(SAMPLER)
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    seats, old = sorted(world.seats()), {pod["metadata"]["uid"] for pod in world.all("pods")}
    kind = world.machines.objects.kinds["", "pods"]
    for pod in world.all("pods"):
        assert pod["metadata"]["labels"]["openrl.io/managed"] == "true"
        world.machines.objects.delete(kind, "openrl", pod["metadata"]["name"], {})
    for _ in range(600):  # `until`, with its field selectors
        if not any(
            pod["spec"].get("nodeName") and pod["status"]["phase"] not in ("Succeeded", "Failed")
            for pod in world.all("pods")
        ):
            break
        world.step()
    assert world.machines.running() == {} and world.machines.containers == {}
    world.step(3600)
    assert {pod["metadata"]["uid"] for pod in world.all("pods")} == old, (
        "so there is nothing to wait for but containers"
    )
    world.scheduler = world.new_scheduler()
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    assert sorted(world.seats()) == seats
    assert not old & {pod["metadata"]["uid"] for pod in world.all("pods")}
    world.rest()
    world.until(world.is_empty, seconds=10)


def test_a_seat_asks_for_what_the_worker_needs_of_its_node(world):
    world.ask(TRAINER, device_bytes=30 * GIB, host_bytes=50 * GIB)
    world.until(lambda: world.serves(TRAINER))
    [pod] = world.all("pods")
    assert pod["spec"]["containers"][0]["resources"]["requests"] == {"memory": "50Gi"}


def test_a_seat_left_without_a_status_is_swept_and_its_late_writer_comes_too_late(world, api):
    claim = Claim(name="c1", device_bytes=GIB)
    wanted = Workload(name="trainer-tiny", kind="trainer", base="Org/Tiny", slug="tiny", since=1.0, phase="Pending")
    kube_ledger.make(api, claim, SETTINGS)
    read = api.create(WORKLOADS, workload_object(wanted, SETTINGS))
    seat = kube_ledger.sit(api, wanted, read["metadata"]["uid"], "c1", mates=frozenset())
    events = Events(api, lambda: world.machines.clock_s)
    settler = Settler(api, SETTINGS, Assignments(world.store), events, clock=lambda: world.machines.clock_s)
    settler.settle(View.take(api, SETTINGS))
    assert world.seats() == [seat], "it may be under way"
    world.machines.clock_s += 11
    settler.settle(View.take(api, SETTINGS))
    assert world.seats() == []
    with pytest.raises(Conflict):
        api.replace(
            WORKLOADS,
            with_status(read, dataclasses.replace(wanted, claim="c1"), at=1.0, assignmentID=seat),
            status=True,
        )


def test_nobody_sits_where_others_sit_than_were_seen_or_where_the_claim_is_going(world, api):
    claim = Claim(name="c1", device_bytes=GIB)
    kube_ledger.make(api, claim, SETTINGS)
    one, two = (
        Workload(name=f"trainer-{name}", kind="trainer", base="B", slug=name, since=1.0, claim="c1") for name in "ab"
    )
    kube_ledger.sit(api, one, "u1", "c1", mates=frozenset())
    for late in (two, one):
        with pytest.raises(Conflict, match="other seats"):
            kube_ledger.sit(api, late, "u2", "c1", mates=frozenset({late.name}))
    kube_ledger.sit(api, two, "u2", "c1", mates=frozenset({"trainer-a"}))
    with pytest.raises(Conflict, match="has seats"):
        kube_ledger.drop(api, api.get(LEDGERS, "c1"), None)
    api.merge(CLAIMS, "c1", {"metadata": {"finalizers": ["x/y"]}})
    api.delete(CLAIMS, api.get(CLAIMS, "c1"))
    with pytest.raises(Conflict, match="is going"):
        kube_ledger.sit(api, dataclasses.replace(one, name="trainer-c"), "u3", "c1", mates=frozenset())


def ours(world: World) -> list[str]:
    """Return the names of our own claims, also of those that are gone by now."""
    return [each["metadata"]["name"] for each in world.all("resourceclaims") if each["metadata"]["name"] != "theirs"]


def test_a_device_that_another_namespaces_claim_has_is_seen_to_be_taken(machines, store):
    machines.add_node("n1", gpus=2)
    machines.hold_device("n1", "gpu-0", namespace="other")
    world = World(machines, store)
    world.ask(TRAINER)
    world.tick(times=6)
    world.ask(SAMPLER)
    world.tick(times=8)
    assert len(world.machines.running()) == 2 and len(ours(world)) == 1, "at once, without a claim that stands"
    world.close()


def test_where_we_may_not_see_others_claims_a_worker_joins_elsewhere_once_its_claim_has_stood_for_a_while(
    machines, store
):
    machines.add_node("n1", gpus=2)
    machines.hold_device("n1", "gpu-0", namespace="other")
    world = World(machines, store)

    def forbidden(request):
        # Our own are listed by their label.
        lists_all = request.method == "GET" and not (request.name or request.query.get("labelSelector"))
        return Fault("error", 403) if request.plural == "resourceclaims" and lists_all else None

    with machines.server.failing(forbidden):
        world.ask(TRAINER)
        world.tick(times=6)
        world.ask(SAMPLER)
        world.tick(times=8)
        assert len(ours(world)) == 2 and len(world.machines.running()) == 1, "its claim can't be allocated"
        world.tick(times=60)
    assert len(world.machines.running()) == 2
    assert len({pod["metadata"]["labels"]["openrl.io/claim"] for pod in world.all("pods")}) == 1
    world.close()


def test_a_cordoned_node_keeps_its_worker_and_gets_no_other(world):
    world.ask(TRAINER)
    world.until(lambda: world.serves(TRAINER))
    [pod] = world.all("pods")
    world.machines.cordon("n1")
    world.ask(SAMPLER)
    world.tick(times=8)
    world.machines.add_node("n2", gpus=1)
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    nodes = {each["metadata"]["uid"]: each["spec"]["nodeName"] for each in world.all("pods")}
    assert nodes.pop(pod["metadata"]["uid"]) == "n1" and set(nodes.values()) == {"n2"}


def test_a_worker_whose_node_has_no_room_for_its_fresh_pod_goes_to_another_node(machines, store):
    machines.add_node("n1", gpus=1)
    world = World(machines, store)
    world.ask(TRAINER)
    world.ask(SAMPLER)
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    assert len(ours(world)) == 1
    machines.shrink_node("n1", "50Gi")
    machines.add_node("n2", gpus=1)
    [old] = [pod for pod in world.all("pods") if pod["metadata"]["name"].startswith("sampler")]
    machines.evict(old["metadata"]["name"])
    world.tick(times=10)
    assert "sampler-tiny" not in {
        pod["metadata"]["name"][:12] for pod in world.all("pods") if pod["spec"].get("nodeName")
    }
    world.until(lambda: world.serves(TRAINER, SAMPLER))
    assert sorted(pod["spec"]["nodeName"] for pod in world.all("pods")) == ["n1", "n2"]
    [moved] = [each for each in world.all("workloads") if each["metadata"]["name"] == "sampler-tiny"]
    assert moved["status"]["avoids"] == "n1"
    world.close()
