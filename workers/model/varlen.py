"""Causal attention over packed sequences in one kernel: FlashAttention's variable-length form, as torch ships it.

For a GPU with bfloat16 or float16; whatever it can't do goes sequence by sequence, as on a CPU. Each program of the
kernel reads keys and values of one sequence only, from the bounds that it is given. FlexAttention with a mask of
documents isn't used: in a block that two sequences share it multiplies the other's values by zero, and a NaN there
would come through.

Axes: `H` heads, `K` key-value heads, `T` packed tokens, `D` head size, `B` sequences.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

DTYPES = (torch.bfloat16, torch.float16)
MOST_HEAD_DIM = 256
LEAST_CAPABILITY = (8, 0)
"""Ampere: the oldest GPUs that FlashAttention 2 knows."""

Kernel = Callable[..., Any]


def fits(query: Tensor, *, softcap: float | None) -> bool:
    """Tell whether the kernel can attend for these queries [1, H, T, D]."""
    head_dim = query.shape[-1]
    return (
        query.is_cuda
        and query.dtype in DTYPES
        and softcap is None
        and head_dim <= MOST_HEAD_DIM
        and head_dim % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= LEAST_CAPABILITY
    )


class Packed:
    """Sequences of these lengths, one behind another; their bounds go to the device once, not for each layer."""

    def __init__(self, lengths: Sequence[int], *, kernel: Kernel | None = None) -> None:
        """`kernel`: what computes; None is torch's own, for a GPU."""
        self._bounds = [0, *accumulate(lengths)]
        self._longest = max(lengths)
        self._kernel: Kernel = kernel or varlen_attn
        self._on_device: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scale: float, window: int | None) -> Tensor:
        """[1, H, T, D] over [1, K, T, D] -> [1, H, T, D]; each token sees at most `window` tokens, itself the last."""
        if self._on_device is None or self._on_device.device != query.device:
            self._on_device = torch.tensor(self._bounds, dtype=torch.int32).to(query.device, non_blocking=True)
        q_THD, k_TKD, v_TKD = (each[0].transpose(0, 1) for each in (query, key, value))
        out_THD: Tensor = self._kernel(
            q_THD,
            k_TKD,
            v_TKD,
            self._on_device,
            self._on_device,
            self._longest,
            self._longest,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_THD.transpose(0, 1).unsqueeze(0)
