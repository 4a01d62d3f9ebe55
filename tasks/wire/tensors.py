"""Packed bytes and number lists to numpy arrays, refusing whatever doesn't add up.

Knows shapes, sizes and sparse rows; not protobuf, and not what a tensor is for. `where` names the
tensor in errors. Arrays that come out are read-only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from openrl.tasks.errors import InvalidRequest, TooLarge, shown

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")
DTYPES: dict[str, np.dtype[Any]] = {"float32": FLOAT32, "int64": INT64}

MAX_EXPANDED_ELEMENTS = 16 << 20
"""Cells of all sparse tensors of one request, once dense (128 MiB of int64): a few bytes may claim any shape."""


def unpack(packed: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """Read little-endian packed numbers, without a copy."""
    if len(packed) % dtype.itemsize:
        raise InvalidRequest(f"{where} has {len(packed)} bytes; {dtype.name} needs a multiple of {dtype.itemsize}")
    return np.frombuffer(packed, dtype)


def listed(values: object, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """Read a flat JSON list of numbers; whole numbers only where `dtype` is an integer."""
    if not isinstance(values, list):
        raise InvalidRequest(f"{where} must be a list of numbers, not {shown(values)}")
    allowed = {int} if dtype.kind == "i" else {int, float}
    if others := set(map(type, values)) - allowed:
        raise InvalidRequest(f"{where} must hold {dtype.name} numbers only; it holds {others.pop().__name__}")
    try:
        with np.errstate(over="ignore"):  # a float beyond float32 becomes infinity, which the checks refuse
            return sealed(np.array(values, dtype=dtype))
    except OverflowError as error:
        raise InvalidRequest(f"{where} holds a number that {dtype.name} can't hold") from error


def shaped(values: np.ndarray, shape: Sequence[int], where: str) -> np.ndarray:
    """Give flat `values` their shape [N] or [N, K]; no shape at all means [N]."""
    if not shape:
        return values
    _check_shape(shape, where)
    if math.prod(shape) != values.size:
        raise InvalidRequest(f"{where} has {values.size} values; its shape {list(shape)} needs {math.prod(shape)}")
    return values.reshape(shape)


def sealed(array: np.ndarray) -> np.ndarray:
    """Make an array of ours read-only, as those that view the body are."""
    array.flags.writeable = False
    return array


class Expander:
    """Makes the sparse tensors of one request dense, all of them within one cap."""

    def __init__(self, room: int = MAX_EXPANDED_ELEMENTS) -> None:
        self._room = room

    def expand(
        self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], where: str
    ) -> np.ndarray:
        """Return the dense [N, K] tensor of compressed sparse rows, 0 wherever nothing is listed.

        Every index is checked before anything is allocated.
        """
        row_of_value = csr_rows(rows, columns, shape, len(values), where)
        num_rows, num_columns = shape
        if num_rows * num_columns > self._room:
            raise TooLarge(
                f"{where} has shape {list(shape)}; sparse tensors of one request may hold {MAX_EXPANDED_ELEMENTS} "
                f"cells once dense and {self._room} are left: send fewer datums at once"
            )
        self._room -= num_rows * num_columns
        dense = np.zeros(num_rows * num_columns, dtype=values.dtype)
        dense[row_of_value * num_columns + columns] = values
        return sealed(dense.reshape(num_rows, num_columns))


def csr_rows(rows: np.ndarray, columns: np.ndarray, shape: Sequence[int], num_values: int, where: str) -> np.ndarray:
    """Check the indices of compressed sparse rows [N, K]; return the row of each value."""
    if len(shape) != 2:
        raise InvalidRequest(f"{where} is sparse and needs a shape [N, K], not {list(shape)}")
    _check_shape(shape, where)
    num_rows, num_columns = shape
    _check_rows(rows, num_rows, num_values, where)
    if len(columns) != num_values:
        raise InvalidRequest(f"{where} has {num_values} values and {len(columns)} column indices")
    if columns.size and (columns.min() < 0 or columns.max() >= num_columns):
        worst = columns.max() if columns.max() >= num_columns else columns.min()
        raise InvalidRequest(f"{where} has column index {worst}; it must be from 0 to {num_columns - 1}")
    row_of_value = np.repeat(np.arange(num_rows, dtype=INT64), np.diff(rows))
    if ((np.diff(columns) <= 0) & (np.diff(row_of_value) == 0)).any():
        raise InvalidRequest(f"{where} must list the columns of each row in increasing order, each once")
    return row_of_value


def _check_shape(shape: Sequence[int], where: str) -> None:
    if len(shape) > 2 or any(size < 0 for size in shape):
        raise InvalidRequest(f"{where} has shape {shown(list(shape))}; it must be [N] or [N, K]")


def _check_rows(rows: np.ndarray, num_rows: int, num_values: int, where: str) -> None:
    if len(rows) != num_rows + 1:
        raise InvalidRequest(f"{where} has {len(rows)} row pointers; {num_rows} rows need {num_rows + 1}")
    if rows[0] != 0 or rows[-1] != num_values or (np.diff(rows) < 0).any():
        raise InvalidRequest(f"{where} has row pointers that don't grow from 0 to its {num_values} values")
