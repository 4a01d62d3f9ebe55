"""A token of each of many sequences against a cache, as a compiled loop: what each sees by itself."""

import pytest
import torch

from openrl.workers.model.attention import Rule
from openrl.workers.model.single import attended, serves, table

BEGINS, PLACES = [0, 32, 96, 64], [5, 31, 0, 12]


def drawn(num_heads, num_keys, size):
    generator = torch.Generator().manual_seed(num_heads)
    wide = torch.randn(len(BEGINS), num_heads + 3, size, generator=generator)
    keys, values = torch.randn(2, 128, num_keys, size, generator=generator)
    return wide[:, :num_heads], keys, values


def plain(q, keys, values, rule):
    seen = []
    for query, begin, place in zip(q.double(), BEGINS, PLACES, strict=True):
        held = slice(begin + rule.first(place), begin + place + 1)
        k, v = (one[held].double().repeat_interleave(len(query) // one.shape[1], 1) for one in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", query, k) * rule.scale).softmax(1)
        seen.append(torch.einsum("hl,lhd->hd", weights, v))
    return torch.stack(seen)


@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize(("num_heads", "num_keys", "size"), [(4, 2, 16), (3, 3, 8), (9, 3, 64), (8, 1, 2)])
def test_each_token_sees_its_own_sequence_as_far_as_its_rule_lets_it(num_heads, num_keys, size, window):
    q, keys, values = drawn(num_heads, num_keys, size)
    rule = Rule(size**-0.5, window)
    found = attended(q, keys, values, table(BEGINS, PLACES), rule)
    torch.testing.assert_close(found.double(), plain(q, keys, values, rule), rtol=1e-5, atol=1e-6)


def test_what_others_hold_and_what_lies_behind_a_sequence_changes_no_bit():
    q, keys, values = drawn(4, 2, 16)
    rule = Rule(0.25)
    before = attended(q, keys, values, table(BEGINS, PLACES), rule)
    mine = torch.zeros(128, dtype=torch.bool)
    mine[32:64] = True
    keys[~mine], values[~mine] = float("nan"), float("inf")
    assert torch.equal(attended(q, keys, values, table(BEGINS, PLACES), rule)[1], before[1])
    assert torch.equal(attended(q[1:2], keys, values, table(BEGINS[1:2], PLACES[1:2]), rule)[0], before[1])


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_nan_shows_in_all_that_see_it(which):
    q, keys, values = drawn(4, 2, 16)
    given = {"query": q[0], "key": keys[3], "value": values[3]}  # the first token sees positions 0 to 5
    given[which][:] = float("nan")
    found = attended(q, keys, values, table(BEGINS, PLACES), Rule(0.25))
    assert found[0].isnan().all() and found[1:].isfinite().all()


def test_heads_may_lie_in_any_order():
    q, keys, values = drawn(4, 2, 16)
    expected = attended(q, keys, values, table(BEGINS, PLACES), Rule(0.25))
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attended(turned, keys, values, table(BEGINS, PLACES), Rule(0.25)), expected)
    one, key, value = (each[:, :1].contiguous() for each in (q, keys, values))
    turned = one.transpose(0, 1).contiguous().transpose(0, 1)  # of a single head the stride says nothing
    assert torch.equal(
        attended(turned, key, value, table(BEGINS, PLACES), Rule(0.25)),
        attended(one, key, value, table(BEGINS, PLACES), Rule(0.25)),
    )


def test_capped_scores_and_other_types_are_left_to_others():
    q, keys, _ = drawn(4, 2, 16)
    assert serves(q, keys, Rule(1.0)) and serves(q, keys, Rule(1.0, window=3))
    assert not serves(q, keys, Rule(1.0, softcap=30.0)) and not serves(q.double(), keys, Rule(1.0))
    assert not serves(q.bfloat16(), keys.bfloat16(), Rule(1.0)) and not serves(q, keys.transpose(0, 1), Rule(1.0))
