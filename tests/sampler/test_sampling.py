"""The pure half of sampling against the obvious dense version."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.workers.sampler.sampling import Rule, draw, tempered_logprobs, top_logprobs, uniforms


def logits(rows: int = 4, vocab: int = 700, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def draws(row_V: torch.Tensor, rule: Rule, count: int, seed: int = 0) -> list[int]:
    numbers = uniforms([seed] * count, list(range(count)), [0] * count)
    return draw(row_V.expand(count, -1), [rule] * count, numbers).tokens.tolist()


def kept_by_the_obvious_version(row_V: torch.Tensor, rule: Rule) -> set[int]:
    probs_V = (row_V.double() / rule.temperature).softmax(-1)
    order = probs_V.argsort(descending=True).tolist()
    if rule.top_k > 0:
        order = order[: rule.top_k]
    total = sum(probs_V[i].item() for i in order)
    kept, mass = set(), 0.0
    for token in order:
        if kept and mass >= rule.top_p * total:
            break
        kept.add(token)
        mass += probs_V[token].item()
    return kept


def test_temperature_zero_takes_the_highest_logit_and_the_lowest_id_on_a_tie():
    logits_BV = torch.zeros(2, 500)
    logits_BV[0, [300, 20, 499]] = 7.0
    chosen = draw(logits_BV, [Rule(temperature=0.0)] * 2, np.array([0.9, 0.9]))
    assert chosen.tokens.tolist() == [20, 0]


def test_a_hundred_greedy_draws_are_one_token():
    assert set(draws(logits()[0], Rule(temperature=0.0), 100)) == {logits()[0].argmax().item()}


def test_logprobs_are_of_the_tempered_distribution_before_the_cuts():
    logits_BV = logits()
    rules = [Rule(1.0, 3, 0.5), Rule(0.5, 5, 1.0), Rule(2.0), Rule(0.0)]
    chosen = draw(logits_BV, rules, np.full(4, 0.3))
    for row, divisor in enumerate([1.0, 0.5, 2.0, 1.0]):
        expected_V = (logits_BV[row] / divisor).log_softmax(-1)
        assert chosen.logprobs[row].item() == pytest.approx(expected_V[chosen.tokens[row]].item(), abs=1e-5)
    assert chosen.logprobs.dtype == torch.float32


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6, 1e6])
def test_extreme_temperatures_stay_finite(temperature):
    chosen = draw(logits(), [Rule(temperature)] * 4, np.full(4, 0.999999))
    assert torch.isfinite(chosen.logprobs).all()
    if temperature < 1:
        assert chosen.tokens.tolist() == logits().argmax(-1).tolist()


@pytest.mark.parametrize(
    "rule", [Rule(1.0, 5), Rule(0.7, 40, 0.6), Rule(1.0, -1, 0.3), Rule(1.5, 0, 0.95), Rule(1.0, 1), Rule(1.0, -1, 0.0)]
)
def test_only_kept_tokens_are_drawn_and_each_of_them_can_be(rule):
    row_V = logits()[0]
    kept = kept_by_the_obvious_version(row_V, rule)
    drawn = set(draws(row_V, rule, 6000))
    assert drawn <= kept
    likely = (row_V / rule.temperature).softmax(-1)
    mass = sum(likely[token].item() for token in kept)
    assert {token for token in kept if likely[token].item() / mass > 0.005} <= drawn


def test_top_p_over_a_flat_distribution_looks_beyond_the_first_candidates():
    row_V = torch.linspace(1.0, 0.0, 5000)
    drawn = draws(row_V, Rule(1.0, -1, 0.9), 4000)
    kept = kept_by_the_obvious_version(row_V, Rule(1.0, -1, 0.9))
    assert len(kept) > 2000
    assert set(drawn) <= kept
    assert max(drawn) > 1500


def test_a_top_k_over_the_vocabulary_cuts_nothing():
    row_V = logits()[0]
    assert draws(row_V, Rule(1.0, 10**6), 200) == draws(row_V, Rule(), 200)


@pytest.mark.parametrize("vocab", [3, 256, 260, 700])
def test_draws_follow_the_distribution(vocab):
    row_V = logits(1, vocab)[0]
    count = 20000
    seen_V = torch.bincount(torch.tensor(draws(row_V, Rule(), count)), minlength=vocab).double() / count
    assert (seen_V - row_V.double().softmax(-1)).abs().max() < 0.015


def test_a_row_is_drawn_as_if_it_were_alone():
    logits_BV = logits(6)
    rules = [Rule(), Rule(0.0), Rule(0.3, 4), Rule(1.0, -1, 0.5), Rule(1.7), Rule(1.0, 9, 0.9)]
    numbers = uniforms(range(6), range(6), range(6))
    together = draw(logits_BV, rules, numbers)
    for row in range(6):
        alone = draw(logits_BV[row : row + 1], [rules[row]], numbers[row : row + 1])
        assert alone.tokens.item() == together.tokens[row].item()


def test_uniforms_depend_on_each_of_their_three_numbers_and_on_nothing_else():
    grid = [(seed, index, position) for seed in (-1, 0, 7, 2**63) for index in range(8) for position in range(8)]
    numbers = uniforms(*zip(*grid, strict=True))
    assert len(set(numbers.tolist())) == len(grid)
    assert uniforms([7], [3], [5])[0] == numbers[grid.index((7, 3, 5))]


def test_uniforms_are_uniform_along_positions_and_across_sequences():
    for numbers in (uniforms([5] * 20000, [1] * 20000, range(20000)), uniforms([5] * 20000, range(20000), [1] * 20000)):
        counts = np.histogram(numbers, bins=20, range=(0, 1))[0]
        assert ((counts - 1000) ** 2 / 1000).sum() < 45
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_top_logprobs_are_sorted_and_finite():
    logprobs_BV = tempered_logprobs(logits(), [1e-9, 1.0, 1.0, 1.0])
    tokens, values = top_logprobs(logprobs_BV, 5)
    assert (
        tokens.shape == values.shape == (4, 5) and (values[:, :-1] >= values[:, 1:]).all() and values.min() == -9999.0
    )
    assert (values == logprobs_BV.clamp(min=-9999.0).gather(1, torch.from_numpy(tokens).long()).numpy()).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 600), st.integers(-1, 20), st.floats(0, 1), st.floats(0, 0.9999999999))
def test_no_draw_leaves_the_kept_set(seed, vocab, top_k, top_p, uniform):
    logits_BV = logits(1, vocab, seed)
    token = draw(logits_BV, [Rule(1.0, top_k, top_p)], np.array([uniform])).tokens.item()
    probs_V = logits_BV[0].softmax(-1)
    lowest = min(probs_V[kept].item() for kept in kept_by_the_obvious_version(logits_BV[0], Rule(1.0, top_k, top_p)))
    assert probs_V[token].item() >= lowest * (1 - 1e-4)
