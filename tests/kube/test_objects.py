"""Workloads, claims and pods as objects and back; names; what the settings refuse."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from openrl.scheduler.clusters import kube_objects as objects
from openrl.scheduler.clusters.kube_api import Obj
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.clusters.kube_view import View
from openrl.scheduler.resources import Claim, Need, Workload
from tests.kube import schema
from tests.kube.machines import definitions

SETTINGS = KubeSettings(trainer_image="trainer:1", sampler_image="sampler:1")
WORKLOAD = Workload(
    name="trainer-my_model-0.6b.f-0123456789abcdef",
    kind="trainer",
    base="Org/My_Model-0.6B",
    slug="my_model-0.6b.f-0123456789abcdef",
    since=1_800_000_000.25,
    generation=3,
    claim="c1",
    need=Need(device_bytes=(30 << 30) + 1, host_bytes=40 << 30, exclusive=True, priority=7, owner="ann", words="why"),
    placed=2,
    version="v1",
    phase="Running",
    reason="because",
)
SHARING = replace(WORKLOAD, need=replace(WORKLOAD.need, exclusive=False))
OWNER: Obj = {"apiVersion": "x/v1", "kind": "X", "metadata": {"name": "c1", "uid": "u"}}


def placed(workload: Workload = WORKLOAD, settings: KubeSettings = SETTINGS) -> Obj:
    """Return a workload's object in a seat."""
    made = objects.workload_object(workload, settings)
    made["metadata"]["uid"] = "u"
    return objects.with_status(made, workload, at=1.0, assignmentID="12345678-aaaa", podName="p")


def errors(kind: str, obj: Obj) -> list[str]:
    [version] = [crd["spec"]["versions"][0] for crd in definitions() if crd["spec"]["names"]["kind"] == kind]
    return schema.check(version, obj)


def test_a_workload_comes_back_from_its_object_as_it_was():
    assert objects.workload_value(placed()) == WORKLOAD
    plain = replace(WORKLOAD, slug="tiny", name="trainer-tiny", claim=None, need=Need(), phase="Pending")
    assert objects.workload_value(objects.with_status(objects.workload_object(plain, SETTINGS), plain, at=1.0)) == plain


def test_what_is_written_is_what_the_definitions_accept():
    assert errors("Workload", placed()) == []
    ledger = objects.ledger_object(Claim(name="c1", device_bytes=1 << 30, tiers=(80 << 30,)))
    ledger["spec"]["seats"] = [objects.seat_object(WORKLOAD, "u", "12345678-aaaa")]
    assert errors("ClaimLedger", ledger) == []


@hypothesis_settings(max_examples=25, deadline=None)
@given(st.from_regex(r"(trainer|sampler)-[a-z0-9._-]{1,120}", fullmatch=True))
def test_any_workload_has_an_object_and_a_pod_that_kubernetes_can_name(name):
    called = objects.object_name(name)
    pod = objects.pod_name({"metadata": {"name": called}, "status": {"assignmentID": "12345678-", "incarnation": 99}})
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", pod)
    assert len(pod) <= 63


def test_two_workloads_never_share_an_object():
    names = ["trainer-a_b", "trainer-a.b", "trainer-a-b", "trainer-" + "a" * 60, "trainer-" + "a" * 61]
    assert len({objects.object_name(name) for name in names}) == len(names)


@hypothesis_settings(max_examples=50, deadline=None)
@given(st.integers(0, 1 << 50))
def test_a_size_survives_being_written_as_a_quantity(size_bytes):
    assert objects.size(objects.quantity(size_bytes)) == size_bytes


def test_a_claim_prefers_the_smaller_tier_and_takes_nothing_too_small():
    made = objects.claim_object(Claim(name="c1", device_bytes=30 << 30, tiers=(48 << 30, 80 << 30)), OWNER, SETTINGS)
    [request] = made["spec"]["devices"]["requests"]
    assert [tier["name"] for tier in request["firstAvailable"]] == ["t49152", "t81920"]
    [selector] = request["firstAvailable"][0]["selectors"]
    memory = 'device.capacity["gpu.nvidia.com"].memory'
    assert selector["cel"]["expression"] == (
        f'{memory}.compareTo(quantity("30Gi")) >= 0 && {memory}.compareTo(quantity("48Gi")) <= 0'
    )


def test_a_pod_gets_its_claim_its_place_and_no_token():
    pod = objects.pod_object(placed(SHARING), SETTINGS)
    spec, [container] = pod["spec"], pod["spec"]["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimName": "c1"}]
    assert container["resources"] == {"claims": [{"name": "gpu"}], "requests": {"memory": "40Gi"}}
    said = {each["name"]: each.get("value") for each in container["env"]}
    assert said["OPENRL_ACCELERATOR"] == "c1"
    assert said["OPENRL_ASSIGNMENT_ID"] == "12345678-aaaa"
    assert said["OPENRL_POOL"] == WORKLOAD.slug
    assert said["OPENRL_POD_UID"] is None  # the downward API's
    assert container["command"] == ["python", "-m", "openrl.workers.trainer"]
    assert container["args"] == ["--base", WORKLOAD.base, "--name", WORKLOAD.name, "--pool", WORKLOAD.slug]
    assert spec["nodeSelector"] == {"openrl.io/enabled": "true", "openrl.io/trainer": "true"}
    assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


