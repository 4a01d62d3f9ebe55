"""One call for many operations: equal to stock torch one by one, isolated, and without a trace where none is due."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from openrl.tasks.messages import ForwardBackward, OptimStep
from openrl.tasks.wire.codec import output_to_json
from openrl.workers.weights.adapter import save_adapter
from tests.plain import Plain
from tests.trainer.bench import BASE, computed, forward_backward


def result(outcome):
    """Decode a forward's outcome: logprobs of each datum, metrics but those of its costs."""
    assert outcome.error is None, outcome.error
    decoded = output_to_json(outcome.result)
    arrays = [
        np.array(record["logprobs"]["data"], np.float32).reshape(record["logprobs"]["shape"])
        for record in decoded["loss_fn_outputs"]
    ]
    return arrays, computed(decoded["metrics"])


def bits(run) -> list[bytes]:
    """Everything that a run is, as bytes."""
    tensors = [*run.weights().parameters(), *run.moments.exp_avg, *run.moments.exp_avg_sq, *(run.gradient or [])]
    return [tensor.detach().numpy().tobytes() for tensor in tensors] + [repr((run.moments.step, run.void)).encode()]


def reference(tiny_path, run, messages, tmp_path):
    """Loss, logprobs and gradients of a run from stock transformers and PEFT, one sequence at a time."""
    directory = tmp_path / run.run_id.replace(":", "_")
    directory.mkdir()
    save_adapter(directory, run.weights(), BASE)
    plain = Plain(tiny_path, directory)
    all_logprobs, losses = [], []
    for message in messages:
        total, logprobs = plain.forward(message.data, message.loss_fn, **message.loss_fn_config)
        if message.kind == "forward_backward":
            total.backward()
        losses.append(total.item())
        all_logprobs.append(logprobs)
    return all_logprobs, losses, {name.removesuffix(".weight"): grad for name, grad in plain.gradients().items()}


def assert_gradient(run, expected, rel=1e-5):
    for (name, _), mine in zip(run.weights().named_parameters(), run.gradient, strict=True):
        scale = float(expected[name].norm())
        assert float((mine - expected[name]).norm()) <= rel * scale, name


def assert_near(mine, expected, rel=1e-5):
    for left, right in zip(mine, expected, strict=True):
        assert float((left - right).norm()) <= rel * float(right.norm())


def test_runs_of_different_rank_loss_and_settings_in_one_pass_equal_stock_peft_one_by_one(bench, tiny_path, tmp_path):
    runs = [
        bench.run(0, rank=4, seed=1),
        bench.run(1, rank=9, seed=2, train_mlp=False),
        bench.run(2, rank=2, seed=3, train_attn=False, train_unembed=False),
    ]
    messages = [
        [
            forward_backward("cross_entropy", [12, 30, 7], seed=1),
            forward_backward("cross_entropy", [6, 3], seed=2, width=3),
        ],
        [forward_backward("importance_sampling", [20, 4], seed=3), forward_backward("ppo", [9], seed=4, forward=True)],
        [forward_backward("ppo", [11, 40], seed=5, clip_low_threshold=0.5, clip_high_threshold=1.5)],
    ]
    outcomes = iter(bench.all(*[(run, message) for run, mine in zip(runs, messages, strict=True) for message in mine]))
    for run, mine in zip(runs, messages, strict=True):
        logprobs, losses, grads = reference(tiny_path, run, mine, tmp_path)
        for expected, loss in zip(logprobs, losses, strict=True):
            arrays, metrics = result(next(outcomes))
            assert metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)
            assert metrics["tokens:sum"] == sum(array.size for array in arrays)
            for array, plain in zip(arrays, expected, strict=True):
                np.testing.assert_allclose(array, plain, rtol=1e-5, atol=1e-5)
        assert_gradient(run, grads)


