"""The chart and the scheduler agree: what one passes on the other reads, and the pods that come of it are valid."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from openrl.scheduler.clusters import kube_objects
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.needs import Budget, Needs
from openrl.scheduler.resources import Need, Pool, Workload
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks import assignment
from openrl.tasks.registry import BaseModel
from tests.install.definitions import definitions
from tests.install.manifests import CHART, manifests

VARIANTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "variants").glob("*.yaml"))}


def told(values: dict[str, Any], directory: Path) -> dict[str, str]:
    """Return the environment of the scheduler under values of the chart, its template written into `directory`."""
    documents = list(yaml.safe_load_all(manifests.rendered(values)["scheduler"]))
    [template] = [each for each in documents if each["kind"] == "ConfigMap"]
    [deployment] = [each for each in documents if each["kind"] == "Deployment"]
    (directory / "template.yaml").write_text(template["data"]["template.yaml"])
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    found = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    assert found["OPENRL_WORKER_TEMPLATE"].endswith("/template.yaml")
    return found | {"OPENRL_WORKER_TEMPLATE": str(directory / "template.yaml"), "OPENRL_NAMESPACE": "openrl"}


def pod(settings: KubeSettings, *, exclusive: bool = False) -> dict[str, Any]:
    """Return the pod of a trainer that sits on a claim, and check that its workload is one that may be."""
    need = Need(device_bytes=24 << 30, host_bytes=32 << 30, exclusive=exclusive)
    workload = Workload(name="trainer-m", kind="trainer", base="m", slug="m", since=0.0, claim="claim-1", need=need)
    obj = kube_objects.workload_object(workload, settings)
    obj["metadata"] |= {"uid": "9d1c2f0e-0b7e-4a4e-8d0c-000000000001", "creationTimestamp": "2027-01-31T12:00:00Z"}
    obj["status"] = {
        "phase": "Placing",
        "claimName": "claim-1",
        "assignmentID": "a-1",
        "placements": 1,
        "incarnation": 0,
    }
    assert definitions()["Workload"].errors(obj) == []
    return kube_objects.pod_object(obj, settings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_scheduler_understands_what_the_chart_tells_it(variant: str, tmp_path: Path):
    env = told(VARIANTS[variant], tmp_path)
    settings, driver = SchedulerSettings.from_env(env), KubeSettings.from_env(env)
    assert settings.cluster == "kubernetes"
    assert driver.device_driver == ("gpu.example.com" if variant == "kind" else "gpu.nvidia.com")
    assert driver.trainer_image.endswith("openrl-trainer:0.1.0")
    if variant == "kueue":
        assert (settings.strategy, settings.tiers) == ("binpack", (24 << 30, 80 << 30))
        assert settings.tenant_seats == {"alice": 4, "bob": 2}


def test_a_workers_pod_is_valid_restricted_and_alone_in_what_it_is_told(tmp_path: Path):
    made = pod(KubeSettings.from_env(told(VARIANTS["public"], tmp_path)))
    kubernetes_validate.validate(made, "1.34", strict=True)
    spec = made["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("openrl-worker", False)
    assert spec["terminationGracePeriodSeconds"] > 120
    [worker] = spec["containers"]
    assert worker["image"] == "registry.example/research/openrl-trainer:0.1.0"
    env = {each["name"]: each for each in worker["env"]}
    assert env["OPENRL_ACCELERATOR"]["value"] == "claim-1"
    assert env["OPENRL_REDIS_URL"]["valueFrom"]["secretKeyRef"] == {"name": "openrl-redis", "key": "url"}
    assert env["OPENRL_LEASE_S"]["value"] == "60"
    assert made["metadata"]["labels"]["app.kubernetes.io/component"] == "worker", "its network policy goes by that"
    assert len(json.dumps(made)) < 20_000


def test_where_samplers_run_vllm_the_scheduler_gives_each_its_device_alone(tmp_path: Path):
    pool = Pool(slug="m", kind="sampler", base="m")
    model = BaseModel(
        name="m", slug="m", path="/nowhere", vocab_size=260, max_context=512, arch="llama", tokenizer_id="m",
        hidden_size=64, num_layers=2, tied_embeddings=True,
    )  # fmt: skip
    for values, alone in (({"pools": {"env": {"OPENRL_SAMPLER_ENGINE": "vllm"}}}, True), ({}, False)):
        env = told(values, tmp_path)
        need = Needs(Budget.from_env(env)).of([pool], [model], {})[pool]
        assert need.exclusive is alone
        [worker] = pod(KubeSettings.from_env(env), exclusive=need.exclusive)["spec"]["containers"]
        assert ("OPENRL_ACCELERATOR" in {each["name"] for each in worker["env"]}) is not alone


def test_a_probe_looks_at_the_file_that_the_worker_touches_and_not_where_an_agent_stops_workers(tmp_path: Path):
    [worker] = pod(KubeSettings.from_env(told({}, tmp_path)))["spec"]["containers"]
    [file] = [each["value"] for each in worker["env"] if each["name"] == assignment.ALIVE]
    assert worker["startupProbe"]["exec"]["command"] == ["test", "-e", file]
    probe = worker["livenessProbe"]["exec"]["command"]
    mine = tmp_path / "alive"
    command = [word.replace(file, str(mine)) for word in probe]
    for touched_s_ago, status in ((None, 1), (0, 0), (60, 0), (600, 1)):
        if touched_s_ago is not None:
            mine.touch()
            os.utime(mine, (time.time() - touched_s_ago,) * 2)
        assert subprocess.run(command, stderr=subprocess.DEVNULL).returncode == status
    [stopped] = pod(KubeSettings.from_env(told(VARIANTS["own-secrets"], tmp_path)))["spec"]["containers"]
    assert "livenessProbe" not in stopped


def test_kueue_admits_exclusive_workers_and_hears_of_no_others(tmp_path: Path):
    settings = KubeSettings.from_env(told(VARIANTS["kueue"], tmp_path))
    queue = "kueue.x-k8s.io/queue-name"
    assert pod(settings, exclusive=True)["metadata"]["labels"][queue] == "research"
    assert queue not in pod(settings)["metadata"]["labels"]
