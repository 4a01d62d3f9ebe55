"""Losses, gradients and steps equal stock transformers, PEFT and torch's AdamW, however the work is cut or mixed.

The bound is 1e-5 of each tensor's norm, ours in float32 and the plain way in float64: what is measured is our rounding
alone, also of a loss whose terms nearly cancel. Steps are compared with a large eps: with a tiny one, AdamW
moves a weight whose gradient is all rounding by the whole learning rate, in either direction. The step itself is
compared with torch's at a tiny eps, on equal gradients, in test_optimizer.py.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker import types
from tinker.proto import request_conv

from openrl.tasks.messages import Datum, ForwardBackward, OptimStep
from openrl.tasks.wire import codec
from openrl.workers.weights.adapter import save_adapter
from tests.plain import LOSSES, Plain, exported, furthest
from tests.trainer.bench import BASE, computed, forward_backward, make_data

LENGTHS = [5, 30, 11, 41, 1, 18]
STEPS = [OptimStep(learning_rate=1e-2, eps=10.0), OptimStep(learning_rate=2e-2, eps=5.0, weight_decay=0.1)]
BOUND = 1e-5
LOGPROB = 1e-5
"""Nats that a log-probability may be off by: where terms cancel, a loss can't be held closer than that lets it."""


def sparse(shape_seed: int) -> ForwardBackward:
    """K targets a position, mostly 0, as the SDK sends them: each tensor sparse by itself, with its own pattern."""
    draw, datums = torch.Generator().manual_seed(shape_seed), []
    for length in (9, 24):
        targets = torch.randint(0, 260, (length, 6), generator=draw) * (torch.rand(length, 6, generator=draw) < 0.2)
        weights = torch.randn(length, 6, generator=draw) * (torch.rand(length, 6, generator=draw) < 0.2)
        inputs = {"target_tokens": targets, "weights": weights}
        tokens = types.ModelInput.from_ints(torch.randint(0, 260, (length,), generator=draw).tolist())
        datums.append(types.Datum(model_input=tokens, loss_fn_inputs=inputs))
        assert all(tensor.sparse_crow_indices is not None for tensor in datums[-1].loss_fn_inputs.values())
    content = types.ForwardBackwardInput(data=datums, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=content, model_id="m", seq_id=1)
    body = request_conv.forward_backward_request_to_proto(request).SerializeToString()
    return ForwardBackward(data=codec.decode_forward_backward(body).data, loss_fn="cross_entropy")


def mixed_widths() -> ForwardBackward:
    parts = [make_data("cross_entropy", [9, 20], seed=n, width=width) for n, width in enumerate([None, 3, None, 1])]
    return ForwardBackward(
        data=tuple(datum for part in zip(*parts, strict=True) for datum in part), loss_fn="cross_entropy"
    )


CASES = {
    **{name: forward_backward(name, LENGTHS, seed=1) for name in LOSSES},
    "cross_entropy, 3 targets": forward_backward("cross_entropy", LENGTHS, seed=2, width=3),
    "cross_entropy, widths mixed": mixed_widths(),
    "cross_entropy, sparse": sparse(3),
    "ppo, own bounds": forward_backward("ppo", LENGTHS, seed=4, clip_low_threshold=0.5, clip_high_threshold=1.6),
    "cispo, no lower bound": forward_backward("cispo", LENGTHS, seed=5, clip_low_threshold=0, clip_high_threshold=4),
    "dro, own beta": forward_backward("dro", LENGTHS, seed=6, beta=0.3),
    "gspo, own bounds": forward_backward("gspo", LENGTHS, seed=7, clip_low_threshold=0.3, clip_high_threshold=1.9),
}


class Twin:
    """A run of ours and a plain one, from the same bits."""

    def __init__(self, bench, model_dir: Path, number: int = 0, **options: int) -> None:
        self.run = bench.run(number, seed=number + 1, **options)
        self.directory = bench.data_dir / f"exports-{number}"
        self.plain = Plain(model_dir, self.export("start"), torch.float64)

    def export(self, name: str) -> Path:
        directory = self.directory / name
        directory.mkdir(parents=True)
        save_adapter(directory, self.run.weights(), BASE)
        return directory

    def gradient(self) -> dict[str, torch.Tensor]:
        names = [f"{name}.weight" for name, _ in self.run.weights().named_parameters()]
        return dict(zip(names, self.run.gradient, strict=True))

    def plain_step(self, hyper: OptimStep) -> None:
        self.plain.step(**{name: getattr(hyper, name) for name in OptimStep.__slots__})

    def assert_equal(self, name: str) -> None:
        error, tensor = furthest(exported(self.export(name)), self.plain.weights())
        assert error < BOUND, tensor


def result(outcome) -> tuple[list[np.ndarray], dict[str, float]]:
    assert outcome.error is None, outcome.error
    decoded = codec.output_to_json(outcome.result)
    outputs = [record["logprobs"] for record in decoded["loss_fn_outputs"]]
    return [np.array(o["data"], np.float32).reshape(o["shape"]) for o in outputs], computed(decoded["metrics"])


@pytest.mark.parametrize("case", CASES)
def test_loss_logprobs_gradient_and_two_steps_equal_the_plain_way(bench, tiny_path, case):
    assert_two_steps_equal(bench, Twin(bench, tiny_path), CASES[case])


