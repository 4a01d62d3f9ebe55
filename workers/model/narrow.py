"""Products of matrices with a narrow side, the rank of an adapter, for all segments of a module in one call.

Torch needs two calls a segment in a forward and four in a backward, each for a few microseconds of work. These loops
are compiled (`compiled`), multiply four rows by four at a time in registers, and write what they compute where it will
lie: gradients are added to where the caller gathers them. Float32 on a CPU.

The long side of a factor must lie in rows: A [R, I], and B as [R, O], which `vectors` of the trainer sees to; a B that
lies otherwise is copied. Every sum has an order of its own that depends on the sizes alone.

Axes: `T` packed tokens, `S` tokens of a segment, `R` rank, `I` inputs, `O` outputs.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import compiled
from openrl.workers.model.compiled import floats
from openrl.workers.model.grouped import Spans

_BLOCK = 64
"""Tokens whose share of a factor's gradient is summed while their rows are in the cache."""
_SIZE = 4
"""Bytes of a float32."""


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
    _add(
        x_TI.data_ptr(), x_TI.stride(0), x_TI.size(1), y_TO.data_ptr(), y_TO.stride(0), y_TO.size(1), table, scales,
        inner_N.data_ptr(),
    )  # fmt: skip
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
    rooms = [one if _lies_long(one) else torch.zeros(one.shape[::-1]).t() for one in found[1::2]]
    table = np.column_stack([table, _addresses(found[::2]), _addresses(rooms)])
    dy_TO, x_TI = _in_rows(dy_TO), _in_rows(x_TI)
    dx_at, dx_stride = (0, 0) if dx_TI is None else (dx_TI.data_ptr(), dx_TI.stride(0))
    assert dx_TI is None or dx_TI.stride(1) == 1, "rows are written where they lie"
    _back(
        dy_TO.data_ptr(), dy_TO.stride(0), dy_TO.size(1), x_TI.data_ptr(), x_TI.stride(0), x_TI.size(1), dx_at,
        dx_stride, table, scales, inner_N.data_ptr(),
    )  # fmt: skip
    for room_OR, db_OR in zip(rooms, found[1::2], strict=True):
        if room_OR is not db_OR:
            db_OR.add_(room_OR)
    del held
    return found


