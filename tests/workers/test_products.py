"""Products with frozen weights: what torch gives, whatever the rows beside a row are."""

import pytest
import torch

from openrl.workers.model import products
from openrl.workers.model.products import added, product


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def library(request, monkeypatch):
    monkeypatch.setattr(products, "works", lambda: request.param)


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def near(found, expected):
    return torch.linalg.vector_norm(found - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
@pytest.mark.parametrize("biased", [False, True])
def test_what_comes_out_is_x_w_and_bias(library, rows, biased):
    x, weight, bias, to = drawn(rows, 48), drawn(33, 48), drawn(33) if biased else None, drawn(rows, 33)
    expected = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    assert near(product(x, weight, bias).double(), expected)
    assert near(added(to, x, weight, bias).double(), expected + to)


def test_a_weight_may_be_turned_and_rows_may_be_parts_of_longer_ones(library):
    wide, weight = drawn(9, 100), drawn(33, 48)
    x, dy = wide[:, 20:68], wide[:, :33]
    assert near(product(x, weight), x.contiguous() @ weight.t())
    assert near(product(dy, weight.t()), dy.contiguous() @ weight)
    assert near(added(x, dy, weight.t()), x + dy.contiguous() @ weight)


def test_what_is_added_to_stays_as_it_is(library):
    to = drawn(5, 33)
    before = to.clone()
    added(to, drawn(5, 48), drawn(33, 48), drawn(33))
    assert torch.equal(to, before)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 768), (768, 256), (65, 33), (576, 1536)])
def test_a_row_has_the_same_bits_beside_any_others(inputs, outputs, turned):
    x, weight = drawn(300, inputs), drawn(inputs, outputs).t() if turned else drawn(outputs, inputs)
    whole = product(x, weight)
    assert all(torch.equal(product(x[:rows], weight), whole[:rows]) for rows in (2, 3, 31, 32, 96, 224))
    x[7] = float("nan")
    others = torch.arange(300) != 7
    assert torch.equal(product(x, weight)[others], whole[others])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_torchs(dtype):
    x, weight = drawn(4, 8).to(dtype), drawn(6, 8).to(dtype)
    assert torch.equal(product(x, weight), torch.mm(x, weight.t()))
    assert product(x, weight).dtype is dtype
