"""The losses against their formulas, values and gradients, and at the edges of float32."""

import math

import pytest
import torch

from openrl.tasks.losses import LOSSES as SERVED
from openrl.workers.trainer.losses import LOSSES, cross_entropy, importance_sampling, merge, ppo


def tensors(count: int = 12, *, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=draw) * 3
    inputs = {
        "logprobs": logprobs + torch.randn(count, generator=draw) * 0.5,
        "advantages": torch.randn(count, generator=draw),
        "weights": torch.randn(count, generator=draw),
    }
    return logprobs.requires_grad_(), inputs


def gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logprobs)[0]


def test_cross_entropy_is_the_weighted_token_sum_for_weights_of_any_sign():
    logprobs, inputs = tensors()
    loss = cross_entropy(logprobs, inputs, {})
    assert loss.total.item() == pytest.approx(-(logprobs.detach() * inputs["weights"]).double().sum().item(), rel=1e-6)
    torch.testing.assert_close(gradient(loss.total, logprobs), -inputs["weights"])


def test_cross_entropy_without_weights_counts_every_token_once():
    logprobs, _ = tensors()
    assert cross_entropy(logprobs, {}, {}).total.item() == pytest.approx(-logprobs.sum().item())


def test_cross_entropy_takes_k_targets_a_position():
    logprobs = -torch.rand(5, 3)
    weights = torch.randn(5, 3)
    total = cross_entropy(logprobs, {"weights": weights}, {}).total
    assert total.item() == pytest.approx(-(logprobs * weights).sum().item(), rel=1e-6)


def test_importance_sampling_uses_the_callers_logprobs_and_neither_clips_nor_adds_kl():
    logprobs, inputs = tensors()
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    loss = importance_sampling(logprobs, inputs, {})
    assert loss.total.item() == pytest.approx(-(ratio * inputs["advantages"]).double().sum().item(), rel=1e-6)
    torch.testing.assert_close(gradient(loss.total, logprobs), -ratio * inputs["advantages"], rtol=1e-5, atol=1e-6)


def test_importance_sampling_sees_a_shift_of_one_logprob_as_that_ratio():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-0.5]), "advantages": torch.tensor([1.0])}
    loss = importance_sampling(logprobs, inputs, {})
    assert gradient(loss.total, logprobs).item() == pytest.approx(-math.exp(-0.5), rel=1e-6)


@pytest.mark.parametrize("config", [{}, {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}])
def test_ppo_is_the_minimum_of_the_plain_and_the_clipped_gain(config):
    logprobs, inputs = tensors(200)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    ratio = (logprobs.detach() - inputs["logprobs"]).exp().requires_grad_()
    dense = -torch.min(ratio * inputs["advantages"], ratio.clamp(low, high) * inputs["advantages"]).sum()
    loss = ppo(logprobs, inputs, config)
    assert loss.total.item() == pytest.approx(dense.item(), rel=1e-6)
    torch.testing.assert_close(
        gradient(loss.total, logprobs), torch.autograd.grad(dense, ratio)[0] * ratio.detach(), rtol=1e-5, atol=1e-6
    )
    outside = (ratio < low) & (inputs["advantages"] < 0) | (ratio > high) & (inputs["advantages"] > 0)
    assert loss.metrics["clipped_tokens:sum"] == int(outside.sum())


def test_ppo_clips_a_ratio_beyond_float32_to_its_bound_with_no_gradient():
    logprobs = torch.tensor([-1.0], requires_grad=True)
    loss = ppo(logprobs, {"logprobs": torch.tensor([-500.0]), "advantages": torch.tensor([2.0])}, {})
    assert loss.total.item() == pytest.approx(-2.4)
    assert gradient(loss.total, logprobs).item() == 0.0
    assert all(math.isfinite(value) for value in loss.metrics.values())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_a_ratio_that_overflows_and_counts_makes_the_loss_infinite_rather_than_zero(name):
    inputs = {"logprobs": torch.tensor([-500.0]), "advantages": torch.tensor([-2.0])}
    assert math.isinf(LOSSES[name](torch.tensor([-1.0]), inputs, {}).total.item())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo"])
def test_a_masked_position_adds_nothing_whatever_its_ratio(name):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-500.0, -2.0]), "advantages": torch.tensor([0.0, 1.0])}
    loss = LOSSES[name](logprobs, inputs, {})
    assert loss.total.item() == pytest.approx(-1.0)
    assert gradient(loss.total, logprobs).tolist() == [0.0, -1.0]
    assert loss.metrics["active_tokens:sum"] == 1
    assert loss.metrics["ratio:max"] == 1.0


def test_a_batch_without_any_counted_token_has_finite_metrics():
    zeros = torch.zeros(3)
    metrics = ppo(zeros - 1, {"logprobs": zeros, "advantages": zeros}, {}).metrics
    assert metrics["ratio:min"] == metrics["ratio:max"] == 1.0
    assert metrics["ratio:sum"] == metrics["kl:sum"] == 0.0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_pieces_of_a_batch_add_up_to_the_whole(name):
    logprobs, inputs = tensors(20)
    whole = LOSSES[name](logprobs, inputs, {})
    total, metrics = 0.0, {}
    for part in (slice(0, 3), slice(3, 11), slice(11, 20)):
        piece = LOSSES[name](logprobs[part], {key: value[part] for key, value in inputs.items()}, {})
        total += piece.total.item()
        merge(metrics, piece.metrics)
    assert total == pytest.approx(whole.total.item(), rel=1e-12)
    assert metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert all(key.rpartition(":")[2] in {"sum", "min", "max"} for key in metrics)


def test_every_loss_that_is_served_is_computed_here():
    assert set(LOSSES) == set(SERVED)
