"""Rotary position embeddings as a table, made once by the model's own module: a step looks its positions up.

What they are depends on the position alone, for every family that is served (`families`).

Axes: `T` tokens, `N` heads, `E` head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 1024
"""Positions that a table begins with; it doubles as it must."""


class Rotation(NamedTuple):
    """Of each token's position: what a head is multiplied with, and what the other half of it is.

    Each pair of the first and the second half is rotated (Su et al. 2021, "RoFormer"). The three are parts of one row,
    which `rows` relies on.
    """

    cos: Tensor
    """[T, 1, E]."""
    of_first: Tensor
    """[T, 1, E / 2], negative: what the second half adds to the first."""
    of_second: Tensor
    """[T, 1, E / 2]."""

    def turn(self, x_TNE: Tensor) -> Tensor:
        """Rotate heads [T, N, E]."""
        return self._turned(x_TNE, self.of_first, self.of_second)

    def turn_back(self, dx_TNE: Tensor) -> Tensor:
        """Rotate the other way, as the gradient of `turn` does."""
        return self._turned(dx_TNE, self.of_second, self.of_first)

    def _turned(self, x_TNE: Tensor, to_first: Tensor, to_second: Tensor) -> Tensor:
        out_TNE = x_TNE * self.cos
        first, second = x_TNE.chunk(2, -1)
        of_first, of_second = out_TNE.chunk(2, -1)
        of_first.addcmul_(second, to_first)
        of_second.addcmul_(first, to_second)
        return out_TNE


class Rotations:
    """The table; 8 bytes of float32 for each position and number of a head, up to the longest that was asked for."""

    def __init__(self, module: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], head_dim: int) -> None:
        """`module` gives cosines and sines [1, T, E] for positions [1, T], in the type of its first argument."""
        self._module, self._head_dim = module, head_dim
        self._table: Tensor | None = None

    def at(self, positions_T: Tensor, like: Tensor) -> Rotation:
        """Return the rotation of these positions, in the type of `like`."""
        longest = int(positions_T.max()) + 1
        table = self._table
        if table is None or len(table) < longest:
            table = self._table = self._made(max(FIRST, 1 << (longest - 1).bit_length()), like)
        size = table.shape[1] // 2
        rows = table.index_select(0, positions_T).unsqueeze(1)
        return Rotation(*rows.split([size, size // 2, size // 2], -1))

    def _made(self, length: int, like: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            zeros = torch.zeros(1, dtype=like.dtype, device=like.device)
            cos, sin = self._module(zeros, torch.arange(length, device=like.device)[None])
            if cos.shape[-1] != self._head_dim:
                raise ValueError(f"rotations are of {cos.shape[-1]} numbers, heads of {self._head_dim}")
            first, second = sin[0].chunk(2, -1)
            return torch.cat([cos[0], -first, second], -1)
