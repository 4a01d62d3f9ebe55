"""The one kernel for all sequences of a pack is asked for what goes sequence by sequence on a CPU."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from openrl.workers.model import attention, varlen

LENGTHS = [5, 1, 17, 30]
H, K, D = 4, 2, 16


def by_its_documentation(q, k, v, bounds_q, bounds_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """What torch documents of `varlen_attn`, [T, heads, D] in and out, on a CPU."""
    assert bounds_q.dtype == torch.int32 and bounds_q.tolist() == bounds_k.tolist()
    assert longest_q == longest_k == max(LENGTHS) and q.stride(-1) == 1
    (left, right), out = window_size, torch.empty_like(q)
    for start, stop in zip(bounds_q.tolist(), bounds_q[1:].tolist(), strict=False):
        at = torch.arange(stop - start)
        apart = at[:, None] - at
        mask = apart >= -right if left < 0 else (apart >= -right) & (apart <= left)
        one, keys, values = (each[start:stop].transpose(0, 1)[None] for each in (q, k, v))
        mixed = sdpa(one, keys, values, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
        out[start:stop] = mixed[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("window", [None, 1, 4, 64])
@pytest.mark.parametrize("kv_heads", [K, H])
def test_the_kernel_is_given_each_sequences_bounds_the_window_and_the_scale(window, kv_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, sum(LENGTHS), D) for heads in (H, kv_heads, kv_heads))
    together = varlen.Packed(LENGTHS, kernel=by_its_documentation)
    for scale in (0.25, 0.5):
        ours = together.attend(query, key, value, scale=scale, window=window)
        rule = attention.Rule(scale, window)
        one_by_one = [
            attention.causal(*parts, rule)
            for parts in zip(*(each.split(LENGTHS, 2) for each in (query, key, value)), strict=True)
        ]
        torch.testing.assert_close(ours, torch.cat(one_by_one, 2))


def test_a_cpu_goes_sequence_by_sequence():
    query = torch.empty(1, H, 3, D, dtype=torch.bfloat16)
    assert not varlen.fits(query, softcap=None)
