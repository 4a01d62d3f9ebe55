"""Products of matrices with a narrow side, the rank of an adapter, for all segments of a module in one call.

Torch needs two calls a segment in a forward and four in a backward, each for a few microseconds of work. These loops
are compiled (`loops`), and write what they compute where it will lie: gradients are added to where the caller gathers
them. Float32 on a CPU.

A must lie as [R, I], and B as [R, O], which `vectors` of the trainer sees to where ranks are smaller than sides; what
lies otherwise is copied. Every sum has an order of its own that depends on the sizes alone.

Axes: `T` packed tokens, `S` tokens of a segment, `R` rank, `I` inputs, `O` outputs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import compiled, loops
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.grouped import Spans
from openrl.workers.model.segments import Segment
from openrl.workers.weights.adapter import Adapter


def serves(x_TI: Tensor, factors: Sequence[Tensor]) -> bool:
    """Tell whether products with these factors are computed here."""
    dtype = torch.float32
    here = compiled.HERE and bool(factors) and x_TI.is_cpu and x_TI.dtype is dtype
    return here and all(one.dtype is dtype for one in factors)


def add(y_TO: Tensor, x_TI: Tensor, spans: Spans, factors: Sequence[Tensor]) -> Tensor:
    """Add each span's `scale * x A^T B^T` to `y_TO`; return its `x A^T` [S, R], one behind another in a vector."""
    table, scales, size, held = _table(spans, factors)
    inner_N = torch.empty(size)
    assert y_TO.stride(1) == 1, "rows are written where they lie"
    x_TI = _in_rows(x_TI)
    loops.add_shares(*_place(x_TI), *_place(y_TO), table, scales, inner_N.data_ptr())
    del held
    return inner_N


