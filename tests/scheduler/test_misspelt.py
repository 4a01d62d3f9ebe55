"""Settings that nothing reads are named before a service starts."""

from __future__ import annotations

from pathlib import Path

from openrl.scheduler import cli, preflight
from openrl.scheduler.misspelt import unread
from openrl.scheduler.settings import UpSettings


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
