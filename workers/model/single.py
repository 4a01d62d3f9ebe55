"""Attention of one new token of each of many sequences to what a cache holds of them, as one compiled loop.

Each sequence is read as far as it goes: nothing is padded to the longest, gathered or masked. Float32 on a CPU; capped
scores are `kv_cache`'s.

Axes: `T` tokens, `P` positions of the cache, `H` heads, `K` key-value heads, `D` head size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import compiled, loops
from openrl.workers.model.attention import Rule


def serves(q_THD: Tensor, memory: Tensor, rule: Rule) -> bool:
    """Tell whether such queries are attended to here, over keys that lie in such memory."""
    alike = q_THD.dtype is memory.dtype is torch.float32
    return alike and compiled.HERE and q_THD.is_cpu and memory.is_contiguous() and rule.softcap is None


def table(begins: Sequence[int], places: Sequence[int]) -> np.ndarray:
    """Return where each sequence begins in the cache, and the new token's own place behind that."""
    return np.array([begins, places], np.int64).T.copy()


def attended(q_THD: Tensor, keys_PKD: Tensor, values_PKD: Tensor, where: np.ndarray, rule: Rule) -> Tensor:
    """Return what each token sees [T, H, D]: its sequence up to itself, or as much of its end as the rule says."""
    num, num_heads, size = q_THD.shape
    out_THD = torch.empty(num, num_heads, size)
    if q_THD.stride(2) != 1 or (num_heads > 1 and q_THD.stride(1) != size):
        q_THD = q_THD.contiguous()
    loops.attend_cached(
        out_THD.data_ptr(), q_THD.data_ptr(), q_THD.stride(0), keys_PKD.data_ptr(), values_PKD.data_ptr(), where,
        rule.window or 0, (int(where[:, 1].max()) + 1, num_heads, keys_PKD.size(1), size), np.float32(rule.scale),
    )  # fmt: skip
    return out_THD