def assert_two_steps_equal(bench, twin: Twin, message: ForwardBackward) -> None:
    for number, hyper in enumerate(STEPS):
        arrays, metrics = result(bench.one(twin.run, message))
        total, expected = twin.plain.forward_backward(message.data, message.loss_fn, **message.loss_fn_config)
        rounding = max(1e-5, LOGPROB * twin.plain.steepness())
        assert metrics["loss:sum"] == pytest.approx(total, rel=BOUND, abs=rounding)
        assert metrics["tokens:sum"] == sum(array.size for array in expected)
        for mine, other in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-5)
        if number == 0:
            error, tensor = furthest(twin.gradient(), twin.plain.gradients())
            assert error < BOUND, tensor
        assert bench.one(twin.run, hyper).error is None
        twin.plain_step(hyper)
        twin.assert_equal(f"step-{number}")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_call_cut_in_three_steps_as_the_whole_and_its_metrics_add_up(bench, tiny_path, loss_fn):
    twin, whole = Twin(bench, tiny_path), bench.run(1, seed=1)
    message = CASES[loss_fn]
    parts = [replace(message, data=message.data[start : start + 2]) for start in (0, 2, 4)]
    for number, hyper in enumerate(STEPS):
        metrics = [result(bench.one(twin.run, part))[1] for part in parts]
        twin.plain.forward_backward(message.data, loss_fn)
        together = result(bench.one(whole, message))[1]
        for name, value in together.items():
            combine = {"sum": sum, "min": min, "max": max}[name.rpartition(":")[2]]
            assert combine(part[name] for part in metrics) == pytest.approx(value, rel=1e-5), name
        assert bench.one(twin.run, hyper).error is None and bench.one(whole, hyper).error is None
        twin.plain_step(hyper)
        twin.assert_equal(f"step-{number}")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_a_pipeline_beside_other_runs_ends_where_one_operation_at_a_time_does(bench, tiny_path, loss_fn):
    twin, awaited, other = Twin(bench, tiny_path), bench.run(1, seed=1), bench.run(2, rank=7, seed=5)
    message = CASES[loss_fn]
    noise = forward_backward("ppo", [33, 8], seed=8)
    pipeline = [(twin.run, message), (other, noise), (twin.run, STEPS[0]), (twin.run, message), (twin.run, STEPS[1])]
    assert not any(outcome.error for outcome in bench.all(*pipeline))
    for hyper in STEPS:
        for operation in (message, hyper):
            assert bench.one(awaited, operation).error is None
        twin.plain.forward_backward(message.data, loss_fn)
        twin.plain_step(hyper)
    twin.assert_equal("end")
    twin.run = awaited
    twin.assert_equal("awaited")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_an_operation_has_its_own_metrics_whatever_it_was_batched_with(bench, loss_fn):
    message = CASES[loss_fn]
    _, alone = result(bench.one(bench.run(0, seed=1), message))
    crowd = [
        (bench.run(n + 2, rank=3 + n, seed=9 + n), forward_backward(name, [21, 6], seed=n))
        for n, name in enumerate(LOSSES)
    ]
    outcomes = bench.all(*crowd[:3], (bench.run(1, seed=1), message), *crowd[3:])
    _, among = result(outcomes[3])
    assert among.keys() == alone.keys() >= {"loss:sum", "tokens:sum", "active_tokens:sum"}
    assert among == pytest.approx(alone, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("sampled", [-3e38, -1e9, -1000.0, -100.0, -90.0, -80.0, -50.0, 50.0, 3e38])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss_fn", [name for name in LOSSES if name != "cross_entropy"])
def test_an_extreme_sampled_logprob_is_finite_or_a_failure_that_names_it_and_never_a_bad_weight(
    bench, loss_fn, advantage, sampled
):
    run = bench.run(0, seed=1)
    [datum] = make_data(loss_fn, [6], seed=2)
    inputs = {name: array.copy() for name, array in datum.inputs.items()}
    inputs["logprobs"][3], inputs["advantages"][3] = sampled, advantage
    before = [tensor.detach().clone() for tensor in run.weights().parameters()]
    outcome = bench.one(run, ForwardBackward(data=(Datum(tokens=datum.tokens, inputs=inputs),), loss_fn=loss_fn))
    step = bench.one(run, OptimStep(learning_rate=1e-3))
    after = [tensor.detach() for tensor in run.weights().parameters()]
    assert all(bool(tensor.isfinite().all()) for tensor in after)
    if outcome.error is None:
        assert all(math.isfinite(value) for value in result(outcome)[1].values())
    else:
        assert outcome.category == "user" and "not finite" in outcome.error
        assert step.error is not None
    if step.error is None:
        assert math.isfinite(json.loads(step.result)["metrics"]["grad_norm"])
    else:
        assert step.category == "user"
        assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_importance_sampling_over_an_old_logprob_of_minus_100_fails_and_names_the_place_and_the_value(bench):
    run = bench.run(0, seed=1)
    [datum] = make_data("importance_sampling", [6], seed=2)
    sampled = datum.inputs["logprobs"].copy()
    sampled[3] = -100.0
    bad = Datum(tokens=datum.tokens, inputs={**datum.inputs, "logprobs": sampled})
    outcome = bench.one(run, ForwardBackward(data=(datum, bad), loss_fn="importance_sampling"))
    assert "data[1], position 3" in outcome.error and "logprobs -100.0" in outcome.error


@pytest.mark.parametrize("rank", [64, 65, 140])
def test_a_rank_beyond_the_models_own_width_is_trained_as_the_plain_way_does(bench, tiny_path, rank):
    """Its A is higher than wide."""
    assert_two_steps_equal(bench, Twin(bench, tiny_path, rank=rank), CASES["cross_entropy"])