def gradients(
    dy_TO: Tensor,
    x_TI: Tensor,
    spans: Spans,
    factors: Sequence[Tensor],
    inner_N: Tensor,
    dx_TI: Tensor | None,
    into: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the gradients of each span's A and B; add what comes through them to `dx_TI`.

    `into`: where they are added, in the order of the factors; else they come in memory of their own.
    """
    table, scales, _, held = _table(spans, factors)
    found = list(into) or [torch.zeros_like(one, memory_format=torch.preserve_format) for one in factors]
    a_rooms = [one if one.is_contiguous() else torch.zeros(one.shape) for one in found[::2]]
    b_rooms = [one if _lies_long(one) else torch.zeros(one.shape[::-1]).t() for one in found[1::2]]
    table = np.column_stack([table, _addresses(a_rooms), _addresses(b_rooms)])
    dy_TO, x_TI = _in_rows(dy_TO), _in_rows(x_TI)
    dx_at, dx_stride = (0, 0) if dx_TI is None else (dx_TI.data_ptr(), dx_TI.stride(0))
    assert dx_TI is None or dx_TI.stride(1) == 1, "rows are written where they lie"
    loops.share_gradients(
        *_place(dy_TO), *_place(x_TI), dx_at, dx_stride, table, scales, inner_N.data_ptr(),
    )  # fmt: skip
    for room, own in zip((*a_rooms, *b_rooms), (*found[::2], *found[1::2]), strict=True):
        if room is not own:  # it lies the other way
            own.add_(room)
    del held
    return found


class Sheet:
    """Where the adapters of a pass lie, and their gradients, for all modules of a model: looked up once.

    Neither may move or change until the backward is over: nobody would notice.
    """

    def __init__(self, route: Sequence[Segment], names: Sequence[str], gathering: Gathering[Any] | None) -> None:
        """`names` are the modules, in the order of their numbers; without a `gathering` it is for forwards alone."""
        self._held = tuple(route), gathering  # what the addresses are of
        table = np.zeros((len(names), len(route), 7), np.int64)
        lines: dict[Adapter, np.ndarray] = {}
        for number, (start, stop, adapter) in enumerate((one.start, one.stop, one.adapter) for one in route):
            assert adapter is not None, "a route names adapters"
            if adapter not in lines:
                lines[adapter] = _line(adapter, names, gathering)
            table[:, number, 0], table[:, number, 1], table[:, number, 2:] = start, stop - start, lines[adapter]
        self._tables = list(table)
        self._sizes: list[int] = (table[:, :, 1] * table[:, :, 2]).sum(1).tolist()
        self._scales = np.array([one.adapter.scale for one in route if one.adapter is not None], np.float32)

    @staticmethod
    def serves(x_TI: Tensor, route: Sequence[Segment]) -> bool:
        """Tell whether all adapters of a route lie as the loops read them."""
        adapters = {one.adapter for one in route if one.adapter is not None}
        pairs = [pair for adapter in adapters for pair in adapter.weights.values()]
        return serves(x_TI, [one for pair in pairs for one in pair]) and all(
            a_RI.ndim == 2 and a_RI.is_contiguous() and _lies_long(b_OR) for a_RI, b_OR in pairs
        )

    def has(self, module: int) -> bool:
        """Tell whether some token has an adapter on a module."""
        return self._sizes[module] > 0

    def add(self, module: int, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """Add to `y_TO` what the adapters of a module give; return what the gradients need."""
        inner_N = torch.empty(self._sizes[module])
        assert y_TO.stride(1) == 1, "rows are written where they lie"
        x_TI = _in_rows(x_TI)
        loops.add_shares(
            *_place(x_TI), *_place(y_TO), self._tables[module], self._scales, inner_N.data_ptr(),
        )  # fmt: skip
        return inner_N

    def back(self, module: int, dy_TO: Tensor, x_TI: Tensor, inner_N: Tensor, dx_TI: Tensor | None) -> None:
        """Gather the gradients of a module's factors, and add to `dx_TI` what comes through them."""
        dy_TO, x_TI = _in_rows(dy_TO), _in_rows(x_TI)
        dx_at, dx_stride = (0, 0) if dx_TI is None else (dx_TI.data_ptr(), dx_TI.stride(0))
        assert dx_TI is None or dx_TI.stride(1) == 1, "rows are written where they lie"
        loops.share_gradients(
            *_place(dy_TO), *_place(x_TI), dx_at, dx_stride, self._tables[module], self._scales, inner_N.data_ptr(),
        )  # fmt: skip


def _line(adapter: Adapter, names: Sequence[str], gathering: Gathering[Any] | None) -> np.ndarray:
    """Return rank, addresses of both factors and of their gradients for each module; zeros where there is none."""
    known = {}
    room = iter(gathering.room(adapter).places() if gathering is not None else ())
    for name, (a_RI, b_OR) in adapter.weights.items():
        known[name] = (a_RI.size(0), a_RI.data_ptr(), b_OR.data_ptr(), next(room, 0), next(room, 0))
    return np.array([known.get(name, (0,) * 5) for name in names], np.int64)


def _place(rows_TI: Tensor) -> tuple[int, int, int]:
    """Where a row lies, how far it is to the next, and its size."""
    return rows_TI.data_ptr(), rows_TI.stride(0), rows_TI.size(1)


def _table(spans: Spans, factors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, int, list[Tensor]]:
    """Return start, number of tokens, rank and both addresses of each span; the scales; the size of all inner values.

    The tensors that come last must be held as long as the addresses are used.
    """
    held = [one.contiguous() for one in factors[::2]] + [_long(one) for one in factors[1::2]]
    number = len(spans)
    rows = [
        (start, stop - start, a_RI.size(0), a_RI.data_ptr(), b_OR.data_ptr())
        for (start, stop, _), a_RI, b_OR in zip(spans, held[:number], held[number:], strict=True)
    ]
    scales = np.array([scale for *_, scale in spans], np.float32)
    return np.array(rows, np.int64), scales, sum(row[1] * row[2] for row in rows), held


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _lies_long(b_OR: Tensor) -> bool:
    """Tell whether B lies as [R, O]."""
    return b_OR.stride(0) == 1 and (b_OR.size(1) == 1 or b_OR.stride(1) == b_OR.size(0))


def _long(b_OR: Tensor) -> Tensor:
    return b_OR if _lies_long(b_OR) else b_OR.t().contiguous().t()


def _in_rows(all_TO: Tensor) -> Tensor:
    """Return the same with the values of a row side by side."""
    return all_TO if all_TO.stride(1) == 1 else all_TO.contiguous()
