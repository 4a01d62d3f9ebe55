"""Settings that nothing reads are named before a service starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.scheduler import cli, preflight
from openrl.scheduler.clusters.kube_objects import DOWNWARD
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.misspelt import OF_PODS, unread
from openrl.scheduler.noted import Noted
from openrl.scheduler.settings import UpSettings
from openrl.tasks import assignment


def asked(tmp_path: Path) -> set[str]:
    return preflight.check_settings(UpSettings(host="127.0.0.1", port=0, data_dir=tmp_path, models=("a",)))


def test_a_misspelt_setting_is_told_with_what_may_be_meant(tmp_path: Path):
    [said] = unread(["OPENRL_LEAS_S", "OPENRL_LEASE_S", "OPENRL_TEST_RANDOM", "HOME"], asked(tmp_path))
    assert said.startswith("OPENRL_LEAS_S is set") and said.endswith("did you mean OPENRL_LEASE_S?")


def test_what_resembles_nothing_is_told_too(tmp_path: Path):
    assert unread(["OPENRL_COLOUR"], asked(tmp_path)) == ["OPENRL_COLOUR is set, and no part of this service reads it"]


def test_every_option_and_every_parts_settings_are_known(tmp_path: Path):
    options = [parameter.envvar for parameter in cli.up.params if parameter.envvar]
    of_parts = ["OPENRL_TRAINER_TOKEN_BUDGET", "OPENRL_SAMPLER_KV_TOKENS", "OPENRL_LEASE_S", "OPENRL_METRICS_PORT"]
    assert len(options) > 10 and unread([*options, *of_parts, "OPENRL_MODELS"], asked(tmp_path)) == []


@pytest.mark.parametrize("name", ["OPENRL_NAMESPACE", "OPENRL_POD_NAME", "OPENRL_ALIVE_FILE", "OPENRL_DEVICE_CLASS"])
def test_what_only_kubernetes_is_told_is_said_to_have_no_effect_here(tmp_path: Path, name: str):
    [said] = unread([name], asked(tmp_path))
    assert said == f"{name} is set, and has no effect on one machine: it is for Kubernetes"


def test_all_that_kubernetes_is_told_is_known(tmp_path: Path):
    template = tmp_path / "pod.yaml"
    template.write_text("spec: {containers: [{name: worker}]}")
    images = {"OPENRL_TRAINER_IMAGE": "t", "OPENRL_SAMPLER_IMAGE": "s"}
    environ = Noted({**images, "OPENRL_WORKER_TEMPLATE": str(template)})
    KubeSettings.from_env(environ)
    told = {*environ.asked, *DOWNWARD, assignment.VARIABLE, assignment.ALIVE}
    assert told - asked(tmp_path) <= {*OF_PODS}
