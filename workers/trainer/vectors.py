"""Lists of tensors that lie one behind another, as one vector of all `N` values.

An operation on each of many small tensors costs what it is called, not what it computes. Between two tensors there may
be zeros, which are nobody's: they change no norm, and no step but one without an eps changes them. A matrix that is
higher than wide lies turned, its long side in rows, as the products of an adapter's B want it; that depends on the
shape alone, so the values of a parameter, its moments and its gradient are at one place in each vector. Knows what a
list holds neither as an adapter nor as a gradient.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import overload

import torch
from torch import Tensor

ALIGNMENT = 64
"""Values. Each tensor begins at a multiple of it, as those do that torch allocates: kernels choose their way, and so
the last bits, by where a matrix lies."""
ROW = 256
"""Values whose squares are summed in float32 for a norm."""
LEAST = 1e-12
"""A norm under this may have lost squares that are too small for float32."""


Shapes = list[tuple[torch.Size, bool]]
"""Of each tensor, and whether it asks for gradients."""


class Parts(Sequence[Tensor]):
    """The tensors that a vector is made of: views of it, which are made when the first is asked for."""

    def __init__(self, whole_N: Tensor, shapes: Shapes) -> None:
        """Cut the vector in these shapes."""
        self.whole = whole_N
        self.shapes = shapes
        self._views: list[Tensor] = []

    def places(self) -> list[int]:
        """Return the addresses of the tensors, without making views of them."""
        sizes = [shape.numel() for shape, _ in self.shapes]
        begins = accumulate(map(_padded, sizes[:-1]), initial=0)
        return [self.whole.data_ptr() + self.whole.itemsize * begin for begin in begins]

    def add(self, index: int, tensor: Tensor) -> None:
        """Add to one of the tensors, without making views of the others."""
        begin = sum(_padded(shape.numel()) for shape, _ in self.shapes[:index])
        shape = self.shapes[index][0]
        _as(shape, self.whole[begin : begin + shape.numel()]).add_(tensor)

    def __len__(self) -> int:
        return len(self.shapes)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        return self._cut()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._cut())

    def _cut(self) -> list[Tensor]:
        if not self._views:
            with torch.no_grad():
                sizes = [size for shape, _ in self.shapes for size in (shape.numel(), _padding(shape.numel()))]
                parts = self.whole.split(sizes)[::2]
                views = [_as(shape, part) for part, (shape, _) in zip(parts, self.shapes, strict=True)]
            self._views = [view.requires_grad_(asks) for view, (_, asks) in zip(views, self.shapes, strict=True)]
        return self._views


def parts(whole_N: Tensor, like: Sequence[Tensor]) -> Parts:
    """Cut the vector in the shapes of `like`; what asks for gradients goes on asking."""
    return Parts(whole_N, _shapes(like))


def room_of(tensors: Sequence[Tensor]) -> int:
    """Return how many values the vector of these tensors has."""
    return len(tensors.whole) if isinstance(tensors, Parts) else sum(_padded(tensor.numel()) for tensor in tensors)


def size_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the memory that the tensors take."""
    return tensors.whole.nbytes if isinstance(tensors, Parts) else sum(tensor.nbytes for tensor in tensors)


def with_vector(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, and first the vector that they are parts of: who moves what they lie in must move it too."""
    return [tensors.whole, *tensors] if isinstance(tensors, Parts) else list(tensors)


def laid_out(tensors: Sequence[Tensor]) -> Parts:
    """Return copies that lie one behind another; what asks for gradients goes on asking."""
    return parts(_copied(tensors), tensors)


def zeros_like(tensors: Sequence[Tensor]) -> Parts:
    """Return zeros that lie as these do, or would."""
    asks_none = [(shape, False) for shape, _ in _shapes(tensors)]
    device = tensors.whole.device if isinstance(tensors, Parts) else tensors[0].device
    return Parts(torch.zeros(room_of(tensors), device=device), asks_none)


def vector_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return all values in order: the vector itself of its parts, of other tensors a copy."""
    return tensors.whole if isinstance(tensors, Parts) else _copied(tensors)


def add(to: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Add to each of some tensors."""
    if isinstance(to, Parts) and isinstance(tensors, Parts):
        to.whole.add_(tensors.whole)
    else:
        torch._foreach_add_(list(to), list(tensors))


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


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return tensors.shapes if isinstance(tensors, Parts) else [(one.shape, one.requires_grad) for one in tensors]


@torch.no_grad()
def _copied(tensors: Sequence[Tensor]) -> Tensor:
    pieces = []
    for tensor in tensors:
        pieces.append((tensor.t() if _lies_turned(tensor.shape) else tensor).reshape(-1))
        if padding := _padding(tensor.numel()):
            pieces.append(tensor.new_zeros(padding))
    return torch.cat(pieces) if pieces else torch.empty(0)


def _lies_turned(shape: torch.Size) -> bool:
    return len(shape) == 2 and shape[0] > shape[1]


def _as(shape: torch.Size, part_N: Tensor) -> Tensor:
    return part_N.view(shape[::-1]).t() if _lies_turned(shape) else part_N.view(shape)


def _padding(num: int) -> int:
    return -num % ALIGNMENT


def _padded(num: int) -> int:
    return num + _padding(num)