def test_a_template_gives_all_that_the_scheduler_does_not_decide(tmp_path):
    path = tmp_path / "template.yaml"
    template = {
        "metadata": {"labels": {"team": "x"}},
        "spec": {
            "serviceAccountName": "openrl-worker",
            "containers": [
                {
                    "name": "worker",
                    "env": [{"name": "A", "value": "1"}, {"name": "OPENRL_ACCELERATOR", "value": "mine"}],
                    "resources": {"requests": {"memory": "100Gi"}, "limits": {"memory": "1Gi"}},
                }
            ],
        },
    }
    path.write_text(yaml.safe_dump(template))
    environ = {"OPENRL_TRAINER_IMAGE": "t", "OPENRL_SAMPLER_IMAGE": "s", "OPENRL_WORKER_TEMPLATE": str(path)}
    settings = KubeSettings.from_env(environ)
    pod = objects.pod_object(placed(settings=settings), settings)
    [container] = pod["spec"]["containers"]
    assert pod["metadata"]["labels"]["team"] == "x"
    assert pod["spec"]["serviceAccountName"] == "openrl-worker"
    assert container["resources"]["requests"] == {"memory": "100Gi"}
    assert container["resources"]["limits"] == {"memory": "40Gi"}
    assert [each for each in container["env"] if each["name"] == "OPENRL_ACCELERATOR"] == []
    assert settings.version != SETTINGS.version


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ({"spec": {"containers": [{"name": "x"}]}}, "no container called 'worker'"),
        ({"spec": {"containers": [{"name": "worker"}], "nodeName": "n"}}, "spec.nodeName"),
        ({"specs": {}}, "nothing else"),
        ("[", "no YAML file"),
    ],
)
def test_a_template_that_makes_no_sense_is_refused_by_name(tmp_path, template, named):
    path = tmp_path / "template.yaml"
    path.write_text(template if isinstance(template, str) else yaml.safe_dump(template))
    environ = {"OPENRL_TRAINER_IMAGE": "t", "OPENRL_SAMPLER_IMAGE": "s", "OPENRL_WORKER_TEMPLATE": str(path)}
    with pytest.raises(ValueError, match=named):
        KubeSettings.from_env(environ)


def test_a_missing_image_is_named():
    with pytest.raises(ValueError, match="OPENRL_SAMPLER_IMAGE is not set"):
        KubeSettings.from_env({"OPENRL_TRAINER_IMAGE": "t"})


def test_only_whole_pools_of_the_newest_slices_count():
    def piece(pool: str, generation: int, count: int, *names: str) -> Obj:
        devices = [{"name": name, "capacity": {"memory": {"value": "80Gi"}}} for name in names]
        spec = {"driver": "gpu.nvidia.com", "nodeName": "n1", "devices": devices}
        return {"spec": {**spec, "pool": {"name": pool, "generation": generation, "resourceSliceCount": count}}}

    slices = [piece("a", 1, 1, "old"), piece("a", 2, 2, "new-1"), piece("a", 2, 2, "new-2"), piece("b", 1, 2, "half")]
    view = View({"n1": {"metadata": {"name": "n1"}}}, slices, {}, {}, {}, {}, {}, SETTINGS)
    assert [device.name for device in view.devices] == ["a/new-1", "a/new-2"]


@pytest.mark.parametrize(
    ("status", "has_ended"),
    [
        ({"phase": "Running", "containerStatuses": [{"state": {"terminated": {}}}]}, False),
        ({"phase": "Failed", "containerStatuses": [{"state": {"running": {}}}]}, False),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {}}}, {"state": {"running": {}}}]}, False),
        ({"phase": "Failed", "initContainerStatuses": [{"state": {"running": {}}}]}, False),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {}}}]}, True),
        ({"phase": "Succeeded", "containerStatuses": [{"state": {"terminated": {}}}]}, True),
    ],
)
def test_a_pod_has_ended_when_all_its_containers_have_and_its_phase_says_so(status, has_ended):
    assert objects.has_ended({"metadata": {}, "spec": {"nodeName": "n"}, "status": status}) is has_ended


@pytest.mark.parametrize(
    ("status", "is_lost", "said"),
    [
        (
            {"reason": "Evicted", "message": "low on memory. ", "containerStatuses": [137]},
            False,
            "Evicted, low on memory., exit code 137, Error",
        ),
        ({"containerStatuses": [137]}, False, "exit code 137, Error"),
        ({"reason": "NodeLost"}, True, "its node is gone, NodeLost"),
        ({}, False, "nothing is said about why"),
    ],
)
def test_the_end_of_a_pod_is_told_by_what_the_cluster_says_and_by_its_containers_end(status, is_lost, said):
    ends = [{"exitCode": code, "reason": "Error"} for code in status.get("containerStatuses", ())]
    containers = [{"name": "worker", "state": {"terminated": end}} for end in ends]
    pod = {"metadata": {"name": "p"}, "spec": {"nodeName": "n"}, "status": {**status, "containerStatuses": containers}}
    assert objects.why_ended(pod, is_lost=is_lost) == f"p on n ended: {said}"
