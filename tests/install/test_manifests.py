"""What is installed: one truth, valid for each supported Kubernetes, and no more rights than are needed."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import Chart, lint
from helm_python.errors import HelmError

from tests.install.manifests import CHART, ROOT, manifests

OLDEST = "1.34"
VERSIONS = (OLDEST, *(pytest.param(version, marks=pytest.mark.full) for version in ("1.35", "1.36", "1.37")))
VARIANTS = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((CHART / "variants").glob("*.yaml"))}
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
NOT_IN_THE_CHART = {"Namespace", "CustomResourceDefinition", "PersistentVolume"}
FOREIGN = {"ServiceMonitor"}
"""Kinds of others, whose schemas don't come with Kubernetes."""


@cache
def objects(variant: str = "") -> list[dict[str, Any]]:
    texts = manifests.rendered(VARIANTS.get(variant, {}))
    return [document for text in texts.values() for document in yaml.safe_load_all(text) if document]


def one_file() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "k8s" / "openrl.yaml").read_text()))


def kustomized(directory: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl, for its kustomize")
    command = [kubectl, "kustomize", str(ROOT / "k8s" / directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def named(found: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    by_name = {(each["kind"], each["metadata"]["name"]): each for each in found}
    assert len(by_name) == len(found)
    return by_name


def pod_specs(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the spec of every pod that comes of these objects, the workers' included."""
    specs = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in found
        if "template" in each.get("spec", {})
    }
    [template] = [each for each in found if each["metadata"]["name"] == "openrl-worker-template"]
    return specs | {"worker": yaml.safe_load(template["data"]["template.yaml"])["spec"]}


def validate(found: list[dict[str, Any]], version: str) -> None:
    for each in found:
        if each["kind"] not in FOREIGN:
            _validate(json.dumps(each), version)


@cache
def _validate(text: str, version: str) -> None:
    """Validate an object, once: most are the same in every variant."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


def in_order(value: Any) -> Any:
    """Return the same with the variables of each container by name: kustomize puts changed ones first."""
    if isinstance(value, dict):
        return {name: in_order(each) for name, each in value.items()}
    if isinstance(value, list):
        each_has_a_name = all(isinstance(each, dict) and "name" in each for each in value)
        found = [in_order(each) for each in value]
        return sorted(found, key=lambda each: str(each["name"])) if each_has_a_name else found
    return value


def test_what_lies_here_is_current():
    stale = [str(path) for path, text in manifests.files().items() if not path.exists() or path.read_text() != text]
    assert stale == [], "run `make manifests`"


@pytest.mark.parametrize("version", VERSIONS)
def test_the_one_file_install_is_valid(version: str):
    validate(one_file(), version)


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_each_variant_of_the_chart_is_valid(version: str):
    for variant in VARIANTS:
        validate(objects(variant), version)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_of_the_chart_lints_clean(variant: str):
    report = lint(CHART, VARIANTS[variant], strict=True, namespace="openrl", kube_version="v1.34.0")
    assert [message for message in report["messages"] if message["severity"] >= 2] == []
    assert report["errors"] == []


def test_what_is_not_valid_is_noticed():
    [service] = [each for each in objects() if each["kind"] == "Service" and each["metadata"]["name"] == "openrl-api"]
    with pytest.raises(kubernetes_validate.ValidationError):
        validate([{**service, "spec": {**service["spec"], "port": 80}}], "1.34")


@pytest.mark.full
@pytest.mark.parametrize("version", VERSIONS)
def test_the_workers_template_is_a_valid_pod_once_it_has_an_image(version: str):
    for variant in VARIANTS:
        [config] = [each for each in objects(variant) if each["metadata"]["name"] == "openrl-worker-template"]
        template = yaml.safe_load(config["data"]["template.yaml"])
        template["metadata"]["name"] = "worker"
        [container] = template["spec"]["containers"]
        assert container["name"] == "worker"
        container["image"] = "openrl-trainer:0"
        validate([{"apiVersion": "v1", "kind": "Pod", **template}], version)


def test_the_base_is_the_one_file_install():
    assert named(kustomized("base")) == named(one_file())


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_gives_what_the_chart_gives_under_the_values_of_that_name(overlay: str):
    found = kustomized(f"overlays/{overlay}")
    validate([each for each in found if each["kind"] in NOT_IN_THE_CHART - {"CustomResourceDefinition"}], OLDEST)
    ours = {name: each for name, each in named(found).items() if each["kind"] not in NOT_IN_THE_CHART}
    assert in_order(ours) == in_order(named(objects(overlay)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pod_is_restricted_and_has_no_token_unless_it_talks_to_kubernetes(variant: str):
    for name, spec in pod_specs(objects(variant)).items():
        if name == "openrl-snapshot-agent":
            assert spec["automountServiceAccountToken"] is False
            continue
        talks = name == "openrl-scheduler" or name.startswith("openrl-install-")
        assert spec["automountServiceAccountToken"] is talks, name
        assert spec["enableServiceLinks"] is False
        security = spec["securityContext"]
        assert security["runAsNonRoot"] and security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_the_scheduler_alone_may_write_and_may_not_decide_who_gets_a_device():
    roles = {each["metadata"]["name"]: each for each in objects() if each["kind"] in ("Role", "ClusterRole")}
    bound = {
        (subject["name"], each["roleRef"]["name"])
        for each in objects()
        if each["kind"] in ("RoleBinding", "ClusterRoleBinding")
        for subject in each["subjects"]
    }
    assert bound == {
        ("openrl-scheduler", "openrl-scheduler"),
        ("openrl-scheduler", "openrl:openrl-scheduler"),
        ("openrl-install", "openrl-install"),
    }
    rules = [rule for role in roles.values() for rule in role["rules"]]
    assert not any(
        "*" in value for rule in rules for part in ("apiGroups", "resources", "verbs") for value in rule[part]
    )
    resources = {resource for rule in rules for resource in rule["resources"]}
    assert not resources & {"resourceclaims/status", "resourceclaims/binding", "resourceclaims/driver"}
    whole_cluster = [role for role in roles.values() if role["kind"] == "ClusterRole"]
    assert {verb for role in whole_cluster for rule in role["rules"] for verb in rule["verbs"]} == {
        "get",
        "list",
        "watch",
    }
    assert all("secrets" not in rule["resources"] for rule in roles["openrl-scheduler"]["rules"])


def test_no_secret_is_written_down():
    text = (ROOT / "k8s" / "openrl.yaml").read_text()
    assert "kind: Secret" not in text
    for spec in pod_specs(objects()).values():
        for container in (*spec["containers"], *spec.get("initContainers", ())):
            for variable in container.get("env", ()):
                if any(word in variable["name"] for word in ("PASSWORD", "TOKEN", "AUTH", "REDIS_URL")):
                    assert "secretKeyRef" in variable["valueFrom"], variable["name"]


def test_the_store_keeps_its_word_and_asks_for_a_password():
    config = named(objects())["ConfigMap", "openrl-redis"]["data"]["store.conf"].splitlines()
    assert {"appendonly yes", "appendfsync always", "maxmemory-policy noeviction"} <= set(config)
    [container] = named(objects())["StatefulSet", "openrl-redis"]["spec"]["template"]["spec"]["containers"]
    assert "requirepass" in container["command"][-1]


def test_a_worker_has_longer_to_leave_than_the_scheduler_waits():
    assert pod_specs(objects())["worker"]["terminationGracePeriodSeconds"] > 120


def test_every_setting_is_explained():
    with Chart.load(CHART) as chart:
        values = chart.values
    told = {path for path, _, _ in manifests.settings()}
    assert all(words.endswith(".") for _, _, words in manifests.settings())
    assert {path.partition(".")[0] for path in told} == values.keys()


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"replica": 3}, "replica"),
        ({"api": {"replicas": 0}}, "replicas"),
        ({"pools": {"strategy": "random"}}, "strategy"),
        ({"pools": {"graceS": 30}}, "graceS"),
        ({"settings": {"OPENRL_REDIS_URL": "redis://"}}, "OPENRL_REDIS_URL"),
        ({"settings": {"LEASE": 3}}, "LEASE"),
        ({"pools": {"env": {"OPENRL_STRATEGY": "binpack"}}}, "OPENRL_STRATEGY"),
        ({"redis": {"enabled": False}}, "externalRedis.secret"),
        ({"ingress": {"enabled": True, "host": "openrl.example"}}, "ingress.tlsSecret"),
        ({"snapshotAgent": {"enabled": True}}, "snapshotAgent.image"),
    ],
)
def test_values_that_make_no_sense_are_refused_by_name(values: dict[str, Any], field: str):
    with pytest.raises(HelmError, match=field):
        manifests.rendered(values)


def test_a_changed_template_rolls_the_scheduler_and_a_changed_job_has_another_name():
    def annotation(variant: str) -> str:
        return named(objects(variant))["Deployment", "openrl-scheduler"]["spec"]["template"]["metadata"]["annotations"][
            "openrl.io/worker-template"
        ]

    def job(variant: str) -> str:
        [name] = [each["metadata"]["name"] for each in objects(variant) if each["kind"] == "Job"]
        return str(name)

    assert annotation("kueue") != annotation("") == annotation("single-node")
    assert job("external-redis") != job("") == job("gke")


def environments(found: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return what each container is told, by pod and container."""
    return {
        f"{name}/{container['name']}": container.get("env", [])
        for name, spec in pod_specs(found).items()
        for container in (*spec["containers"], *spec.get("initContainers", ()))
    }


def rendered(values: dict[str, Any], namespace: str = "openrl") -> list[dict[str, Any]]:
    texts = manifests.rendered(values, namespace=namespace)
    return [document for text in texts.values() for document in yaml.safe_load_all(text) if document]


def test_whoever_sizes_and_seats_workers_is_told_the_settings_that_they_are():
    """`openrl prepare`, the scheduler and the worker; what else a worker is told is its own."""
    ours = {"OPENRL_SAMPLER_ENGINE": "vllm", "OPENRL_TRAINER_TOKEN_BUDGET": "4096", "OPENRL_SAMPLER_KV_TOKENS": "32768"}
    values = {
        "settings": {"OPENRL_SAMPLER_KV_TOKENS": 16384, "OPENRL_LEASE_S": 60},
        "pools": {"env": {**ours, "NCCL_DEBUG": "INFO"}},
    }
    for where, variables in environments(rendered(values)).items():
        told = {each["name"]: each.get("value") for each in variables}
        assert len(told) == len(variables), f"{where} is told one twice, which an API server refuses"
        knows = where in ("openrl-scheduler/scheduler", "openrl-scheduler/prepare", "worker/worker")
        assert (ours.items() <= told.items()) is knows, where
        assert told.get("NCCL_DEBUG") == ("INFO" if where == "worker/worker" else None), where
        assert told.get("OPENRL_LEASE_S") == ("60" if "OPENRL_DATA_DIR" in told else None), where


def test_what_the_chart_says_itself_can_not_be_said_otherwise_beside_it():
    for variables in environments(rendered({**VARIANTS["kueue"], **VARIANTS["public"]})).values():
        for name in (each["name"] for each in variables if each["name"].startswith("OPENRL_")):
            if name not in VARIANTS["public"].get("settings", {}):
                for values in ({"settings": {name: "1"}}, {"pools": {"env": {name: "1"}}}):
                    with pytest.raises(HelmError, match=name):
                        manifests.rendered(values)


def test_two_installations_in_one_cluster_have_no_object_in_common():
    def names(found: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
        return {(each["kind"], each["metadata"].get("namespace", ""), each["metadata"]["name"]) for each in found}

    one = names(rendered({}))
    for values in ({"deviceClass": {"name": "openrl-gpu-b"}}, {"deviceClass": {"create": False}}):
        assert one & names(rendered(values, "openrl-b")) == set()
    assert ("DeviceClass", "", "openrl-gpu") in one & names(rendered({}, "openrl-b")), "so it is to be named"
    bindings = [each for each in rendered({}, "openrl-b") if each["kind"] == "ClusterRoleBinding"]
    roles = [each["metadata"]["name"] for each in rendered({}, "openrl-b") if each["kind"] == "ClusterRole"]
    assert [each["roleRef"]["name"] for each in bindings] == roles
    assert [each["subjects"][0]["namespace"] for each in bindings] == ["openrl-b"]


def test_two_schedulers_of_different_versions_never_run_side_by_side():
    assert named(objects())["Deployment", "openrl-scheduler"]["spec"]["strategy"] == {"type": "Recreate"}


def test_the_pod_that_restores_the_store_may_run_and_mounts_the_stores_own_volume():
    text = (ROOT / "docs" / "install.md").read_text()
    [block] = [each.partition("```")[0] for each in text.split("```yaml\n")[1:]]
    pod = yaml.safe_load(block)
    validate([pod], OLDEST)
    store = named(objects())["StatefulSet", "openrl-redis"]["spec"]
    [claim] = [each["metadata"]["name"] for each in store["volumeClaimTemplates"]]
    [volume] = pod["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == f"{claim}-openrl-redis-0"
    [container], [theirs] = pod["spec"]["containers"], store["template"]["spec"]["containers"]
    assert container["image"] == theirs["image"]
    assert container["securityContext"] == theirs["securityContext"]
    assert pod["spec"]["securityContext"] == store["template"]["spec"]["securityContext"]
    [mount] = container["volumeMounts"]
    assert {"name": claim, "mountPath": mount["mountPath"]} in theirs["volumeMounts"]
    assert f"tar -C {mount['mountPath']} -xf - < store.tar" in text
