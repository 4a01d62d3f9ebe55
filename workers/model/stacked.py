"""An adapter's factors as a step of a decoder uses them that isn't compiled: those of one input lie together.

For float32 on a CPU with numba, `laid` takes this place.

Queries, keys and values are of one input, and so are a gate and what it opens: their A's lie one below another, their
B's in blocks along a diagonal, so that two products do what six did. Copies, made once an adapter: its factors must not
change afterwards.

Axes: `S` tokens of a segment, `I` inputs, `O` outputs of all layers of a group, `R` their ranks together.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from openrl.workers.model.lora import Adapter, MultiLoraLinear
from openrl.workers.model.segments import Segment

MOST_ON_A_DIAGONAL = 96
"""Ranks together, above which the zeros beside the blocks cost more than a call for each."""


class Piece(NamedTuple):
    """A part of what comes out, by the part of the inner values that it needs; None is all."""

    inner: slice | None
    outputs: slice | None
    b: Tensor
    """[R, O] of this part, contiguous."""


class Stack(NamedTuple):
    """The factors of one group of linear layers that have one input."""

    a: Tensor
    """[R, I]."""
    pieces: tuple[Piece, ...]
    scale: float

    def add(self, x_SI: Tensor, out_SO: Tensor) -> None:
        """Add the adapter's share; the narrow side of a product comes first, as `lora` explains."""
        h_RS = torch.mm(self.a, x_SI.t())
        for inner, outputs, b_RO in self.pieces:
            h_SR = h_RS.t() if inner is None else h_RS[inner].t()
            (out_SO if outputs is None else out_SO[:, outputs]).addmm_(h_SR, b_RO, alpha=self.scale)


Stacks = tuple[Stack | None, ...]
"""Of each group; None where the adapter leaves it alone."""


class Stacked:
    """The stacks of all adapters that were asked for and are still somebody's."""

    def __init__(self, groups: Sequence[Sequence[MultiLoraLinear]], dtype: torch.dtype) -> None:
        """`groups` are linear layers with one input each; `dtype` is that of the products."""
        self._groups = [[(linear.name, linear.out_features) for linear in group] for group in groups]
        self._dtype = dtype
        self._stacks: dict[int, Stacks] = {}
        """By the adapter's id; what is of one goes with it."""

    def shares(self, route: Sequence[Segment]) -> Shares:
        """Return what the adapters have in a step."""
        return Shares([(one.start, one.stop, self.of(one.adapter)) for one in route if one.adapter is not None])

    def of(self, adapter: Adapter) -> Stacks:
        """Return an adapter's, in the order of the groups."""
        found = self._stacks.get(id(adapter))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = tuple(_stack(adapter, group, self._dtype) for group in self._groups)
            self._stacks[id(adapter)] = found
            weakref.finalize(adapter, self._stacks.pop, id(adapter), None)
        return found

    def tensors(self) -> list[Tensor]:
        """Return what the copies lie in. Any thread may ask."""
        present = [stack for stacks in list(self._stacks.values()) for stack in stacks if stack is not None]
        return [tensor for stack in present for tensor in (stack.a, *(piece.b for piece in stack.pieces))]


class Shares:
    """The adapters' tokens in a step."""

    def __init__(self, parts: Sequence[tuple[int, int, Stacks]]) -> None:
        self._parts = parts

    def add(self, number: int, x_TI: Tensor, out_TO: Tensor) -> None:
        """Add what the adapters have for a group of linear layers."""
        for start, stop, stacks in self._parts:
            if (stack := stacks[number]) is not None:
                stack.add(x_TI[start:stop], out_TO[start:stop])


def _stack(adapter: Adapter, group: Sequence[tuple[str, int]], dtype: torch.dtype) -> Stack | None:
    parts: list[tuple[slice, slice, Tensor]] = []
    narrow: list[Tensor] = []
    rank = width = 0
    for name, out_features in group:
        if (factors := adapter.factors(name)) is not None:
            a_RI, b_OR, _ = factors
            parts.append((slice(rank, rank + len(a_RI)), slice(width, width + out_features), b_OR.to(dtype).t()))
            narrow.append(a_RI.to(dtype))
            rank += len(a_RI)
        width += out_features
    if not parts:
        return None
    if rank <= MOST_ON_A_DIAGONAL:
        diagonal_RO = torch.zeros(rank, width, dtype=dtype, device=narrow[0].device)
        for inner, outputs, b_RO in parts:
            diagonal_RO[inner, outputs] = b_RO
        pieces: tuple[Piece, ...] = (Piece(None, None, diagonal_RO),)
    else:
        pieces = tuple(Piece(inner, outputs, b_RO.contiguous()) for inner, outputs, b_RO in parts)
    return Stack(torch.cat(narrow), pieces, adapter.scale)
