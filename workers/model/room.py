"""Where the numbers of a decoder's layer lie: memory that all layers of a step use one after another.

Every view that a layer needs is cut once. What is as wide as a decode step is kept for the next step of as many tokens.

Axes: `T` packed tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E` head size, `F` the inner
size of the MLP.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor

MOST_KEPT = 4
"""Rooms that are kept: steps differ in their tokens when a sequence ends or begins."""
LARGEST_KEPT = 128
"""Tokens of the largest that is kept."""


class Sizes(NamedTuple):
    """Of a layer, by the letters above."""

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner: int


class Room:
    """The memory for so many tokens, and its parts."""

    def __init__(self, num_tokens: int, sizes: Sizes, like: Tensor) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(num_tokens, *shape, dtype=like.dtype, device=like.device)

        heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        both = heads + kv_heads
        self.normal_TD = empty(sizes.hidden)
        """Behind a norm."""
        self.factor_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=like.device)
        """What a norm multiplies with."""
        self.factor_TN1 = torch.empty(num_tokens, both, 1, dtype=torch.float32, device=like.device)
        self.qkv = empty((both + kv_heads) * head_dim)
        """Queries, keys and values, one beside the other: [T, (N + K) * E]."""
        self.q, self.k, self.v = self.qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], 1)
        self.qk_TNE = self.qkv[:, : both * head_dim].unflatten(1, (both, head_dim))
        self.q_THE, self.k_TKE = self.qk_TNE.split([heads, kv_heads], 1)
        self.v_TKE = self.v.unflatten(1, (kv_heads, head_dim))
        self.first, self.second = self.qk_TNE.chunk(2, -1)
        """Halves of each head: [T, N, E / 2]."""
        self.rotated_TNE = empty(both, head_dim)
        self.rotated_first, self.rotated_second = self.rotated_TNE.chunk(2, -1)
        self.rotated_q_THE, self.rotated_k_TKE = self.rotated_TNE.split([heads, kv_heads], 1)
        self.gate_up = empty(2 * sizes.inner)
        """[T, 2 * F]."""
        self.gate, self.up = self.gate_up.split(sizes.inner, 1)


class Rooms:
    """The rooms of late. A step must be done with one before the next asks for it."""

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self._kept: OrderedDict[tuple[int, bool], Room] = OrderedDict()

    def of(self, num_tokens: int, like: Tensor) -> Room:
        """Return one for so many tokens, of the type and in the place of `like`."""
        # What inference mode has made can't be written elsewhere.
        key = num_tokens, torch.is_inference_mode_enabled()
        room = self._kept.get(key)
        if room is not None:
            self._kept.move_to_end(key)
            return room
        room = Room(num_tokens, self._sizes, like)
        if num_tokens <= LARGEST_KEPT:
            self._kept[key] = room
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return room
