"""Norms and heads as compiled loops, against torch's calls and autograd."""

import pytest
import torch

from openrl.workers.model import compiled, norms, rows
from openrl.workers.model.rotary import Rotations
from openrl.workers.model.rows import HeadNorms

EPS = 1e-5
SIZE = 16


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def near(found, expected):
    return torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


def rotation(num):
    def angles(_like, positions):
        turns = positions[0, :, None] * torch.arange(1, SIZE // 2 + 1) * 0.37
        both = torch.cat([turns, turns], 1)
        return both.cos()[None], both.sin()[None]

    return Rotations(angles, SIZE).at(torch.arange(num) % 5, torch.zeros(1))


def turned_plainly(heads, by):
    first, second = heads.chunk(2, -1)
    return torch.cat([first, second], -1) * by.cos + torch.cat([second * by.of_first, first * by.of_second], -1)


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def way(request, monkeypatch):
    monkeypatch.setattr(compiled, "HERE", request.param)


@pytest.mark.parametrize("size", [1, 7, 64, 576])
def test_a_norm_and_its_gradient_are_autograds(way, size):
    x, weight, dy, beside = drawn(1, 9, size), drawn(2, size), drawn(3, 9, size), drawn(4, 9, size)
    of = rows.normed(x, weight, EPS)
    wide = x.double().requires_grad_()
    expected = weight.double() * wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt()
    (gradient,) = torch.autograd.grad(expected, wide, dy.double())
    assert near(of.y, expected) and near(of.normal * weight, expected)
    assert near(rows.norm_gradient(dy, of, weight, beside), gradient + beside)


@pytest.mark.parametrize("normed_by", [HeadNorms(drawn(5, SIZE), drawn(6, SIZE), EPS), None], ids=["norms", "none"])
def test_heads_and_their_gradients_are_autograds(way, normed_by):
    num, num_q, num_k = 11, 4, 2
    q, k = drawn(1, num, num_q * SIZE), drawn(2, num, num_k * SIZE)
    dq, dk = drawn(3, num_q, num, SIZE).transpose(0, 1), drawn(4, num, num_k, SIZE)  # heads may come in another order
    turned = rotation(num)
    of = rows.heads(q, k, turned, normed_by)
    ends = [one.clone().requires_grad_() for one in (q, k)]
    weights = (None, None) if normed_by is None else normed_by[:2]
    for found, end, upstream, weight, gradient in zip(
        of[:2], ends, (dq, dk), weights, rows.heads_gradient(dq, dk, of, turned, normed_by), strict=True
    ):
        heads = end.view(num, -1, SIZE)
        normed = heads if weight is None else weight * heads * (heads.square().mean(-1, keepdim=True) + EPS).rsqrt()
        expected = turned_plainly(normed, turned)
        assert found.shape == upstream.shape and near(found, expected)
        assert near(gradient, torch.autograd.grad(expected, end, upstream)[0])


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0, 1e4, 1e30])
def test_the_gate_and_its_gradient_are_autograds(way, spread):
    gate, up, dout = spread * drawn(1, 9, 70), drawn(2, 9, 70), drawn(3, 9, 70)
    ends = [one.double().requires_grad_() for one in (gate, up)]
    expected = torch.nn.functional.silu(ends[0]) * ends[1]
    assert near(rows.gated(gate, up), expected)
    assert not rows.gated(torch.full((1, 70), -1e38), up[:1]).any()
    wide = torch.cat([gate, up], 1)
    assert near(rows.gated(*wide.chunk(2, 1)), expected)
    gradients = torch.autograd.grad(expected, ends, dout.double())
    assert all(map(near, rows.gated_gradient(dout, gate, up), gradients))


@pytest.mark.parametrize("normed_by", [HeadNorms(drawn(5, SIZE), drawn(6, SIZE), EPS), None], ids=["norms", "none"])
def test_without_a_gradient_the_values_are_the_same(normed_by):
    num, num_q, num_k = 11, 4, 2
    q, k, v = drawn(1, num, num_q * SIZE), drawn(2, num, num_k * SIZE), drawn(3, num, num_k * SIZE)
    turned = rotation(num)
    of = rows.heads(q, k, turned, normed_by)
    together = torch.cat([q, k, v], 1)[:, : (num_q + num_k) * SIZE].unflatten(1, (-1, SIZE))
    out = torch.empty(num, num_q + num_k, SIZE)
    rows.heads_into(out, together, num_q, turned, normed_by)
    assert near(out, torch.cat([of.q, of.k], 1))
    x, weight = drawn(4, 9, 70), drawn(5, 64)
    y = rows.norm_into(torch.empty(9, 64), x[:, :64], weight, EPS)
    assert near(y, rows.normed(x[:, :64], weight, EPS).y)


def test_a_nan_stays_in_its_row():
    x, weight = drawn(1, 5, 64), drawn(2, 64)
    whole = rows.normed(x, weight, EPS).y
    x[2, 7] = float("nan")
    others = torch.arange(5) != 2
    of = rows.normed(x, weight, EPS)
    assert of.y[2].isnan().all() and torch.equal(of.y[others], whole[others])
    dx = rows.norm_gradient(x, of, weight, torch.zeros_like(x))
    assert dx[2].isnan().all() and dx[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_torchs(dtype):
    x, weight = drawn(1, 5, 64).to(dtype), drawn(2, 64).to(dtype)
    of = rows.normed(x, weight, EPS)
    normal, _ = norms.normalized(x, EPS)
    assert torch.equal(of.y, weight * normal) and of.y.dtype is dtype
