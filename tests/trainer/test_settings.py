"""The trainer's settings: from the environment, refused where they make no sense."""

import pytest

from openrl.workers.trainer.settings import TrainerSettings


def test_settings_come_from_the_environment_and_have_defaults():
    env = {"OPENRL_TRAINER_TOKEN_BUDGET": "512", "OPENRL_TRAINER_POLL_S": "0.5", "OPENRL_TORCH_THREADS": "3"}
    settings = TrainerSettings.from_env(env)
    assert (settings.token_budget, settings.poll_s, settings.torch_threads) == (512, 0.5, 3)
    assert TrainerSettings.from_env({}) == TrainerSettings()


@pytest.mark.parametrize("value", ["-1", "many", "1.5"])
def test_a_setting_that_makes_no_sense_is_refused_by_name(value):
    with pytest.raises(ValueError, match="OPENRL_TRAINER_TOKEN_BUDGET"):
        TrainerSettings.from_env({"OPENRL_TRAINER_TOKEN_BUDGET": value})


def test_a_time_that_is_not_finite_is_refused_by_name():
    with pytest.raises(ValueError, match="OPENRL_TRAINER_IDLE_S"):
        TrainerSettings.from_env({"OPENRL_TRAINER_IDLE_S": "nan"})
