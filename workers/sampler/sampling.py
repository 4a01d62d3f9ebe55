"""From logits to tokens: temperature, cuts, seeded draws, and the log-probabilities that go with them.

Pure functions over a batch of rows; nothing here knows requests, adapters or the model.

A draw is the inverse of the cumulative distribution at one uniform number, which is a hash of
(seed, sequence, position) alone (the SplitMix64 finaliser, Steele, Lea and Flood 2014). So it depends
neither on what else is in the batch nor on how often a step is tried.

Axes: B rows, V vocabulary, K best tokens or draws, N blocks of the vocabulary, L ids of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrl.tasks.wire import codec

BLOCK = 256
CANDIDATES = 1024
FLOOR = -9999.0
MASK_64 = (1 << 64) - 1


class Rule(NamedTuple):
    """How one row's token is chosen. `temperature` 0 is greedy; `top_k` below 1 and `top_p` 1 cut nothing."""

    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Draw(NamedTuple):
    """The chosen token ids [B], their log-probabilities [B], and the distribution [B, V] these are of."""

    tokens: Tensor
    logprobs: Tensor
    distribution: Tensor


def draw(logits_BV: Tensor, rules: Sequence[Rule], uniforms_B: np.ndarray) -> Draw:
    """Choose one token a row.

    The log-probabilities (nats, float32) are those of the tempered distribution before top-k and top-p;
    at temperature 0, where the highest logit wins (lowest id on a tie), those of the untempered one.
    `uniforms_B` are float64 in [0, 1).
    """
    logprobs_BV = tempered_logprobs(logits_BV, [rule.temperature for rule in rules])
    greedy = [rule.temperature == 0 for rule in rules]
    if all(greedy):
        tokens_B = logits_BV.argmax(-1)
    else:
        uniforms_B1 = torch.from_numpy(uniforms_B).to(logits_BV.device)[:, None]
        tokens_B = _inverse_cdf(_cut(logprobs_BV, rules), uniforms_B1)[:, 0]
        if any(greedy):
            tokens_B = torch.where(torch.tensor(greedy, device=logits_BV.device), logits_BV.argmax(-1), tokens_B)
    return Draw(tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0], logprobs_BV)


def draw_several(logits_BV: Tensor, temperature: float, uniforms_BK: np.ndarray) -> Tensor:
    """Choose a token [B, K] for each uniform number, nothing cut; at temperature 0 all of a row are its likeliest."""
    if temperature == 0:
        return logits_BV.argmax(-1, keepdim=True).expand(uniforms_BK.shape)
    weights_BV = tempered_logprobs(logits_BV, [temperature] * len(logits_BV)).exp_()
    return _inverse_cdf(weights_BV, torch.from_numpy(uniforms_BK).to(logits_BV.device))