def test_a_list_of_one_gives_what_the_operation_gives_among_others(bench):
    alone, among, other = bench.run(0, seed=1), bench.run(1, seed=1), bench.run(2, rank=7, seed=2)
    message = forward_backward("ppo", [8, 21], seed=1)
    single = result(bench.one(alone, message))
    shared = result(bench.all((other, forward_backward(lengths=[30, 2], seed=2)), (among, message))[1])
    for left, right in zip(single[0], shared[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert single[1] == pytest.approx(shared[1], rel=1e-5)
    assert_near(alone.gradient, among.gradient)


def test_the_same_alone_gives_the_same_bits_twice(bench):
    first, second = bench.run(0, seed=1), bench.run(1, seed=1)
    for run in (first, second):
        bench.one(run, forward_backward(lengths=[40, 60, 80], seed=1))
        bench.one(run, OptimStep())
        bench.one(run, forward_backward("ppo", [33], seed=2))
    assert bits(first) == bits(second)


def test_gradients_add_up_over_calls_and_a_split_call_trains_as_the_whole(bench):
    whole, split = bench.run(0, seed=1), bench.run(1, seed=1)
    message = forward_backward(lengths=[10, 50, 31, 8], seed=1)
    bench.one(whole, message)
    for datum in message.data:
        bench.one(split, replace(message, data=(datum,)))
    assert_near(whole.gradient, split.gradient)


def test_the_gradient_scales_with_weights_and_repetition(bench):
    once, twice, doubled = (bench.run(n, seed=1) for n in range(3))
    message = forward_backward(lengths=[9], seed=1)
    heavy = {**message.data[0].inputs, "weights": message.data[0].inputs["weights"] * 2}
    bench.one(once, message)
    bench.one(twice, replace(message, data=message.data * 2))
    bench.one(doubled, replace(message, data=(replace(message.data[0], inputs=heavy),)))
    expected = [2 * gradient for gradient in once.gradient]
    assert_near(twice.gradient, expected)
    assert_near(doubled.gradient, expected)


def test_a_forward_leaves_no_trace_and_gives_the_same_logprobs(bench):
    run, other = bench.run(0, seed=1), bench.run(1, seed=2)
    bench.one(run, forward_backward(seed=3))
    random_state, before = torch.get_rng_state(), bits(run)
    message = forward_backward(lengths=[14, 25], seed=1)
    with_trace = result(bench.one(bench.run(2, seed=1), message))
    torch.set_rng_state(random_state)
    without = result(bench.one(run, forward_backward(lengths=[14, 25], seed=1, forward=True)))
    bench.all((run, forward_backward(seed=1, forward=True)), (other, forward_backward(seed=2)))
    assert bits(run) == before
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in run.weights().parameters())
    for left, right in zip(without[0], with_trace[0], strict=True):
        assert left.tobytes() == right.tobytes()


def test_logprobs_are_of_the_weights_before_the_step(bench):
    run = bench.run(0, seed=1)
    message = forward_backward(seed=1)
    first = bench.one(run, message)
    bench.one(run, OptimStep(learning_rate=0.1))
    later = bench.one(run, replace(message))
    assert result(first)[1]["loss:sum"] != result(later)[1]["loss:sum"]


def poisoned(loss_fn: str = "importance_sampling", lengths=(6, 8)) -> ForwardBackward:
    """A message whose ratio overflows at data[1], position 3."""
    message = forward_backward(loss_fn, list(lengths), seed=9)
    sampled = message.data[1].inputs["logprobs"].copy()
    advantages = message.data[1].inputs["advantages"].copy()
    sampled[3], advantages[3] = -1000.0, -1.0
    bad = replace(message.data[1], inputs={**message.data[1].inputs, "logprobs": sampled, "advantages": advantages})
    return replace(message, data=(message.data[0], bad))


def test_a_non_finite_loss_fails_its_operation_alone_and_names_the_value(bench):
    a, b, alone = bench.run(0, seed=1), bench.run(1, seed=2), bench.run(2, seed=2)
    message = forward_backward(lengths=[12, 5], seed=1)
    fine, bad, other = bench.all((a, forward_backward(seed=4)), (a, poisoned()), (b, message))
    assert bad.category == "user"
    assert "loss is not finite (inf)" in bad.error and "data[1], position 3" in bad.error and "-1000.0" in bad.error
    assert result(fine) and a.gradient is None and a.void
    expected = result(bench.one(alone, message))
    for left, right in zip(result(other)[0], expected[0], strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5, atol=1e-5)
    assert_near(b.gradient, alone.gradient)


def test_weights_that_are_nan_fail_their_own_run_only(bench):
    a, b, alone = bench.run(0, seed=1), bench.run(1, seed=2), bench.run(2, seed=2)
    with torch.no_grad():
        a.weights().weights["model.layers.0.mlp.down_proj"][1].fill_(math.nan)
    message = forward_backward(lengths=[12, 5], seed=1)
    for kind in (False, True):
        bad, other = bench.all((a, forward_backward(seed=4, forward=kind)), (b, message))
        assert "log-probability is not finite (nan)" in bad.error and bad.category == "user"
        assert result(other)
    bench.all((alone, message), (alone, message))
    assert_near(b.gradient, alone.gradient)


def exploding() -> ForwardBackward:
    """A message whose loss is finite in float32, but not its gradient."""
    message = forward_backward(lengths=[6], seed=9)
    weights = np.full(6, 1e37, np.float32)
    return replace(message, data=(replace(message.data[0], inputs={**message.data[0].inputs, "weights": weights}),))


def test_a_non_finite_gradient_fails_only_the_operation_that_made_it(bench):
    a, b = bench.run(0, seed=1, warm=False), bench.run(1, seed=2)
    with torch.no_grad():
        for factor_a, _ in a.weights().weights.values():
            factor_a.mul_(100)
    fine, bad, also_fine, other = bench.all(
        (a, forward_backward(seed=4)), (a, exploding()), (a, forward_backward(seed=5)), (b, forward_backward(seed=6))
    )
    assert "gradient is not finite" in bad.error and bad.category == "user"
    assert result(fine) and result(also_fine) and result(other)
    assert a.gradient is None and a.void and b.gradient is not None and not b.void


def test_after_a_failure_the_next_step_fails_and_says_so_and_the_run_goes_on(bench):
    run, clean = bench.run(0, seed=1), bench.run(1, seed=1)
    bench.one(run, forward_backward(seed=1))
    failure = bench.work(run, poisoned())
    [outcome] = bench.device.execute([failure])
    assert outcome.error
    assert result(bench.one(run, forward_backward(seed=2)))
    before = bits(run)[:-1]
    step = bench.one(run, OptimStep())
    assert step.category == "user" and f"operation {failure.seq_id}" in step.error and "void" in step.error
    assert bits(run)[:-1] == before
    assert "nothing was accumulated" in bench.one(run, OptimStep()).error
    for one in (run, clean):
        bench.one(one, forward_backward(seed=3))
        assert bench.one(one, OptimStep()).error is None
    assert bits(run) == bits(clean)


def test_a_failed_forward_voids_nothing(bench):
    run = bench.run(0, seed=1)
    bench.one(run, forward_backward(seed=1))
    message = poisoned()
    forward = forward_backward("importance_sampling", forward=True)
    assert bench.one(run, replace(forward, data=message.data)).error
    assert bench.one(run, OptimStep()).error is None


def test_a_step_clears_the_gradient_and_reports_plain_finite_floats(bench):
    run = bench.run(0, seed=1)
    bench.one(run, forward_backward(seed=1))
    answer = json.loads(bench.one(run, OptimStep(learning_rate=0.01)).result)
    assert answer["type"] == "optim_step"
    assert answer["metrics"]["grad_norm"] > 0 and answer["metrics"]["step"] == 1
    assert all(isinstance(value, float) and math.isfinite(value) for value in answer["metrics"].values())
    assert run.gradient is None


def test_zero_weights_give_an_ordinary_step_that_decays(bench):
    run = bench.run(0, seed=1)
    message = forward_backward(lengths=[5], seed=1)
    inputs = {**message.data[0].inputs, "weights": np.zeros(5, np.float32)}
    before = [parameter.detach().clone() for parameter in run.weights().parameters()]
    bench.one(run, replace(message, data=(replace(message.data[0], inputs=inputs),)))
    outcome = bench.one(run, OptimStep(learning_rate=0.1, weight_decay=1.0))
    assert json.loads(outcome.result)["metrics"]["grad_norm"] == 0.0
    for now, then in zip(run.weights().parameters(), before, strict=True):
        torch.testing.assert_close(now.detach(), then * 0.9)


def test_an_operation_that_breaks_the_device_is_found_and_fails_alone(bench, caplog):
    a, b = bench.run(0, seed=1), bench.run(1, seed=2)
    message = forward_backward(lengths=[5], seed=1)
    broken = replace(message, data=(replace(message.data[0], tokens=np.full(5, 10**6, np.int32)),))
    outcomes = bench.all((a, broken), (b, forward_backward(seed=2)), (b, forward_backward(seed=3)))
    assert outcomes[0].category == "server" and "error id" in outcomes[0].error
    assert "Traceback" not in outcomes[0].error and "index" not in outcomes[0].error
    assert result(outcomes[1]) and result(outcomes[2])
    assert a.void and not b.void and b.gradient is not None
    assert outcomes[0].error.split("error id ")[1][:8] in caplog.text


def test_after_a_create_that_failed_every_operation_says_so(bench):
    run = bench.run(0, warm=False)
    run.trained, run.failure = None, "rank 0 trains nothing"
    other = bench.run(1)
    outcomes = bench.all((run, forward_backward()), (run, OptimStep()), (other, forward_backward()))
    assert all("rank 0 trains nothing" in outcome.error and outcome.category == "user" for outcome in outcomes[:2])
    assert result(outcomes[2])


def test_a_new_run_computes_what_the_base_computes_and_the_same_seed_gives_the_same_bits(bench):
    first, second, third = (bench.run(n, seed=seed, warm=False) for n, seed in enumerate([5, 5, 6]))
    assert bits(first) == bits(second) != bits(third)
    one, two = result(bench.one(first, forward_backward(seed=1))), result(bench.one(third, forward_backward(seed=1)))
    np.testing.assert_array_equal(one[0][0], two[0][0])


def test_what_was_refused_before_a_pass_has_no_part_in_what_the_pass_cost(bench):
    served, refused = bench.run(0), bench.run(1)
    refused.trained, refused.failure = None, "rank 0 trains nothing"
    no, yes = bench.all((refused, forward_backward(lengths=[60])), (served, forward_backward(lengths=[40])))
    assert no.error and output_to_json(yes.result)["metrics"]["pass_tokens:max"] == 40
