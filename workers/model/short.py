"""Causal attention in short sequences, packed one behind another, forward and backward as one compiled loop each.

For sequences of some ten tokens torch's attention is views and calls more than products, and its backward a second
graph. The weights of all heads are kept for the backward: [T, H, longest], which is why sequences must be short; longer
ones, windows and caps on scores are `attention`'s. A sequence sees itself alone. Float32 on a CPU.

Axes: `T` packed tokens, `H` heads, `K` key-value heads, `E` head size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import compiled, loops
from openrl.workers.model.attention import Rule

LONGEST = 256
"""Tokens of a sequence."""


def serves(q_THE: Tensor, lengths: Sequence[int], rule: Rule) -> bool:
    """Tell whether sequences of these lengths are attended to here."""
    longest = max(lengths, default=LONGEST + 1)
    fits = longest <= LONGEST and (rule.window is None or longest <= rule.window) and rule.softcap is None
    return fits and compiled.HERE and q_THE.is_cpu and q_THE.dtype is torch.float32


class Short:
    """What attention gave in sequences of these lengths, and its gradient."""

    def __init__(self, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, lengths: Sequence[int], scale: float) -> None:
        """Queries, keys and values must lie in rows."""
        num, num_heads, size = q_THE.shape
        longest = max(lengths)
        self._lengths, self._scale = np.array(lengths), np.float32(scale)
        self._sizes = longest, num_heads, k_TKE.size(1), size
        self._inputs = q_THE, k_TKE, v_TKE
        self._weights = torch.empty(num, num_heads, longest)
        """[T, H, longest]; columns behind a token are nobody's."""
        self.out_THE = torch.empty_like(q_THE)
        assert all(one.is_contiguous() for one in self._inputs), "heads lie in rows"
        assert self._lengths.sum() == num, "every token is of a sequence"
        loops.attend(_places(self.out_THE, self._weights, *self._inputs), self._sizes, self._lengths, self._scale)

    def gradient(self, dout_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries [T, H, E], keys and values [T, K, E]."""
        dout_THE = dout_THE.contiguous()
        q_THE, k_TKE, v_TKE = self._inputs
        gradients = torch.empty_like(q_THE), torch.zeros_like(k_TKE), torch.zeros_like(v_TKE)
        places = _places(*gradients, dout_THE, self.out_THE, self._weights, *self._inputs)
        loops.attend_gradient(places, self._sizes, self._lengths, self._scale)
        return gradients


def _places(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
