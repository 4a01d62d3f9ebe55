"""Our AdamW step against torch's, and what it refuses."""

import math

import pytest
import torch

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import OptimStep
from openrl.workers.model import compiled
from openrl.workers.trainer import vectors
from openrl.workers.trainer.optimizer import Moments, adamw_step
from openrl.workers.trainer.vectors import laid_out

SHAPES = [(4, 6), (7, 4), (1, 3)]


def parameters(*, seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def exact_norm(tensors) -> float:
    return float(torch.cat([tensor.double().flatten() for tensor in tensors]).norm())


@pytest.fixture(params=["vectors", "tensors", "vectors, no numba"])
def arranged(request, monkeypatch):
    """How parameters lie: one behind another, where the step is a compiled loop, or anyhow."""
    if "numba" in request.param:
        monkeypatch.setattr(compiled, "HERE", False)
    return (lambda tensors: tensors) if request.param == "tensors" else laid_out


def test_many_steps_equal_torchs_adamw_with_changing_parameters_and_clipping(arranged):
    ours, moments = arranged(parameters()), Moments()
    theirs = [torch.nn.Parameter(tensor.clone(memory_format=torch.contiguous_format)) for tensor in ours]
    optimizer = torch.optim.AdamW(theirs, lr=1.0, betas=(0.5, 0.5), eps=1e-12, weight_decay=0.0)
    for step in range(1, 61):
        grads = parameters(seed=step)
        hyper = OptimStep(
            learning_rate=1e-2 / step, beta1=0.9 if step % 3 else 0.8, beta2=0.95 if step % 5 else 0.99,
            eps=1e-12 if step % 2 else 1e-8, weight_decay=0.1 * (step % 4), grad_clip_norm=0.0 if step % 2 else 0.7,
        )  # fmt: skip
        optimizer.param_groups[0].update(
            lr=hyper.learning_rate, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, weight_decay=hyper.weight_decay
        )
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
        if hyper.grad_clip_norm:
            for parameter in theirs:
                parameter.grad *= min(1.0, hyper.grad_clip_norm / norm)
        optimizer.step()
        metrics = adamw_step(ours, grads, moments, hyper)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["clipped"] == float(bool(hyper.grad_clip_norm))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-6, atol=1e-6)
    assert moments.step == 60


def test_the_defaults_are_tinkers():
    hyper = OptimStep()
    assert (hyper.learning_rate, hyper.beta1, hyper.beta2, hyper.eps) == (1e-4, 0.9, 0.95, 1e-12)
    assert (hyper.weight_decay, hyper.grad_clip_norm) == (0.0, 0.0)


def test_the_first_step_moves_every_parameter_by_the_learning_rate(arranged):
    params, before = arranged(parameters()), parameters()
    adamw_step(params, parameters(seed=1), Moments(), OptimStep(learning_rate=0.01))
    for now, then in zip(params, before, strict=True):
        torch.testing.assert_close((now - then).abs(), torch.full_like(now, 0.01), rtol=1e-4, atol=1e-6)


def test_clipping_is_global_and_the_reported_norm_is_the_one_before(arranged):
    params, moments = arranged(parameters()), Moments()
    grads = parameters(seed=1)
    metrics = adamw_step(params, grads, moments, OptimStep(grad_clip_norm=1e-9, beta1=0.0))
    assert metrics["grad_norm"] == pytest.approx(exact_norm(grads), rel=1e-7)
    assert exact_norm(moments.exp_avg) == pytest.approx(1e-9, rel=1e-6)
    for mean, grad in zip(moments.exp_avg, parameters(seed=1), strict=True):
        torch.testing.assert_close(mean / mean.norm(), grad / grad.norm())


