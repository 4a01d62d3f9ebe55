"""The losses against their formulas, values and gradients, and at the edges of float32."""

import math

import pytest
import torch

from openrl.tasks.losses import LOSSES as SERVED
from openrl.workers.trainer.losses import LOSSES, Loss, compute, merge
from tests import plain

CLIPPED = ["ppo", "cispo", "gspo"]
RATIO = [name for name in SERVED if name != "cross_entropy"]
LENGTHS = [7, 12, 1]


def tensors(count: int = sum(LENGTHS), *, seed: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    logprobs = -torch.rand(count, generator=draw) * 3
    inputs = {
        "logprobs": logprobs + torch.randn(count, generator=draw) * 0.5,
        "advantages": torch.randn(count, generator=draw),
        "weights": torch.randn(count, generator=draw),
        "sequence_ratio_mask": (torch.rand(count, generator=draw) > 0.3).float(),
    }
    inputs["sequence_ratio_mask"][-1] = 1.0
    return logprobs.requires_grad_(), inputs


def one(name: str, lp: float, q: float, advantage: float, **config: float) -> tuple[Loss, torch.Tensor]:
    """The loss of one token, and its log-probability."""
    logprobs = torch.tensor([lp], requires_grad=True)
    inputs = {"logprobs": torch.tensor([q]), "advantages": torch.tensor([advantage])}
    inputs["sequence_ratio_mask"] = torch.ones(1)
    return compute(name, logprobs, inputs, config, [1]), logprobs


def gradient(loss: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, logprobs)[0]


@pytest.mark.parametrize(
    ("name", "config"),
    [(name, {}) for name in SERVED]
    + [(name, {"clip_low_threshold": 0.97, "clip_high_threshold": 1.01}) for name in CLIPPED]
    + [
        ("cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
        ("dro", {"beta": 0.7}),
        ("dro", {"beta": 0}),
    ],
)
def test_every_loss_is_its_formula_in_value_and_gradient(name, config):
    logprobs, inputs = tensors()
    loss = compute(name, logprobs, inputs, config, LENGTHS)
    parts = [{key: value.split(LENGTHS)[n] for key, value in inputs.items()} for n in range(len(LENGTHS))]
    expected = sum(
        plain.loss(name, part, its, **config) for part, its in zip(logprobs.split(LENGTHS), parts, strict=True)
    )
    assert loss.total.item() == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(gradient(loss.total, logprobs), gradient(expected, logprobs), rtol=1e-5, atol=1e-6)


def test_cross_entropy_takes_weights_of_any_sign_and_k_targets_a_position():
    logprobs = (-torch.rand(5, 3)).requires_grad_()
    weights = torch.randn(5, 3)
    total = compute("cross_entropy", logprobs, {"weights": weights}, {}, [5]).total
    assert total.item() == pytest.approx(-(logprobs * weights).sum().item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient(total, logprobs), -weights)


def test_cross_entropy_without_weights_counts_every_token_once():
    logprobs, _ = tensors()
    loss = compute("cross_entropy", logprobs, {}, {}, LENGTHS)
    assert loss.total.item() == pytest.approx(-logprobs.sum().item())
    assert loss.numbers()["active_tokens:sum"] == len(logprobs)


def test_importance_sampling_sees_a_shift_of_one_logprob_as_that_ratio():
    loss, logprobs = one("importance_sampling", -1.0, -0.5, 1.0)
    assert gradient(loss.total, logprobs).item() == pytest.approx(-math.exp(-0.5), rel=1e-6)


def test_cispo_keeps_a_gradient_where_ppo_has_none():
    for name, expected in (("ppo", 0.0), ("cispo", -1.2)):
        loss, logprobs = one(name, -1.0, -2.0, 1.0)
        assert gradient(loss.total, logprobs).item() == pytest.approx(expected)
        assert loss.numbers()["clipped_tokens:sum"] == 1


def test_the_penalty_of_dro_counts_also_where_the_advantage_is_zero():
    loss, logprobs = one("dro", -1.0, -3.0, 0.0)
    assert loss.total.item() == pytest.approx(0.5 * 0.05 * 4)
    assert gradient(loss.total, logprobs).item() == pytest.approx(0.05 * 2)
    assert loss.numbers()["active_tokens:sum"] == 1


def test_a_sequence_of_gspo_has_the_geometric_mean_of_its_own_masked_tokens():
    logprobs = torch.tensor([-1.0, -2.0, -9.0, -4.0])
    inputs = {
        "logprobs": torch.tensor([-1.1, -1.8, 0.0, -4.5]),
        "advantages": torch.tensor([1.0, 0.0, 0.0, 1.0]),
        "sequence_ratio_mask": torch.tensor([1.0, -3.0, 0.0, 1.0]),
    }
    loss = compute("gspo", logprobs, inputs, {"clip_high_threshold": 9.0}, [3, 1])
    assert (-loss.per_token).tolist() == pytest.approx([math.exp(-0.05), 0, 0, math.exp(0.5)], rel=1e-6)


@pytest.mark.parametrize("name", ["ppo", "cispo", "gspo"])
def test_a_ratio_beyond_float32_is_clipped_to_its_bound(name):
    loss, logprobs = one(name, -1.0, -500.0, 2.0)
    expected = 1.2 if name == "cispo" else -1.2
    assert loss.total.item() == pytest.approx(2 * expected)
    assert gradient(loss.total, logprobs).item() == pytest.approx(-2.4 if name == "cispo" else 0.0)
    assert all(math.isfinite(value) for value in loss.numbers().values())


@pytest.mark.parametrize(("name", "advantage"), [("importance_sampling", 2.0), ("ppo", -2.0), ("gspo", -2.0)])
def test_a_ratio_that_overflows_and_counts_makes_the_loss_infinite_rather_than_zero(name, advantage):
    loss, _ = one(name, -1.0, -500.0, advantage)
    assert math.isinf(loss.total.item())


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_masked_position_adds_nothing_whatever_its_ratio(name):
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    inputs = {"logprobs": torch.tensor([-500.0, -2.0]), "advantages": torch.tensor([0.0, 1.0])}
    inputs["sequence_ratio_mask"] = inputs["advantages"]
    loss = compute(name, logprobs, inputs, {}, [2])
    assert loss.per_token[0].item() == 0.0
    assert gradient(loss.total, logprobs).tolist() == [0.0, -1.0]
    numbers = loss.numbers()
    assert numbers["tokens:sum"] == 2 and numbers["active_tokens:sum"] == 1
    assert numbers["ratio:min"] == numbers["ratio:max"] == 1.0


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_batch_without_any_counted_token_has_finite_metrics_and_no_gradient(name):
    logprobs, zeros = torch.full((3,), -1.0, requires_grad=True), torch.zeros(3)
    inputs = {"logprobs": zeros, "advantages": zeros, "sequence_ratio_mask": zeros}
    loss = compute(name, logprobs, inputs, {}, [2, 1])
    numbers = loss.numbers()
    assert numbers["ratio:min"] == numbers["ratio:max"] == 1.0
    assert numbers["ratio:sum"] == numbers["kl:sum"] == numbers["active_tokens:sum"] == 0.0
    assert gradient(loss.total, logprobs).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("name", RATIO)
def test_the_metrics_of_a_ratio_loss_are_sums_and_extremes_over_the_tokens_that_count(name):
    logprobs, inputs = tensors()
    inputs["advantages"][:4] = 0.0
    numbers = compute(name, logprobs, inputs, {}, LENGTHS).numbers()
    counted = slice(0 if name == "dro" else 4, None)
    log_ratio = (logprobs.detach() - inputs["logprobs"])[counted].double()
    assert numbers["active_tokens:sum"] == len(log_ratio)
    assert numbers["kl:sum"] == pytest.approx(-log_ratio.sum().item(), rel=1e-5)
    if name != "gspo":
        assert numbers["ratio:sum"] == pytest.approx(log_ratio.exp().sum().item(), rel=1e-5)
        assert numbers["ratio:min"] == pytest.approx(min(1, log_ratio.exp().min().item()), rel=1e-5)
        assert numbers["ratio:max"] == pytest.approx(max(1, log_ratio.exp().max().item()), rel=1e-5)


@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_clipped_tokens_are_those_without_a_gradient(name):
    logprobs, inputs = tensors(200)
    config = {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}
    loss = compute(name, logprobs, inputs, config, [50, 150])
    stopped = gradient(loss.total, logprobs) == 0
    assert loss.numbers()["clipped_tokens:sum"] == int(stopped.sum()) > 0


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_the_pieces_of_a_batch_add_up_to_the_whole(name):
    logprobs, inputs = tensors()
    whole, metrics = compute(name, logprobs, inputs, {}, LENGTHS).numbers(), {}
    for n, length in enumerate(LENGTHS):
        part = {key: value.split(LENGTHS)[n] for key, value in inputs.items()}
        merge(metrics, compute(name, logprobs.split(LENGTHS)[n], part, {}, [length]).numbers())
    assert metrics == pytest.approx(whole, rel=1e-12)
    assert all(key.rpartition(":")[2] in {"sum", "min", "max"} and key.count(":") == 1 for key in metrics)


def test_every_loss_that_is_served_is_computed_here():
    assert set(LOSSES) == set(SERVED) == set(plain.LOSSES)
