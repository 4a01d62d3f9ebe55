"""An adapter's factors as a decoder's compiled steps use them: one behind another in a vector, each B turned.

What `stacked` is where steps aren't compiled: copies, made once an adapter, whose factors must not change afterwards. A
group of linear layers with one input is one call for all adapters of a step. Where each factor lies is looked up again
only when a step has other adapters or other tokens of them than the one before, or the vectors lie elsewhere.

Axes: `T` tokens, `I` inputs, `O` outputs of all layers of a group, side by side, `R` rank.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import loops
from openrl.workers.model.lora import Adapter, MultiLoraLinear
from openrl.workers.model.segments import Segment

_ALIGNED = 16
"""Values: the processor's vectors are read in one piece."""
_SIZE = 4
"""Bytes of a float32."""

_numbers = itertools.count()


class _Copies:
    """Of one adapter: the vector, and of each group rank, both places in it, first column and width of each layer."""

    def __init__(self, adapter: Adapter, groups: Sequence[Sequence[tuple[str, int]]]) -> None:
        pieces: list[Tensor] = []
        end = 0

        def laid(tensor: Tensor) -> int:
            nonlocal end
            begin, padding = end, -tensor.numel() % _ALIGNED
            pieces.extend((tensor.detach().reshape(-1), tensor.new_zeros(padding)))
            end += tensor.numel() + padding
            return begin

        self.groups = []
        for group in groups:
            lines, column = [], 0
            for name, width in group:
                if (factors := adapter.factors(name)) is not None:
                    a_RI, b_OR, _ = factors
                    lines.append((len(a_RI), laid(a_RI), laid(b_OR.t()), column, width))
                column += width
            self.groups.append(np.array(lines, np.int64).reshape(-1, 5))
        self.vector_N = torch.cat(pieces) if pieces else torch.empty(0)
        self.scale = adapter.scale
        self.number = next(_numbers)
        """Never another's."""


class Laid:
    """The copies of all adapters that were asked for and are still somebody's."""

    def __init__(self, groups: Sequence[Sequence[MultiLoraLinear]]) -> None:
        """`groups` are linear layers with one input each, their outputs side by side."""
        self._groups = [[(linear.name, linear.out_features) for linear in group] for group in groups]
        self._copies: dict[int, _Copies] = {}
        """By the adapter's id; what is of one goes with it."""
        self._last: tuple[object, Shares] | None = None

    def shares(self, route: Sequence[Segment]) -> Shares:
        """Return what the adapters have in a step."""
        parts = [(one.start, one.stop, self._of(one.adapter)) for one in route if one.adapter is not None]
        key = [(start, stop, copies.number, copies.vector_N.data_ptr()) for start, stop, copies in parts]
        if self._last is None or self._last[0] != key:
            self._last = key, Shares(parts, len(self._groups))
        return self._last[1]

    def tensors(self) -> list[Tensor]:
        """Return what the copies lie in. Any thread may ask."""
        return [copies.vector_N for copies in list(self._copies.values())]

    def _of(self, adapter: Adapter) -> _Copies:
        found = self._copies.get(id(adapter))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = _Copies(adapter, self._groups)
            self._copies[id(adapter)] = found
            weakref.finalize(adapter, self._copies.pop, id(adapter), None)
        return found


class Shares:
    """The adapters' tokens in a step, and where their factors lie now."""

    def __init__(self, parts: Sequence[tuple[int, int, _Copies]], num_groups: int) -> None:
        self._tables = [_table(parts, number) for number in range(num_groups)]

    def add(self, number: int, x_TI: Tensor, out_TO: Tensor) -> None:
        """Add what the adapters have for a group of linear layers; both must lie in rows."""
        table, scales = self._tables[number]
        if len(table):
            assert x_TI.stride(1) == out_TO.stride(1) == 1, "rows are read and written where they lie"
            (x_at, x_stride), (y_at, y_stride) = ((one.data_ptr(), one.stride(0)) for one in (x_TI, out_TO))
            loops.add_to_columns(x_at, x_stride, x_TI.size(1), y_at, y_stride, table, scales)


def _table(parts: Sequence[tuple[int, int, _Copies]], number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first token, tokens, rank, both addresses, first column and width of each layer, and the scales."""
    lines, scales = [np.empty((0, 7), np.int64)], []
    for start, stop, copies in parts:
        mine = copies.groups[number]
        table = np.empty((len(mine), 7), np.int64)
        table[:, 0], table[:, 1], table[:, 2], table[:, 5:] = start, stop - start, mine[:, 0], mine[:, 3:]
        table[:, 3:5] = copies.vector_N.data_ptr() + _SIZE * mine[:, 1:3]
        lines.append(table)
        scales += [copies.scale] * len(mine)
    return np.concatenate(lines), np.array(scales, np.float32)
