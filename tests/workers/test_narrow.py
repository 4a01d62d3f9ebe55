"""The adapters' compiled products, against float64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.workers.model import compiled, lora, narrow
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.narrow import Sheet
from openrl.workers.model.segments import Segment, joined
from openrl.workers.trainer import vectors
from openrl.workers.weights.adapter import Adapter

RANKS = (1, 2, 3, 4, 8, 13, 64)


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(ranks, rows, inputs, outputs, *, gap=1, long=True):
    """Segments with tokens of nobody around them, and all that a forward and a backward take."""
    spans, at = [], gap
    for rank in ranks:
        spans.append((at, at + rows, 32 / rank))
        at += rows + gap
    x, y, dy, dx = (drawn(seed, at, size) for seed, size in enumerate((inputs, outputs, outputs, inputs)))
    factors = []
    for rank in ranks:
        b = drawn(rank + 50, rank, outputs).t()
        factors += [drawn(rank, rank, inputs), b if long else b.contiguous()]
    return tuple(spans), x, y, dy, dx, factors


def in_float64(spans, x, y, dy, dx, factors):
    x, y, dy, dx, *factors = (tensor.double().clone() for tensor in (x, y, dy, dx, *factors))
    gradients = []
    for (start, stop, scale), a, b in zip(spans, factors[::2], factors[1::2], strict=True):
        x_S, dy_S = x[start:stop], dy[start:stop]
        y[start:stop] += scale * x_S @ a.t() @ b.t()
        dx[start:stop] += scale * dy_S @ b @ a
        gradients += [scale * (dy_S @ b).t() @ x_S, scale * dy_S.t() @ (x_S @ a.t())]
    return y, dx, gradients


def near(found, expected):
    return torch.linalg.vector_norm(found.double() - expected) <= 1e-6 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("rows", [1, 3, 4, 32, 130])
@pytest.mark.parametrize("long", [True, False])
def test_shares_and_gradients_of_many_ranks_are_those_of_float64(rows, long):
    spans, x, y, dy, dx, factors = case(RANKS, rows, 48, 33, long=long)
    expected_y, expected_dx, expected = in_float64(spans, x, y, dy, dx, factors)
    inner = narrow.add(y, x, spans, factors)
    found = narrow.gradients(dy, x, spans, factors, inner, dx)
    assert near(y, expected_y) and near(dx, expected_dx)
    assert all(near(got, want) and got.shape == want.shape for got, want in zip(found, expected, strict=True))


@settings(deadline=None)
@given(
    ranks=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    rows=st.integers(1, 40),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    gap=st.integers(0, 2),
    turned=st.booleans(),
)
def test_any_sizes_give_what_torchs_products_give_in_float64(ranks, rows, inputs, outputs, gap, turned):
    spans, x, y, dy, dx, factors = case(ranks, rows, inputs, outputs, gap=gap)
    if (
        turned
    ):  # a vector's long sides lie in rows: of a rank that is larger than both sides, A lies turned and B doesn't
        factors = list(vectors.laid_out(factors))
    wide = [tensor.double() for tensor in (y, x, dy, dx, *factors)]
    y_64, x_64, dy_64, dx_64, *factors_64 = wide
    inner_64 = lora.add_shares(y_64, x_64, spans, factors_64)
    expected = lora.share_gradients(dy_64, x_64, spans, factors_64, inner_64, dx_64)
    inner = lora.add_shares(y, x, spans, factors)
    found = lora.share_gradients(dy, x, spans, factors, inner, dx)
    for got, want in zip((y, dx, *found), (y_64, dx_64, *expected), strict=True):
        assert torch.linalg.vector_norm(got.double() - want) <= 1e-5 * (1 + torch.linalg.vector_norm(want))


def test_gradients_are_added_where_they_are_gathered():
    spans, x, y, dy, _, factors = case((3, 60), 9, 48, 33)  # of rank 60 both lie the other way
    into = [torch.ones(3, 48), torch.ones(3, 33).t(), torch.ones(48, 60).t(), torch.ones(33, 60)]
    inner = narrow.add(y, x, spans, factors)
    fresh = narrow.gradients(dy, x, spans, factors, inner, None)
    found = narrow.gradients(dy, x, spans, factors, inner, None, into)
    assert all(got is room for got, room in zip(found, into, strict=True))
    assert all(torch.allclose(got, 1 + own, rtol=1e-5, atol=1e-4) for got, own in zip(found, fresh, strict=True))


def test_a_segments_bits_are_the_same_beside_others_and_by_itself():
    spans, x, y, dy, dx, factors = case((5, 16, 8), 11, 48, 33)
    alone = [tensor.clone() for tensor in (y, dx)]
    inner = narrow.add(y, x, spans, factors)
    together = narrow.gradients(dy, x, spans, factors, inner, dx)
    inner = narrow.add(alone[0], x, spans[1:2], factors[2:4])
    mine = narrow.gradients(dy, x, spans[1:2], factors[2:4], inner, alone[1])
    start, stop, _ = spans[1]
    assert torch.equal(alone[0][start:stop], y[start:stop]) and torch.equal(alone[1][start:stop], dx[start:stop])
    assert all(map(torch.equal, mine, together[2:4]))


def test_a_nan_stays_in_its_segment_and_nothing_outside_of_segments_is_touched():
    spans, x, y, dy, dx, factors = case((5, 16, 8), 11, 48, 33)
    before = [tensor.clone() for tensor in (y, dx)]
    start, stop, _ = spans[1]
    x[start:stop] = dy[start:stop] = float("nan")
    inner = narrow.add(y, x, spans, factors)
    found = narrow.gradients(dy, x, spans, factors, inner, dx)
    mine = torch.zeros(len(x), dtype=torch.bool)
    mine[start:stop] = True
    assert y[mine].isnan().all() and dx[mine].isnan().all()
    assert y[~mine].isfinite().all() and dx[~mine].isfinite().all()
    assert [bool(gradient.isfinite().all()) for gradient in found] == [True, True, False, False, True, True]
    nobodys = torch.ones(len(x), dtype=torch.bool)
    for first, last, _ in spans:
        nobodys[first:last] = False
    assert torch.equal(y[nobodys], before[0][nobodys]) and torch.equal(dx[nobodys], before[1][nobodys])


def test_parts_of_wider_rows_are_read_and_written_where_they_lie():
    spans, x, y, dy, dx, factors = case((5, 8), 7, 48, 33)
    wide = [torch.cat([tensor, torch.full((len(tensor), 5), 7.0)], 1) for tensor in (x, y, dy, dx)]
    x_w, y_w, dy_w, dx_w = (one[:, :-5] for one in wide)
    inner, inner_w = narrow.add(y, x, spans, factors), narrow.add(y_w, x_w, spans, factors)
    found = narrow.gradients(dy, x, spans, factors, inner, dx)
    found_w = narrow.gradients(dy_w, x_w, spans, factors, inner_w, dx_w)
    assert torch.equal(y, y_w) and torch.equal(dx, dx_w) and all(map(torch.equal, found, found_w))
    assert all((one[:, -5:] == 7).all() for one in wide)


class Zeros(list):
    def places(self):
        return [tensor.data_ptr() for tensor in self]


def room(adapter):
    return Zeros(torch.zeros_like(factor) for factor in adapter.parameters())


def test_a_sheet_has_each_module_as_its_factors_have_it():
    """Adapters on other modules than the next one, one without a token, and one in two places."""
    sizes = {"first": (48, 33), "second": (20, 21)}
    adapters = [
        Adapter(
            rank=rank,
            weights={name: (drawn(rank, rank, sizes[name][0]), drawn(9, rank, sizes[name][1]).t()) for name in names},
        )
        for rank, names in ((3, ["first", "second"]), (4, ["second"]), (2, ["first"]))
    ]
    route = joined([Segment(1, 8, adapters[0]), Segment(8, 11, adapters[1]), Segment(12, 15, adapters[0])])
    gathering = Gathering({one: partial(room, one) for one in adapters})
    x = drawn(1, 15, 48)
    assert Sheet.serves(x, route)
    sheet = Sheet(route, ["nobody's", "second", "first"], gathering)
    assert [sheet.has(module) for module in range(3)] == [False, True, True]
    assert set(gathering.rooms) == set(adapters[:2])
    for module, name in ((1, "second"), (2, "first")):
        x, y, dy, dx = (
            drawn(seed, 15, size) for seed, size in enumerate([*sizes[name], sizes[name][1], sizes[name][0]])
        )
        spans, factors = lora.shares(name, route)
        theirs = [y.clone(), dx.clone()]
        inner = narrow.add(theirs[0], x, spans, factors)
        expected = narrow.gradients(dy, x, spans, factors, inner, theirs[1])
        sheet.back(module, dy, x, sheet.add(module, x, y), dx)
        assert torch.equal(y, theirs[0]) and torch.equal(dx, theirs[1])
        owners = [segment.adapter for segment in route if name in segment.adapter.weights]
        for adapter in set(owners):
            for factor in (0, 1):
                whole = sum(expected[2 * n + factor] for n, one in enumerate(owners) if one is adapter)
                assert near(gathering.pairs(adapter)[name][factor], whole.double())


def test_a_sheet_is_for_factors_that_lie_as_the_loops_read_them():
    x, b = drawn(1, 4, 8), drawn(2, 3, 9).t()

    def serves(a, b):
        return Sheet.serves(x, [Segment(0, 4, Adapter(rank=3, weights={"one": (a, b)}))])

    assert serves(drawn(3, 3, 8), b) and not serves(drawn(3, 3, 8), b.contiguous())
    assert not serves(drawn(3, 8, 3).t(), b) and not serves(drawn(3, 3, 8).double(), b.double())
    assert not serves(drawn(3, 2, 3, 8), drawn(2, 2, 9, 3))  # a stack of experts
    assert not Sheet.serves(x, [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_are_torchs(dtype):
    x = drawn(1, 4, 8)
    assert narrow.serves(x, [x]) and not narrow.serves(x, [])
    assert not narrow.serves(x.to(dtype), [x]) and not narrow.serves(x, [x.to(dtype)])


def test_without_numba_torch_gives_the_same(monkeypatch):
    spans, x, y, dy, dx, factors = case(RANKS, 9, 48, 33)
    expected_y, expected_dx, expected = in_float64(spans, x, y, dy, dx, factors)
    monkeypatch.setattr(compiled, "HERE", False)
    into = [torch.zeros_like(factor) for factor in factors]
    inner = lora.add_shares(y, x, spans, factors)
    found = lora.share_gradients(dy, x, spans, factors, inner, dx, into)
    assert near(y, expected_y) and near(dx, expected_dx) and all(map(near, found, expected))
    assert all(got is room for got, room in zip(found, into, strict=True))
