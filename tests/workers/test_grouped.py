"""Grouped products of a pass's adapters: what the loop computes, forward and backward, and nobody's NaN spreads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from openrl.workers.model import grouped, loading
from openrl.workers.model.lora import Segment, adapted
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.weights.adapter import Adapter
from tests.tiny import make_tiny_model
from tests.workers.test_recomputing import trained

TOKENS, INPUTS, OUTPUTS = 48, 24, 40
RANKS = (1, 4, 9, 64)
# An adapter with two segments, base alone between, before and behind; a segment of one token.
CUTS = ((2, 9, 0), (9, 10, 1), (14, 30, 2), (30, 37, 3), (37, 45, 0))


@pytest.fixture(autouse=True)
def _way() -> Iterator[None]:
    yield
    grouped.choose("auto")


def adapters() -> list[Adapter]:
    draw = torch.Generator().manual_seed(1)
    return [
        Adapter(
            rank=rank,
            weights={
                "m": (
                    torch.randn(rank, INPUTS, generator=draw).requires_grad_(),
                    torch.randn(OUTPUTS, rank, generator=draw).requires_grad_(),
                )
            },
        )
        for rank in RANKS
    ]


def computed(way: str, dtype: torch.dtype, *, poison: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the input, gradients of the factors."""
    draw = torch.Generator().manual_seed(2)
    x_TI = torch.randn(TOKENS, INPUTS, generator=draw).to(dtype)
    weight_OI, bias_O = torch.randn(OUTPUTS, INPUTS, generator=draw).to(dtype), torch.zeros(OUTPUTS, dtype=dtype)
    upstream_TO = torch.randn(TOKENS, OUTPUTS, generator=draw).to(dtype)
    if poison:
        x_TI[30:37] = torch.nan
    x_TI.requires_grad_()
    owners = adapters()
    segments = [Segment(start, stop, owners[owner]) for start, stop, owner in CUTS]
    grouped.choose(way)
    y_TO = adapted("m", x_TI, weight_OI, bias_O, segments)
    assert not alive(), "padded factors lie in memory between forward and backward"
    y_TO.backward(upstream_TO)
    assert x_TI.grad is not None
    with torch.no_grad():
        again_TO = adapted("m", x_TI, weight_OI, bias_O, segments)
    assert torch.equal(again_TO.nan_to_num(7), y_TO.detach().nan_to_num(7))
    return y_TO.detach(), x_TI.grad, [tensor.grad for owner in owners for tensor in owner.parameters()]


def alive() -> list[grouped.Groups]:
    return [one for one in gc.get_objects() if type(one) is grouped.Groups]


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_grouped_products_are_what_the_loop_computes(dtype, bound):
    for ours, plain in zip(computed("on", dtype), computed("off", dtype), strict=True):
        pairs = zip(ours, plain, strict=True) if isinstance(ours, list) else [(ours, plain)]
        for one, other in pairs:
            assert one.dtype == other.dtype and one.shape == other.shape
            assert apart(one, other) < bound


def test_a_nan_of_one_segment_leaves_the_others_the_bits_they_have_beside_it_whole():
    whole, damaged = computed("on", torch.float32), computed("on", torch.float32, poison=True)
    mine = torch.ones(TOKENS, dtype=torch.bool)
    mine[30:37] = False
    assert torch.equal(whole[0][mine], damaged[0][mine]) and torch.equal(whole[1][mine], damaged[1][mine])
    assert damaged[0][~mine].isnan().all()
    assert all(map(torch.equal, whole[2][:6], damaged[2][:6])), "another adapter's gradient has changed"
    assert all(gradient.isnan().any() for gradient in damaged[2][6:])


def test_products_are_grouped_by_themselves_on_an_accelerator_only():
    x_TI = torch.zeros(4, INPUTS)
    assert not grouped.serves(x_TI, OUTPUTS, 8)
    grouped.choose("on")
    assert grouped.serves(x_TI, OUTPUTS, 8) and not grouped.serves(x_TI, OUTPUTS, 1)
    grouped.choose("off")
    assert not grouped.serves(x_TI, OUTPUTS, 8)


def test_what_an_accelerator_can_not_group_is_not_grouped_by_a_setting_either():
    grouped.choose("on")
    x_TI = torch.zeros(4, INPUTS, dtype=torch.bfloat16)
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.float32, shape=x_TI.shape)
    assert not grouped.serves(on_gpu, OUTPUTS, 8)
    assert not grouped.serves(x_TI, OUTPUTS + 1, 8) and not grouped.serves(x_TI[:, 1:], OUTPUTS, 8)


def test_ranks_that_are_too_far_apart_are_not_padded_to_the_largest():
    grouped.choose("on")
    x_TI = torch.zeros(4, INPUTS, dtype=torch.bfloat16)
    assert not grouped.serves(x_TI, OUTPUTS, 8, [256] + 7 * [4])
    for ranks in ([1] * 8, [1, 2, 4, 8, 8, 16, 32, 64], [256] * 8, [256, 4]):
        assert grouped.serves(x_TI, OUTPUTS, len(ranks), ranks), ranks


def test_layers_that_are_computed_again_group_to_the_same_bits(tmp_path):
    torch.set_num_threads(1)
    loaded = loading.load(make_tiny_model(tmp_path / "model"), device="cpu", dtype=torch.bfloat16)
    grouped.choose("on")
    again, kept = (trained(loaded, tmp_path, Recomputing(loaded, way)) for way in ("on", "off"))
    assert again == kept
