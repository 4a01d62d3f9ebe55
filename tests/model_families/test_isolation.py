"""What breaks in one run of a pass leaves the seven others the very bits that they have beside it when it is whole."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from openrl.tasks.messages import Datum
from openrl.workers.model.loading import load
from tests.model_families.mixed import KINDS, Mixed, result
from tests.model_families.zoo import make_model
from tests.plain import LOSSES

BROKEN = 4
"""Which run: it has neighbours on both sides, and adapters in attention and MLP."""


def nan_weights(mixed):
    with torch.no_grad():
        for a, _ in mixed.runs[BROKEN].weights().weights.values():
            a.fill_(math.nan)


def infinite_advantages(mixed):
    with_input(mixed, "advantages", math.inf)


def a_ratio_that_overflows(mixed):
    with_input(mixed, "logprobs", -3e38, advantages=-1.0)


def a_gradient_that_overflows(mixed):
    with torch.no_grad():
        for a, b in mixed.runs[BROKEN].weights().weights.values():
            a.mul_(3e4), b.div_(3e4)
    with_input(mixed, "advantages", 3e37, logprobs=-1.0)


def a_config_out_of_range(mixed):
    mixed.messages[BROKEN] = replace(mixed.messages[BROKEN], loss_fn="dro", loss_fn_config={"beta": math.nan})


def a_config_that_is_no_number(mixed):
    mixed.messages[BROKEN] = replace(mixed.messages[BROKEN], loss_fn="dro", loss_fn_config={"beta": "much"})


def a_loss_that_is_not_there(mixed):
    mixed.messages[BROKEN] = replace(mixed.messages[BROKEN], loss_fn="none")


DAMAGES = {
    nan_weights: "log-probability is not finite (nan)",
    infinite_advantages: "loss is not finite (-inf)",
    a_ratio_that_overflows: "loss is not finite (inf)",
    a_gradient_that_overflows: "gradient is not finite",
    a_config_out_of_range: "loss is not finite (nan)",
    a_config_that_is_no_number: "internal error",
    a_loss_that_is_not_there: "internal error",
}
"""What breaks, and what is said of it."""
SHORT = [(nan_weights, "qwen3-moe"), (nan_weights, "gemma3"), (a_gradient_that_overflows, "gemma3")]
SHORT += [(a_config_that_is_no_number, "gemma3")]


def with_input(mixed, name, value, **others):
    """Put a value into one place of the second sequence of the run that breaks."""
    message = mixed.messages[BROKEN]
    good, bad = message.data
    inputs = {key: array.copy() for key, array in bad.inputs.items()}
    for key, number in {name: value, **others}.items():
        inputs[key][2] = number
    mixed.messages[BROKEN] = replace(message, data=(good, Datum(tokens=bad.tokens, inputs=inputs)))


@pytest.mark.parametrize(("damage", "name"), SHORT)
def test_a_run_that_breaks_leaves_the_others_bit_for_bit_what_they_are_beside_it_whole(models, tmp_path, name, damage):
    assert_isolated(models(name), tmp_path, damage)


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "llama3", "smollm3", "gemma2", "gemma3", "qwen3-moe"])
def test_so_do_runs_of_each_family_whatever_breaks(models, tmp_path, name, damage):
    assert_isolated(models(name), tmp_path, damage)


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGES)
def test_so_do_runs_on_a_base_in_bfloat16(tmp_path, damage):
    loaded = load(make_model(tmp_path / "model", "qwen3-moe"), device="cpu", dtype=torch.bfloat16)
    assert_isolated(loaded, tmp_path, damage)


def assert_isolated(loaded, directory, damage):
    whole, broken = (Mixed.of(loaded, directory / name, first=LOSSES.index("dro")) for name in ("whole", "broken"))
    damage(broken)
    outcomes, expected = broken.together(), whole.together()
    assert DAMAGES[damage] in outcomes[BROKEN].error
    assert broken.runs[BROKEN].gradient is None and broken.runs[BROKEN].void
    assert result(expected[BROKEN])
    for number in range(len(KINDS)):
        if number == BROKEN:
            continue
        (mine, metrics), (other, others) = result(outcomes[number]), result(expected[number])
        np.testing.assert_array_equal(mine, other)
        assert metrics == others
        for left, right in zip(broken.runs[number].gradient, whole.runs[number].gradient, strict=True):
            assert left.isfinite().all() and torch.equal(left, right)
