"""A step of AdamW over vectors of `N` values as one compiled loop, without a vector beside them.

Torch's own makes new parameters, moments and updates first, so that a step that isn't finite changes nothing: four
vectors for one, and new memory is slow. Here all is computed twice, first to see how it comes out, then to be written.
The formulas are torch's, in float32; squares of norms are summed in float64. Knows no lists and no messages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrl.workers.model import compiled, loops


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What a step multiplies with."""

    clip: float
    """Every value of the gradient."""
    decay: float
    """Parameters, before the rest: 1 minus learning rate times weight decay."""
    beta1: float
    beta2: float
    scale: float
    """Learning rate over the first moment's bias correction."""
    root: float
    """Root of the second moment's bias correction."""
    eps: float


def serves(*vectors_N: Tensor) -> bool:
    """Tell whether steps of these are taken here."""
    return compiled.HERE and all(one.is_cpu and one.dtype is torch.float32 and one.is_contiguous() for one in vectors_N)


def square_sum(values_N: Tensor) -> float:
    """Return the sum of all squares."""
    return float(loops.square_sum(values_N.data_ptr(), len(values_N)))


def looked_at(values_N: Tensor, grads_N: Tensor, avg_N: Tensor, avg_sq_N: Tensor, by: Factors) -> tuple[float, bool]:
    """Return the sum of the squares of a step's updates, and whether its second moments are finite. Changes nothing."""
    return _run((values_N, grads_N, avg_N, avg_sq_N), by, writes=False)


def take(values_N: Tensor, grads_N: Tensor, avg_N: Tensor, avg_sq_N: Tensor, by: Factors) -> None:
    """Take the step: parameters and moments are changed in place, and count as changed."""
    _run((values_N, grads_N, avg_N, avg_sq_N), by, writes=True)
    torch.autograd.graph.increment_version([values_N, avg_N, avg_sq_N])


def _run(vectors_N: tuple[Tensor, ...], by: Factors, *, writes: bool) -> tuple[float, bool]:
    numbers = (by.clip, by.decay, 1.0 - by.beta1, by.beta2, 1.0 - by.beta2, by.scale, by.root, by.eps)
    if len({len(vector_N) for vector_N in vectors_N}) != 1 or not serves(*vectors_N):
        raise ValueError(f"the vectors of a step differ: {[tuple(vector_N.shape) for vector_N in vectors_N]}")
    values_at, grads_at, avg_at, avg_sq_at = (vector_N.data_ptr() for vector_N in vectors_N)
    with np.errstate(over="ignore"):  # what is too large for float32 is infinity, as it is to torch
        rounded = tuple(map(np.float32, numbers))
    squares, finite = loops.adamw(values_at, grads_at, avg_at, avg_sq_at, len(vectors_N[0]), rounded, writes)
    return float(squares), bool(finite)