def _table(spans: Spans, factors: Sequence[Tensor]) -> tuple[np.ndarray, np.ndarray, int, list[Tensor]]:
    """Return start, number of tokens, rank and both addresses of each span; the scales; the size of all inner values.

    And what must be held as long as the addresses are used.
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


@compiled.compiled
def _add(x_at, x_stride, num_in, y_at, y_stride, num_out, table, scales, inner_at):  # type: ignore[no-untyped-def]
    for number in range(len(table)):
        start, rows, rank = table[number, 0], table[number, 1], table[number, 2]
        x = floats(x_at + _SIZE * start * x_stride, rows * x_stride)
        y = floats(y_at + _SIZE * start * y_stride, rows * y_stride)
        a, b = floats(table[number, 3], rank * num_in), floats(table[number, 4], rank * num_out)
        h = floats(inner_at, rows * rank)
        _across(h, np.float32(1), x, x_stride, a, rows, rank, num_in)
        _along(y, y_stride, scales[number], h, rank, 1, b, num_out, rows, rank, num_out)
        inner_at += _SIZE * rows * rank


@compiled.compiled
def _back(dy_at, dy_stride, num_out, x_at, x_stride, num_in, dx_at, dx_stride, table, scales, inner_at):  # type: ignore[no-untyped-def]
    for number in range(len(table)):
        start, rows, rank, scale = table[number, 0], table[number, 1], table[number, 2], scales[number]
        x = floats(x_at + _SIZE * start * x_stride, rows * x_stride)
        dy = floats(dy_at + _SIZE * start * dy_stride, rows * dy_stride)
        a, b = floats(table[number, 3], rank * num_in), floats(table[number, 4], rank * num_out)
        da, db = floats(table[number, 5], rank * num_in), floats(table[number, 6], rank * num_out)
        h = floats(inner_at, rows * rank)
        inner_at += _SIZE * rows * rank
        dh = np.empty(rows * rank, np.float32)
        _across(dh, scale, dy, dy_stride, b, rows, rank, num_out)
        if dx_at != 0:
            dx = floats(dx_at + _SIZE * start * dx_stride, rows * dx_stride)
            _along(dx, dx_stride, np.float32(1), dh, rank, 1, a, num_in, rows, rank, num_in)
        for first in range(0, rows, _BLOCK):
            few = min(_BLOCK, rows - first)
            at = first * rank
            _along(da, num_in, np.float32(1), dh[at:], 1, rank, x[first * x_stride :], x_stride, rank, few, num_in)
            _along(db, num_out, scale, h[at:], 1, rank, dy[first * dy_stride :], dy_stride, rank, few, num_out)


@compiled.compiled
def _across(out, scale, a, a_stride, b, num_rows, num_columns, size):  # type: ignore[no-untyped-def]
    """out [rows, columns] = scale * a [rows, size] b [columns, size]^T."""
    zero = np.float32(0)
    i = 0
    while i + 4 <= num_rows:
        a0, a1, a2, a3 = a[i * a_stride :], a[(i + 1) * a_stride :], a[(i + 2) * a_stride :], a[(i + 3) * a_stride :]
        j = 0
        while j + 4 <= num_columns:
            b0, b1, b2, b3 = b[j * size :], b[(j + 1) * size :], b[(j + 2) * size :], b[(j + 3) * size :]
            s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = zero
            for k in range(size):
                x0, x1, x2, x3 = a0[k], a1[k], a2[k], a3[k]
                y0, y1, y2, y3 = b0[k], b1[k], b2[k], b3[k]
                s00 += x0 * y0
                s01 += x0 * y1
                s02 += x0 * y2
                s03 += x0 * y3
                s10 += x1 * y0
                s11 += x1 * y1
                s12 += x1 * y2
                s13 += x1 * y3
                s20 += x2 * y0
                s21 += x2 * y1
                s22 += x2 * y2
                s23 += x2 * y3
                s30 += x3 * y0
                s31 += x3 * y1
                s32 += x3 * y2
                s33 += x3 * y3
            at = i * num_columns + j
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s00, scale * s01, scale * s02, scale * s03
            at += num_columns
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s10, scale * s11, scale * s12, scale * s13
            at += num_columns
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s20, scale * s21, scale * s22, scale * s23
            at += num_columns
            out[at], out[at + 1], out[at + 2], out[at + 3] = scale * s30, scale * s31, scale * s32, scale * s33
            j += 4
        while j < num_columns:
            b0 = b[j * size :]
            s0 = s1 = s2 = s3 = zero
            for k in range(size):
                y0 = b0[k]
                s0 += a0[k] * y0
                s1 += a1[k] * y0
                s2 += a2[k] * y0
                s3 += a3[k] * y0
            at = i * num_columns + j
            out[at] = scale * s0
            out[at + num_columns] = scale * s1
            out[at + 2 * num_columns] = scale * s2
            out[at + 3 * num_columns] = scale * s3
            j += 1
        i += 4
    while i < num_rows:
        a0 = a[i * a_stride :]
        for j in range(num_columns):
            b0 = b[j * size :]
            s0 = zero
            for k in range(size):
                s0 += a0[k] * b0[k]
            out[i * num_columns + j] = scale * s0
        i += 1


@compiled.compiled
def _along(out, out_stride, scale, c, c_row, c_column, b, b_stride, num_rows, num_inner, size):  # type: ignore[no-untyped-def]
    """out [rows, size] += scale * c [rows, inner] b [inner, size]; c is at `row * c_row + inner * c_column`."""
    i = 0
    while i + 4 <= num_rows:
        o0, o1 = out[i * out_stride :], out[(i + 1) * out_stride :]
        o2, o3 = out[(i + 2) * out_stride :], out[(i + 3) * out_stride :]
        j = 0
        while j + 4 <= num_inner:
            b0, b1 = b[j * b_stride :], b[(j + 1) * b_stride :]
            b2, b3 = b[(j + 2) * b_stride :], b[(j + 3) * b_stride :]
            at = i * c_row + j * c_column
            c00, c01, c02, c03 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c10, c11, c12, c13 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c20, c21, c22, c23 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            at += c_row
            c30, c31, c32, c33 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            for k in range(size):
                y0, y1, y2, y3 = b0[k], b1[k], b2[k], b3[k]
                o0[k] += scale * (c00 * y0 + c01 * y1 + c02 * y2 + c03 * y3)
                o1[k] += scale * (c10 * y0 + c11 * y1 + c12 * y2 + c13 * y3)
                o2[k] += scale * (c20 * y0 + c21 * y1 + c22 * y2 + c23 * y3)
                o3[k] += scale * (c30 * y0 + c31 * y1 + c32 * y2 + c33 * y3)
            j += 4
        while j < num_inner:
            b0 = b[j * b_stride :]
            at = i * c_row + j * c_column
            c00, c10, c20, c30 = c[at], c[at + c_row], c[at + 2 * c_row], c[at + 3 * c_row]
            for k in range(size):
                y0 = scale * b0[k]
                o0[k] += c00 * y0
                o1[k] += c10 * y0
                o2[k] += c20 * y0
                o3[k] += c30 * y0
            j += 1
        i += 4
    while i < num_rows:
        o0 = out[i * out_stride :]
        j = 0
        while j + 4 <= num_inner:
            b0, b1 = b[j * b_stride :], b[(j + 1) * b_stride :]
            b2, b3 = b[(j + 2) * b_stride :], b[(j + 3) * b_stride :]
            at = i * c_row + j * c_column
            c00, c01, c02, c03 = c[at], c[at + c_column], c[at + 2 * c_column], c[at + 3 * c_column]
            for k in range(size):
                o0[k] += scale * (c00 * b0[k] + c01 * b1[k] + c02 * b2[k] + c03 * b3[k])
            j += 4
        while j < num_inner:
            b0, c00 = b[j * b_stride :], c[i * c_row + j * c_column]
            for k in range(size):
                o0[k] += scale * (c00 * b0[k])
            j += 1
        i += 1
