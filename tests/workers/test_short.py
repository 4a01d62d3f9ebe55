"""Attention in short sequences as compiled loops, against torch's, one sequence at a time, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention as sdpa

from openrl.workers.model.attention import Rule
from openrl.workers.model.short import LONGEST, Short, serves


def drawn(lengths, num_heads, num_keys, size, *, spread=1.0):
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = [(sum(lengths), heads, size) for heads in (num_heads, num_keys, num_keys, num_heads)]
    q, k, v, dout = (torch.randn(shape, generator=generator) for shape in shapes)
    return spread * q, k, v, dout


def plain(q, k, v, dout, lengths, scale):
    """Each sequence by itself."""
    parts = []
    for mine in zip(*(one.double().split(lengths) for one in (q, k, v, dout)), strict=True):
        ends = [one.transpose(0, 1)[None].detach().requires_grad_() for one in mine[:3]]
        out = sdpa(*ends, is_causal=True, scale=scale, enable_gqa=True)
        gradients = torch.autograd.grad(out, ends, mine[3].transpose(0, 1)[None])
        parts.append([one[0].detach().transpose(0, 1) for one in (out, *gradients)])
    return [torch.cat(each) for each in zip(*parts, strict=True)]


def far(found, expected):
    return float(torch.linalg.vector_norm(found.double() - expected) / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize("lengths", [[1], [5], [32, 32], [7, 1, 40, 3], [LONGEST, 2]])
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(4, 2, 16), (3, 3, 8), (9, 3, 64)])
def test_values_and_gradients_are_those_of_each_sequence_by_itself(lengths, num_heads, num_keys, size):
    tensors = drawn(lengths, num_heads, num_keys, size)
    of = Short(*tensors[:3], lengths, size**-0.5)
    expected = plain(*tensors, lengths, size**-0.5)
    found = of.out_THE, *of.gradient(tensors[3])
    # A first token sees itself alone: nothing depends on its query and key, and rounding is all there is of them.
    assert all(far(got, want) < 1e-6 or float(want.norm()) < 1e-12 for got, want in zip(found, expected, strict=True))


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 3)]),
    size=st.sampled_from([2, 8, 20]),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
)
def test_any_sizes_and_scores_of_any_size(lengths, heads, size, spread):
    q, k, v, dout = drawn(lengths, *heads, size, spread=spread)
    of = Short(q, k, v, lengths, 1.0)
    out, *_ = plain(q, k, v, dout, lengths, 1.0)
    rounding = 1e-6 * float(q.norm(dim=-1).max() * k.norm(dim=-1).max())  # of a score, which becomes an exponent
    assert (of.out_THE.double() - out).abs().max() <= (1e-5 + rounding) * v.abs().max()
    assert all(gradient.isfinite().all() for gradient in of.gradient(dout))


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("place", [0, 3, 4, 8])
def test_a_nan_shows_in_all_that_see_it_and_stays_in_its_sequence(which, place):
    lengths, at = [7, 9, 8], 7 + place
    *given, dout = drawn(lengths, 4, 2, 16)
    before = Short(*given, lengths, 0.25)
    expected = [before.out_THE, *before.gradient(dout)]
    given[["query", "key", "value"].index(which)][at] = float("nan")
    after = Short(*given, lengths, 0.25)
    others = torch.ones(24, dtype=torch.bool)
    others[7:16] = False
    found = [after.out_THE, *after.gradient(dout)]
    assert all(torch.equal(got[others], want[others]) for got, want in zip(found, expected, strict=True))
    seen_by = slice(at, at + 1 if which == "query" else 16)
    assert found[0][seen_by].isnan().all()
    if which != "value":
        assert found[1][seen_by].isnan().all()


def test_a_sequence_has_the_same_bits_beside_others():
    lengths = [7, 9, 200]
    q, k, v, dout = drawn(lengths, 4, 2, 16)
    whole = Short(q, k, v, lengths, 0.25)
    alone = Short(*(one[7:16].contiguous() for one in (q, k, v)), [9], 0.25)
    assert torch.equal(alone.out_THE, whole.out_THE[7:16])
    mine = alone.gradient(dout[7:16])
    assert all(torch.equal(got, want[7:16]) for got, want in zip(mine, whole.gradient(dout), strict=True))


def test_what_is_longer_windowed_capped_or_of_another_type_is_left_to_others():
    q = torch.zeros(3, 1, 2)
    assert serves(q, [LONGEST, 1], Rule(1.0)) and serves(q, [9], Rule(1.0, window=9))
    assert not serves(q, [LONGEST + 1], Rule(1.0)) and not serves(q, [], Rule(1.0))
    assert not serves(q, [9], Rule(1.0, window=8)) and not serves(q, [9], Rule(1.0, softcap=50.0))
    assert not serves(q.double(), [9], Rule(1.0))
