"""Products of tokens with the frozen weights of linear layers, by the faster of the libraries that torch has on a CPU.

`torch.mm` of float32 goes to MKL, which leaves half of the vector units of some processors idle; oneDNN, which torch
has too, uses all that it finds. It reads weights where they lie. In the sizes that are tested a row's bits don't depend
on how many others there are, from two on; a single row is no product of matrices and stays with torch, as do other
types, accelerators, and a torch without oneDNN. Without gradients: who calls has a backward of its own.

Axes: `T` tokens, `I` inputs, `O` outputs.
"""

from functools import cache

import torch
from torch import Tensor

FEWEST_ROWS = 2


def product(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `x W^T + bias` [T, O]."""
    if _serves(x_TI, weight_OI):
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias_O, "none", [], "")
        return out_TO
    return torch.mm(x_TI, weight_OI.t()) if bias_O is None else torch.addmm(bias_O, x_TI, weight_OI.t())


def added(to_TO: Tensor, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return `to + x W^T + bias` [T, O], elsewhere than `to`."""
    if _serves(x_TI, weight_OI):
        out_TO: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x_TI, to_TO, weight_OI, bias_O, "add")
        return out_TO
    out_TO = torch.addmm(to_TO, x_TI, weight_OI.t())
    return out_TO if bias_O is None else out_TO.add_(bias_O)


def _serves(x_TI: Tensor, weight_OI: Tensor) -> bool:
    is_float32 = x_TI.dtype is torch.float32 and weight_OI.dtype is torch.float32
    return is_float32 and x_TI.size(0) >= FEWEST_ROWS and x_TI.is_cpu and works()


@cache
def works() -> bool:
    """Try oneDNN once: whether torch has it depends on how it was built."""
    x_TI = torch.ones(3, 8)
    try:
        out_TO = torch.ops.mkldnn._linear_pointwise.binary(x_TI, x_TI, torch.eye(8), None, "add")
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(out_TO, 2 * x_TI)
