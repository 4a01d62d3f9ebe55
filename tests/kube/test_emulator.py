"""The emulated API server itself: what the scheduler's correctness rests on, asked through the official client."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from kubernetes import client

from openrl.scheduler.clusters.kube_api import (
    CLAIMS,
    LEDGERS,
    NODES,
    PODS,
    WORKLOADS,
    ApiError,
    Conflict,
    Expired,
    KubeApi,
    Missing,
)
from tests.kube.apply import Conflicts
from tests.kube.machines import NAMESPACE, PROTECTION, Machines, definitions
from tests.kube.server import Fault

Obj = dict[str, Any]


def ledger(name: str = "c1", **seat: str) -> Obj:
    seats = [{"workload": "w", "workloadUID": "u", "assignmentID": "a", **seat}] if seat else []
    return {
        "apiVersion": "openrl.io/v1alpha1",
        "kind": "ClaimLedger",
        "metadata": {"name": name},
        "spec": {"claimName": name, "seats": seats},
    }


def pod(name: str = "p", *, claim: str = "", **metadata: Any) -> Obj:
    spec: Obj = {"containers": [{"name": "worker"}]}
    if claim:
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": claim}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, **metadata}, "spec": spec}


def claim(name: str = "c1", *, memory: str = "40Gi") -> Obj:
    expression = f'device.capacity["gpu.nvidia.com"].memory.compareTo(quantity("{memory}")) >= 0'
    exactly = {"deviceClassName": "openrl-gpu", "selectors": [{"cel": {"expression": expression}}]}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}},
    }


def workload(name: str = "w", **spec: Any) -> Obj:
    return {
        "apiVersion": "openrl.io/v1alpha1",
        "kind": "Workload",
        "metadata": {"name": name},
        "spec": {
            "role": "trainer",
            "modelId": "Org/Tiny",
            "pool": "tiny",
            "trainingKind": "lora",
            "accelerator": {"mode": "SingleGPU", "memory": "40Gi"},
            "template": {"spec": {"containers": [{"name": "worker"}]}},
            **spec,
        },
    }


def test_of_two_who_replace_the_same_version_one_is_refused(api):
    seen = api.create(LEDGERS, ledger())
    api.replace(LEDGERS, {**seen, "spec": ledger(workload="x")["spec"]})
    with pytest.raises(Conflict, match="has been modified"):
        api.replace(LEDGERS, {**seen, "spec": ledger(workload="y")["spec"]})
    assert api.get(LEDGERS, "c1")["spec"]["seats"][0]["workload"] == "x"


def test_a_custom_resource_is_not_replaced_without_a_version(api, machines):
    api.create(LEDGERS, ledger())
    custom = client.CustomObjectsApi(api._connection)
    with pytest.raises(client.ApiException) as refused:
        custom.replace_namespaced_custom_object("openrl.io", "v1alpha1", NAMESPACE, "claimledgers", "c1", ledger())
    assert refused.value.status == 422


def test_what_exists_is_not_created_again_and_what_is_gone_is_missing(api):
    api.create(PODS, pod())
    with pytest.raises(Conflict, match="already exists"):
        api.create(PODS, pod())
    with pytest.raises(Missing):
        api.get(PODS, "other")


def test_a_write_that_changes_nothing_makes_no_new_version(api):
    seen = api.create(LEDGERS, ledger())
    assert api.replace(LEDGERS, seen)["metadata"]["resourceVersion"] == seen["metadata"]["resourceVersion"]


def test_a_deletion_by_uid_or_version_spares_another_object_of_the_name(api):
    old = api.create(LEDGERS, ledger())
    api.delete(LEDGERS, old, unchanged=True)
    new = api.create(LEDGERS, ledger())
    with pytest.raises(Conflict, match="Precondition failed"):
        api.delete(LEDGERS, old)
    api.replace(LEDGERS, {**new, "spec": ledger(workload="x")["spec"]})
    with pytest.raises(Conflict, match="Precondition failed"):
        api.delete(LEDGERS, new, unchanged=True)
    assert api.get(LEDGERS, "c1")["metadata"]["uid"] == new["metadata"]["uid"]


def test_status_and_spec_are_written_apart(api):
    made = api.create(WORKLOADS, {**workload(), "status": {"phase": "Running"}})
    assert "status" not in made
    told = api.replace(
        WORKLOADS, {**made, "spec": workload(pool="x")["spec"], "status": {"phase": "Pending"}}, status=True
    )
    assert (told["spec"]["pool"], told["status"]["phase"]) == ("tiny", "Pending")
    assert told["metadata"]["generation"] == 1
    told["status"] = {"phase": "Failed"}
    told["metadata"]["labels"] = {"a": "b"}
    assert api.replace(WORKLOADS, told)["status"]["phase"] == "Pending"


def test_an_object_with_finalizers_stays_until_the_last_is_taken_and_gets_no_new_one(api):
    made = api.create(PODS, pod(finalizers=["openrl.io/a", "openrl.io/b"]))
    api.delete(PODS, made)
    going = api.get(PODS, "p")
    assert going["metadata"]["deletionTimestamp"]
    with pytest.raises(ApiError, match="no new finalizers"):
        api.merge(PODS, "p", {"metadata": {"finalizers": ["openrl.io/a", "openrl.io/c"]}})
    api.merge(PODS, "p", {"metadata": {"finalizers": ["openrl.io/b"]}})
    api.merge(PODS, "p", {"metadata": {"finalizers": None}})
    with pytest.raises(Missing):
        api.get(PODS, "p")


def test_dependents_go_when_the_last_owner_has_gone_and_not_by_its_name(api, machines):
    owners = [api.create(LEDGERS, ledger(name)) for name in ("c1", "c2")]
    references = [
        {
            "apiVersion": "openrl.io/v1alpha1",
            "kind": "ClaimLedger",
            "name": own["metadata"]["name"],
            "uid": own["metadata"]["uid"],
        }
        for own in owners
    ]
    api.create(PODS, pod(ownerReferences=references))
    api.delete(LEDGERS, owners[0])
    machines.collect()
    assert api.get(PODS, "p")
    api.delete(LEDGERS, owners[1])
    api.create(LEDGERS, ledger("c2"))
    machines.collect()
    with pytest.raises(Missing):
        api.get(PODS, "p")


def test_a_watch_resumes_after_any_version_and_tells_each_change_once(api):
    _, version = api.list(PODS)
    api.create(PODS, pod("a"))
    api.create(PODS, pod("b"))
    api.delete(PODS, api.get(PODS, "a"))
    heard = list(api.watch(PODS, version, timeout_s=0))
    assert [(kind, obj["metadata"].get("name")) for kind, obj in heard] == [
        ("ADDED", "a"), ("ADDED", "b"), ("DELETED", "a"), ("BOOKMARK", None),
    ]  # fmt: skip
    resumed = list(api.watch(PODS, heard[0][1]["metadata"]["resourceVersion"], timeout_s=0))
    assert [kind for kind, _ in resumed] == ["ADDED", "DELETED", "BOOKMARK"]


def test_a_watch_hears_of_what_happens_while_it_waits(api, machines):
    _, version = api.list(PODS)
    timer = threading.Timer(
        0.05, machines.objects.create, (machines._kind("pods"), NAMESPACE, pod("late")), {"manager": "x"}
    )
    timer.start()
    kind, obj = next(iter(api.watch(PODS, version, timeout_s=20)))
    timer.join()
    assert (kind, obj["metadata"]["name"]) == ("ADDED", "late")


def test_a_watch_from_what_was_forgotten_is_told_so(api, machines):
    _, version = api.list(PODS)
    api.create(PODS, pod())
    machines.objects.compact()
    with pytest.raises(Expired):
        list(api.watch(PODS, version, timeout_s=0))


def test_entering_and_leaving_a_selection_is_told_as_added_and_deleted(api):
    _, version = api.list(PODS)
    api.create(PODS, pod(labels={"a": "1"}))
    api.merge(PODS, "p", {"metadata": {"labels": {"a": "2"}}})
    api.merge(PODS, "p", {"metadata": {"labels": {"a": "1"}}})
    heard = [kind for kind, _ in api.watch(PODS, version, labels="a=1", timeout_s=0)]
    assert heard == ["ADDED", "DELETED", "ADDED", "BOOKMARK"]
    assert [len(api.list(PODS, labels=text)[0]) for text in ("a", "!a", "a in (1,2)", "a!=1", "a notin (2)")] == [
        1,
        0,
        1,
        0,
        1,
    ]


def test_who_applies_owns_fields_and_another_who_differs_is_refused(api, machines):
    seats = api.apply(LEDGERS, ledger())
    assert api.apply(LEDGERS, ledger())["metadata"]["resourceVersion"] == seats["metadata"]["resourceVersion"]
    told = {**ledger(), "spec": {"claimName": "c1"}, "status": {"nodeName": "n1"}}
    api.apply(LEDGERS, told, status=True)
    kind = machines.objects.kinds["openrl.io", "claimledgers"]
    other = {**told, "status": {"nodeName": "n2"}}
    with pytest.raises(Conflicts, match=r"status\.nodeName"):
        machines.objects.apply(kind, NAMESPACE, "c1", other, manager="other", force=False, status=True)
    machines.objects.apply(kind, NAMESPACE, "c1", other, manager="other", force=True, status=True)
    with pytest.raises(Conflict, match='conflict with "other"'):
        api.apply(LEDGERS, told, status=True)


def test_a_field_that_its_only_owner_no_longer_applies_is_removed_and_others_stay(api):
    api.apply(PODS, pod(labels={"a": "1", "b": "1"}))
    api.merge(PODS, "p", {"metadata": {"labels": {"c": "1"}}})
    assert api.apply(PODS, pod(labels={"a": "1"}))["metadata"]["labels"] == {"a": "1", "c": "1"}


def test_what_a_definition_does_not_know_is_dropped_and_what_it_forbids_is_refused(api):
    made = api.create(WORKLOADS, workload(nonsense=1))
    assert "nonsense" not in made["spec"]
    assert made["spec"]["accelerator"]["count"] == 1  # a default
    for spec in ({"role": "cook"}, {"trainingKind": "fft"}, {"queueName": "q"}, {"pool": "A B"}):
        with pytest.raises(ApiError, match="422"):
            api.create(WORKLOADS, workload("x", **spec))
    with pytest.raises(ApiError, match="immutable"):
        api.replace(WORKLOADS, {**made, "spec": {**made["spec"], "pool": "other"}})
    both = ledger(workload="w", exclusive=True)  # type: ignore[arg-type]
    both["spec"]["seats"].append({"workload": "v", "workloadUID": "u", "assignmentID": "b"})
    with pytest.raises(ApiError, match="exclusive seat"):
        api.create(LEDGERS, both)


def test_both_definitions_are_there():
    assert {each["metadata"]["name"] for each in definitions()} == {"workloads.openrl.io", "claimledgers.openrl.io"}


def test_a_claim_is_allocated_with_its_first_pod_shared_by_the_next_and_let_go_with_the_last(api, machines):
    machines.add_node("small", gpus=1, gpu="24Gi")
    machines.add_node("big", gpus=1)
    api.create(CLAIMS, claim())
    machines.step()
    assert "allocation" not in api.get(CLAIMS, "c1").get("status", {})
    for name in ("p", "q"):
        api.create(PODS, pod(name, claim="c1"))
        machines.step(5)
    held = api.get(CLAIMS, "c1")
    assert [each["name"] for each in held["status"]["reservedFor"]] == ["p", "q"]
    assert {api.get(PODS, name)["spec"]["nodeName"] for name in ("p", "q")} == {"big"}
    api.delete(CLAIMS, held)
    assert PROTECTION in api.get(CLAIMS, "c1")["metadata"]["finalizers"]
    for name in ("p", "q"):
        api.delete(PODS, api.get(PODS, name))
    machines.step(5)
    machines.step(5)
    with pytest.raises(Missing):
        api.get(CLAIMS, "c1")


def test_a_device_has_one_claim_and_a_pod_without_one_is_unschedulable(api, machines):
    machines.add_node("n", gpus=1)
    for name in ("c1", "c2"):
        api.create(CLAIMS, claim(name))
        api.create(PODS, pod(name, claim=name))
    machines.step()
    assert api.get(PODS, "c1")["spec"]["nodeName"] == "n"
    [condition] = api.get(PODS, "c2")["status"]["conditions"]
    assert (condition["type"], condition["status"], condition["reason"]) == ("PodScheduled", "False", "Unschedulable")


def test_a_pod_that_is_told_to_go_ends_first_and_one_on_a_silent_node_stays(api, machines):
    machines.add_node("n", gpus=0)
    for name in ("p", "q"):
        api.create(PODS, pod(name))
    machines.step()
    machines.step(5)
    api.delete(PODS, api.get(PODS, "p"))
    machines.step(5)
    with pytest.raises(Missing):
        api.get(PODS, "p")
    machines.lose_node("n")
    machines.step(500)
    assert api.get(PODS, "q")["status"]["phase"] == "Running"
    machines.remove_node("n")
    machines.step()
    with pytest.raises(Missing):
        api.get(PODS, "q")


def test_faults_strike_where_they_are_told_to(api, machines):
    with machines.server.failing(lambda request: Fault("lost") if request.method == "POST" else None):
        with pytest.raises(ApiError):
            api.create(PODS, pod())
    assert api.get(PODS, "p")
    with machines.server.failing(lambda _: Fault("cut")), pytest.raises(ApiError):
        api.delete(PODS, api.get(PODS, "p"))
    with machines.server.failing(lambda _: Fault("error", 503)), pytest.raises(ApiError, match="503"):
        api.list(NODES)


def test_what_is_not_emulated_is_refused(api: KubeApi, machines: Machines):
    with pytest.raises(ApiError, match="501"):
        api._call("GET", PODS, query={"limit": "1"})


@pytest.mark.full
def test_the_clients_own_models_read_what_it_serves(api, machines):
    machines.add_node("n", gpus=1)
    api.create(CLAIMS, claim())
    api.create(PODS, pod(claim="c1"))
    machines.step()
    machines.step(5)
    [read] = client.CoreV1Api(api._connection).list_namespaced_pod(NAMESPACE).items
    assert (read.spec.node_name, read.status.phase) == ("n", "Running")
    [held] = client.ResourceV1Api(api._connection).list_namespaced_resource_claim(NAMESPACE).items
    assert held.status.allocation.devices.results[0].device == "gpu-0"
