"""Lists of tensors as one vector: nothing is copied that lies together, and nothing else is taken for it."""

import math

import pytest
import torch

from openrl.workers.trainer import vectors
from openrl.workers.trainer.vectors import ALIGNMENT, all_finite, laid_out, norm, room_of, vector_of

SHAPES = [(4, 6), (64,), (7, 4), (1, 3)]


def some(seed: int = 0) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def test_what_was_laid_out_has_the_same_values_and_asks_for_gradients_as_before():
    given = some()
    given[1].requires_grad_()
    parts = laid_out(given)
    assert len(parts) == len(given) and all(map(torch.equal, parts, given))
    assert [part.requires_grad for part in parts] == [False, True, False, False]
    assert all(
        part.is_leaf and part.data_ptr() % (4 * ALIGNMENT) == parts[0].data_ptr() % (4 * ALIGNMENT) for part in parts
    )


def test_a_matrix_that_is_higher_than_wide_lies_turned_whatever_it_was_copied_from():
    given = some()
    there = laid_out([given[0].t().contiguous().t(), given[1], given[2].t().contiguous().t(), given[3]])
    assert torch.equal(laid_out(given).whole, there.whole) and all(map(torch.equal, there, given))
    assert [part.t().is_contiguous() for part in there if part.ndim == 2] == [False, True, True]
    zeros = vectors.zeros_like([one.requires_grad_() for one in given])
    assert [(part.shape, part.stride()) for part in zeros] == [(part.shape, part.stride()) for part in there]
    assert not zeros.whole.any() and not any(part.requires_grad for part in zeros)
    assert zeros.shapes == vectors.zeros_like(there).shapes


def test_places_are_where_the_parts_lie_and_one_is_added_to_without_the_others():
    parts, given = laid_out(some()), some()
    places = parts.places()
    for number, more in enumerate(some(1)):
        parts.add(number, more)
    assert places == [part.data_ptr() for part in parts]
    assert all(map(torch.equal, parts, (a + b for a, b in zip(given, some(1), strict=True))))


def test_the_vector_of_parts_is_where_they_lie_and_of_any_other_list_a_copy():
    parts = laid_out(some())
    assert vector_of(parts) is parts.whole and len(parts.whole) == room_of(list(parts)) == room_of(parts)
    assert vectors.size_bytes(parts) == parts.whole.nbytes > vectors.size_bytes(list(parts)) == 4 * 119
    copied_N = vector_of(list(parts))
    assert torch.equal(copied_N, parts.whole) and copied_N.data_ptr() != parts.whole.data_ptr()


def test_what_is_between_the_parts_is_zero_and_stays_so():
    parts, more = laid_out(some()), laid_out(some(1))
    vectors.add(parts, more)
    assert all(map(torch.equal, parts, (a + b for a, b in zip(some(), some(1), strict=True))))
    assert float(parts.whole.abs().sum()) == pytest.approx(sum(float(part.abs().sum()) for part in parts))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 0.0])
@pytest.mark.parametrize("num", [0, 1, 255, 256, 100_003])
def test_a_norm_is_exact_whatever_the_size_of_its_values(num, scale):
    values_N = torch.randn(num, generator=torch.Generator().manual_seed(num)) * scale
    assert norm(values_N) == pytest.approx(float(values_N.double().norm()), rel=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_found(bad):
    values_N = torch.randn(1000)
    assert all_finite(values_N) and all_finite(values_N[:0])
    values_N[777] = bad
    assert not all_finite(values_N) and not math.isfinite(norm(values_N))
