"""Weights of linear layers a second time, in the order in which oneDNN reads them.

A product of a few rows spends a good part of its time on bringing the weights into that order, each time anew: 2 to 16
rows take a third less from a copy that has it already, longer ones a sixth. Copies are made before the first product,
so that the same rows give the same bits from then on, and are for weights that stay: one whose weights are changed in
place is dropped for good. Weights must be changed through themselves or their views, as `parking` asks as well: it is
their counters of changes that are looked at. Float32 on a CPU; where torch lacks oneDNN nothing is copied.

Axes: `T` tokens, `I` inputs, `O` outputs of all layers of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from openrl.workers.model import products
from openrl.workers.model.lora import MultiLoraLinear

_ROWS = 16
"""What the order is chosen for; it serves others as well."""


class Budget:
    """The bytes that all copies of a model may take."""

    def __init__(self, size_bytes: int) -> None:
        self.left_bytes = size_bytes

    def take(self, size_bytes: int) -> bool:
        """Take so many; tell whether they were there."""
        if size_bytes > self.left_bytes:
            return False
        self.left_bytes -= size_bytes
        return True


class Reordered:
    """Linear layers that have one input, as one product from a copy of their weights."""

    def __init__(self, linears: Sequence[MultiLoraLinear], budget: Budget) -> None:
        self._weights = [linear.weight for linear in linears]
        self._biases = [linear.bias for linear in linears if linear.bias is not None]
        size_bytes = sum(weight.nbytes for weight in self._weights)
        alike = len(self._biases) in (0, len(linears)) and all(one.dtype is torch.float32 for one in self._weights)
        countless = any(one.is_inference() for one in self._weights + self._biases)  # nobody would see them change
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        if alike and not countless and _works() and budget.take(size_bytes):
            with torch.no_grad():
                self._weight = _ordered(_one(self._weights))
                self._bias = _one(self._biases) if self._biases else None
        self._made_of = self._changes()

    def ready(self) -> bool:
        """Tell whether there is a copy, and it is what the weights are."""
        if self._weight is None:
            return False
        if self._changes() != self._made_of:
            self.drop()
        return self._weight is not None

    def drop(self) -> None:
        """Use the copy no more: the weights were changed."""
        self._weight = self._bias = None

    def product(self, x_TI: Tensor) -> Tensor:
        """Return [T, O], the layers' outputs side by side; only when it is ready."""
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, self._weight, self._bias, "none", [], "")
        return out_TO

    def added(self, x_TI: Tensor, to_TO: Tensor) -> Tensor:
        """Return `to_TO` plus that."""
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_TI, to_TO, self._weight, self._bias, "add")
        return out_TO

    def _changes(self) -> list[int]:
        return [one._version for one in self._weights + self._biases if not one.is_inference()]


def _one(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].detach().clone() if len(tensors) == 1 else torch.cat([tensor.detach() for tensor in tensors])


def _ordered(weight_OI: Tensor) -> Tensor:
    ordered: Any = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS)
    return ordered


@cache
def _works() -> bool:
    """Try it once: whether it is there depends on how torch was built."""
    try:
        ordered = _ordered(torch.eye(8))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return products.works() and ordered is not None