def test_zero_gradients_are_an_ordinary_step_with_decay_and_momentum(arranged):
    params, moments = arranged(parameters()), Moments()
    zeros = [torch.zeros(shape) for shape in SHAPES]
    adamw_step(params, zeros, moments, OptimStep(learning_rate=0.1, weight_decay=1.0))
    for now, then in zip(params, parameters(), strict=True):
        torch.testing.assert_close(now, then * 0.9)
    adamw_step(params, parameters(seed=1), moments, OptimStep())
    before = [tensor.clone() for tensor in params]
    metrics = adamw_step(params, zeros, moments, OptimStep())
    assert metrics["grad_norm"] == 0.0
    assert all(bool((now != then).all()) for now, then in zip(params, before, strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_nothing_changes(arranged, value):
    params, moments = arranged(parameters()), Moments()
    adamw_step(params, parameters(seed=1), moments, OptimStep())
    before = copied(params, moments)
    grads = parameters(seed=2)
    grads[1][0, 0] = value
    with pytest.raises(InvalidRequest, match="not finite"):
        adamw_step(params, grads, moments, OptimStep())
    assert_same((params, moments.exp_avg, moments.exp_avg_sq, moments.step), before)


def test_a_step_that_would_leave_float32_is_refused_and_nothing_changes(arranged):
    params, moments = arranged(parameters()), Moments()
    before = copied(params, moments)
    with pytest.raises(InvalidRequest, match="learning_rate"):
        adamw_step(params, parameters(seed=1), moments, OptimStep(learning_rate=1e39))
    with pytest.raises(InvalidRequest, match="not finite"):
        adamw_step(params, [grad * 1e30 for grad in parameters(seed=1)], moments, OptimStep())
    assert_same((params, moments.exp_avg, moments.exp_avg_sq, moments.step), before)


def test_every_metric_is_a_plain_finite_float():
    metrics = adamw_step(parameters(), parameters(seed=1), Moments(), OptimStep(grad_clip_norm=0.1))
    assert set(metrics) == {"grad_norm", "clipped", "update_norm", "step", "learning_rate"}
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


def copied(params, moments):
    lists = (params, moments.exp_avg, moments.exp_avg_sq)
    return *([tensor.clone() for tensor in tensors] for tensors in lists), moments.step


def test_moments_that_were_read_from_files_go_on_as_those_in_memory_do(arranged):
    """In files B is as it is called, [O, R]; in a vector it lies turned."""
    ours, theirs = (arranged([torch.ones(9, 2), *parameters()]) for _ in range(2))
    moments, read = Moments(), Moments()
    for step in range(4):
        grads = [drawn * (step + 1) for drawn in [torch.arange(18.0).view(9, 2), *parameters(seed=step)]]
        adamw_step(ours, arranged(grads), moments, OptimStep(grad_clip_norm=3.0))
        adamw_step(theirs, grads, read, OptimStep(grad_clip_norm=3.0))
        for name in ("exp_avg", "exp_avg_sq"):
            again = [tensor.clone(memory_format=torch.contiguous_format) for tensor in getattr(read, name)]
            setattr(read, name, again)
    assert all(map(torch.equal, ours, theirs)) and all(map(torch.equal, moments.exp_avg_sq, read.exp_avg_sq))


def test_what_a_step_wrote_counts_as_changed():
    """Parking copies only what changed since it was copied last."""
    params, moments = laid_out(parameters()), Moments()
    adamw_step(params, parameters(seed=1), moments, OptimStep())
    lists = (params, moments.exp_avg, moments.exp_avg_sq)
    before = [[tensor._version for tensor in vectors.with_vector(each)] for each in lists]
    adamw_step(params, parameters(seed=2), moments, OptimStep())
    after = [
        [tensor._version for tensor in vectors.with_vector(each)]
        for each in (params, moments.exp_avg, moments.exp_avg_sq)
    ]
    assert all(was < now for old, new in zip(before, after, strict=True) for was, now in zip(old, new, strict=True))


def assert_same(now, before):
    for left, right in zip(now[:3], before[:3], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(left, right, strict=True))
    assert now[3] == before[3]
