"""The norm of ours is transformers' in values, and autograd's in gradients."""

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from openrl.workers.model.norms import RootMeanSquareNorm, install


@pytest.mark.parametrize("shape", [(1, 37, 24), (1, 9, 4, 16), (1, 24)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_values_and_gradients_equal_the_stock_norm(shape, dtype, bound):
    model, stock = both(shape[-1], dtype)
    x = (3 * torch.randn(shape)).to(dtype).requires_grad_(True)
    upstream = torch.randn(shape).to(dtype)

    ours, theirs = model[0](x), stock(x)

    assert isinstance(model[0], RootMeanSquareNorm) and ours.dtype == dtype
    assert distance(ours, theirs) < bound
    (mine,), (expected,) = (torch.autograd.grad(y, x, upstream) for y in (ours, theirs))
    assert mine.dtype == dtype and distance(mine, expected) < bound


def test_with_and_without_gradients_the_bits_are_the_same():
    model, _ = both(64, torch.float32)
    x = torch.randn(5, 64, requires_grad=True)
    with torch.no_grad():
        silent = model[0](x)
    assert torch.equal(model[0](x), silent)


def test_a_nan_or_an_overflow_stays_in_its_row():
    model, _ = both(16, torch.float32)
    x = torch.randn(4, 16)
    x[0, 3], x[1, 3] = float("nan"), 1e30
    x.requires_grad_(True)
    y = model[0](x)
    (gradient,) = torch.autograd.grad(y[2:].sum(), x)
    assert y[0].isnan().all() and y[2:].isfinite().all()
    assert gradient[2:].isfinite().all()


def test_a_norm_that_is_computed_otherwise_stays_as_it_is():
    model = nn.Sequential(Gemma3RMSNorm(16))
    install(model)
    assert isinstance(model[0], Gemma3RMSNorm)


def both(size, dtype):
    torch.manual_seed(0)
    stock = LlamaRMSNorm(size, eps=1e-5).requires_grad_(False).to(dtype)
    stock.weight.copy_(torch.rand(size))
    model = nn.Sequential(stock)
    install(model)
    return model, stock


def distance(mine, expected):
    return float((mine.detach().float() - expected.detach().float()).norm() / expected.detach().float().norm())
