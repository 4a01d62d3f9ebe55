"""Lists of tensors that lie one behind another, as one vector of all `N` values.

An operation on each of many small tensors costs what it is called, not what it computes. Between two tensors there may
be zeros, which are nobody's: they change no norm, and no step but one without an eps changes them. Knows what a list
holds neither as an adapter nor as a gradient.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 64
"""Values. Each tensor begins at a multiple of it, as those do that torch allocates: kernels choose their way, and so
the last bits, by where a matrix lies."""
ROW = 256
"""Values whose squares are summed in float32 for a norm."""
LEAST = 1e-12
"""A norm under this may have lost squares that are too small for float32."""


def room_of(tensors: Sequence[Tensor]) -> int:
    """Return how many values the vector of these tensors has."""
    return sum(_padded(tensor.numel()) for tensor in tensors)


def laid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies that lie one behind another; what asks for gradients goes on asking."""
    return cut(_copied(tensors), tensors) if tensors else []


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values in order: where `cut` made the tensors, what it made them of, without a copy; else a copy."""
    whole = tensors[0]._base if tensors else None  # torch has no other name for it
    if whole is None or whole.ndim != 1 or not whole.is_contiguous():
        return _copied(tensors)
    begin = at = tensors[0].storage_offset()
    for tensor in tensors:
        if tensor._base is not whole or tensor.storage_offset() != at or not tensor.is_contiguous():
            return _copied(tensors)
        at += _padded(tensor.numel())
    begin -= whole.storage_offset()
    end = begin + room_of(tensors)
    return whole[begin:end] if end <= len(whole) else _copied(tensors)


def cut(values_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the vector in the shapes that it was made of, without a copy; what asks for gradients goes on asking."""
    with torch.no_grad():
        sizes = [size for tensor in like for size in (tensor.numel(), _padding(tensor.numel()))]
        parts = values_N.split(sizes)[::2]
        views = [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]
    for view, tensor in zip(views, like, strict=True):
        if tensor.requires_grad:
            view.requires_grad_()
    return views


def norm(values_N: Tensor) -> float:
    """Return the 2-norm, its squares summed in float32 for a few and in float64 for all of them.

    Where squares leave the range of float32, all are summed in float64.
    """
    rows = len(values_N) // ROW
    of_rows = torch.linalg.vector_norm(values_N[: rows * ROW].view(rows, ROW), dim=1)
    found = float(torch.linalg.vector_norm(torch.cat([of_rows, values_N[rows * ROW :]]), dtype=torch.float64))
    return found if LEAST < found < math.inf else float(torch.linalg.vector_norm(values_N, dtype=torch.float64))


def all_finite(values_N: Tensor) -> bool:
    """Tell whether no value is NaN or infinite, in one walk: a NaN is both the least and the largest."""
    return not len(values_N) or bool(torch.stack(values_N.aminmax()).isfinite().all())


@torch.no_grad()
def _copied(tensors: Sequence[Tensor]) -> Tensor:
    parts = []
    for tensor in tensors:
        parts.append(tensor.reshape(-1))
        if padding := _padding(tensor.numel()):
            parts.append(tensor.new_zeros(padding))
    return torch.cat(parts) if parts else torch.empty(0)


def _padding(num: int) -> int:
    return -num % ALIGNMENT


def _padded(num: int) -> int:
    return num + _padding(num)