def tempered_logprobs(logits_BV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return log softmax(logits / temperature) as float32 [B, V]; a temperature of 0 counts as 1."""
    logits_BV = logits_BV.float()
    if any(temperature not in (0.0, 1.0) for temperature in temperatures):
        divisors_B1 = torch.tensor([temperature or 1.0 for temperature in temperatures], dtype=torch.float64)
        divisors_B1 = divisors_B1.float().clamp(min=1e-30).to(logits_BV.device)[:, None]
        # The maximum goes first: a tiny temperature then gives 0 and -inf, never inf - inf.
        logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisors_B1
    return logits_BV.log_softmax(-1)


def top_logprobs(logprobs_BV: Tensor, k: int) -> codec.Candidates:
    """Return each row's `k` most likely tokens, best first."""
    values_BK, ids_BK = logprobs_BV.topk(min(k, logprobs_BV.shape[-1]))
    return codec.Candidates(ids_BK.int().cpu().numpy(), values_BK.clamp(min=FLOOR).cpu().numpy())


def uniforms(seeds: Sequence[int], sequences: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """Return one float64 in [0, 1) per (seed, sequence, position), the same for the same three numbers."""
    state = np.array([_stream(seed, number) for seed, number in zip(seeds, sequences, strict=True)], dtype=np.uint64)
    state = _mix(state + np.array(positions, dtype=np.uint64))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


@lru_cache(maxsize=4096)
def _stream(seed: int, sequence: int) -> int:
    """Return what a position is added to: of one sequence it is the same at each step."""
    states = np.array([seed & MASK_64], dtype=np.uint64)
    return int(_mix(_mix(_mix(states) + np.array([sequence], dtype=np.uint64)))[0])


def _mix(state: np.ndarray) -> np.ndarray:
    """One SplitMix64 step on each uint64 (wrapping)."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def _cut(logprobs_BV: Tensor, rules: Sequence[Rule]) -> Tensor:
    """Return the probabilities with those that top-k and top-p exclude set to zero (not renormalised)."""
    probs_BV = logprobs_BV.exp()
    rows = [row for row, rule in enumerate(rules) if rule.temperature and (rule.top_k > 0 or rule.top_p < 1)]
    if not rows:
        return probs_BV
    vocab = logprobs_BV.shape[1]
    index_R = torch.tensor(rows, device=logprobs_BV.device)
    top_k = [min(rules[row].top_k, vocab) if rules[row].top_k > 0 else vocab for row in rows]
    thresholds_R1 = _thresholds(logprobs_BV[index_R], top_k, [rules[row].top_p for row in rows])[:, None]
    cut_RV = probs_BV[index_R].masked_fill_(logprobs_BV[index_R] < thresholds_R1, 0.0)
    return probs_BV.index_copy_(0, index_R, cut_RV)


def _thresholds(logprobs_BV: Tensor, top_k: Sequence[int], top_p: Sequence[float], width: int | None = None) -> Tensor:
    """Return each row's lowest kept log-probability [B]: top-k first, then top-p of what it left; ties stay.

    A few candidates nearly always hold enough mass; the whole vocabulary is sorted only when they don't.
    """
    vocab = logprobs_BV.shape[1]
    limited = [k for k in top_k if k < vocab]
    if width is None:
        width = min(vocab, max([*limited, CANDIDATES] if len(limited) < len(top_k) else limited))
    best_BK = logprobs_BV.topk(width).values
    top_k_B1 = torch.tensor(top_k, device=best_BK.device)[:, None]
    kept_BK = torch.arange(width, device=best_BK.device) < top_k_B1
    mass_BK = best_BK.double().exp() * kept_BK
    sum_B1 = mass_BK.sum(-1, keepdim=True)
    complete_B1 = top_k_B1 <= width
    wanted_B1 = torch.where(complete_B1, sum_B1, 1.0)
    wanted_B1 = wanted_B1 * torch.tensor(top_p, dtype=torch.float64, device=best_BK.device)[:, None]
    if width < vocab and not bool((complete_B1 | (sum_B1 >= wanted_B1)).all()):
        return _thresholds(logprobs_BV, top_k, top_p, vocab)
    kept_BK &= mass_BK.cumsum(-1) - mass_BK < wanted_B1
    last_B1 = (kept_BK.sum(-1, keepdim=True) - 1).clamp(min=0)
    return best_BK.gather(1, last_B1)[:, 0]


def _inverse_cdf(weights_BV: Tensor, uniforms_BK: Tensor) -> Tensor:
    """Return, for each uniform number [B, K], the first id whose cumulative weight passes that part of the row's sum.

    Two levels, so that float64 sums are only taken over blocks and within the chosen block.
    """
    rows, vocab = weights_BV.shape
    whole = vocab // BLOCK * BLOCK
    sums_BN = weights_BV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1) if whole else weights_BV.new_empty(rows, 0)
    if whole < vocab:
        sums_BN = torch.cat([sums_BN, weights_BV[:, whole:].sum(-1, keepdim=True)], 1)
    sums_BN = sums_BN.double()
    return torch.cat([_pick(weights_BV, sums_BN, uniforms_B1) for uniforms_B1 in uniforms_BK.split(1, 1)], 1)


def _pick(weights_BV: Tensor, sums_BN: Tensor, uniforms_B1: Tensor) -> Tensor:
    """Return one id a row [B, 1]: first the block, then the place in it."""
    vocab = weights_BV.shape[1]
    block_B1, share_B1 = _first_above(sums_BN, uniforms_B1)
    ids_BL = block_B1 * BLOCK + torch.arange(BLOCK, device=weights_BV.device)
    if vocab % BLOCK:
        inside_BL = weights_BV.gather(1, ids_BL.clamp(max=vocab - 1)).double().masked_fill_(ids_BL >= vocab, 0.0)
    else:
        inside_BL = weights_BV.gather(1, ids_BL).double()
    return block_B1 * BLOCK + _first_above(inside_BL, share_B1)[0]


def _first_above(weights_BK: Tensor, uniforms_B1: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's first index with cumulative weight above the target, and how far into it the target is."""
    cumulative_BK = weights_BK.cumsum(-1)
    target_B1 = uniforms_B1.clamp(max=1 - 1e-12) * cumulative_BK[:, -1:]
    index_B1 = (cumulative_BK <= target_B1).sum(-1, keepdim=True).clamp(max=weights_BK.shape[1] - 1)
    weight_B1 = weights_BK.gather(1, index_B1)
    return index_B1, (target_B1 - (cumulative_BK.gather(1, index_B1) - weight_B1)) / weight_B1
