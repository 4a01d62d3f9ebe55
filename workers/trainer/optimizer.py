"""AdamW with decoupled weight decay and bias correction: one step is one function.

Knows lists of tensors, not adapters. A step either happens as a whole or changes nothing: all new
values are made, checked and only then written. Parameters, moments and gradients are float32; norms are
summed in float64. After Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import OptimStep


@dataclass(slots=True)
class Moments:
    """AdamW's state for a list of parameters; the lists are empty before the first step."""

    exp_avg: list[Tensor] = field(default_factory=list)
    exp_avg_sq: list[Tensor] = field(default_factory=list)
    step: int = 0


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Tell whether no value is NaN or infinite."""
    return not tensors or bool(_flat(tensors).isfinite().all())


def global_norm(tensors: Sequence[Tensor]) -> float:
    """Return the 2-norm over all tensors, in float64, so that no square overflows."""
    return float(torch.linalg.vector_norm(_flat(tensors), dtype=torch.float64))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all values into one vector: one operation over it costs less than one for each of many small tensors."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, hyper: OptimStep
) -> dict[str, float]:
    """Change `parameters` and `moments` by one step; return its metrics. `gradients` stay as they are.

    `grad_norm` is the norm before clipping.

    Raises:
        InvalidRequest: the gradient or the step isn't finite; nothing was changed.
    """
    params, grads = list(parameters), list(gradients)
    grad_norm = global_norm(grads)
    if not math.isfinite(grad_norm):
        raise InvalidRequest(f"the gradient norm is not finite ({grad_norm}); the step was refused")
    is_clipped = 0.0 < hyper.grad_clip_norm < grad_norm
    if is_clipped:
        grads = list(torch._foreach_mul(grads, hyper.grad_clip_norm / grad_norm))
    new_avg, new_avg_sq = _new_moments(grads, moments, hyper)
    new_params = _new_parameters(params, new_avg, new_avg_sq, moments.step + 1, hyper)
    update_norm = global_norm(torch._foreach_sub(new_params, params))
    if not math.isfinite(update_norm) or not is_finite(new_avg_sq):
        raise InvalidRequest(
            f"the step is not finite (update norm {update_norm}, gradient norm {grad_norm}, "
            f"learning_rate {hyper.learning_rate}); it was refused"
        )
    torch._foreach_copy_(params, new_params)
    moments.exp_avg, moments.exp_avg_sq, moments.step = new_avg, new_avg_sq, moments.step + 1
    return {
        "grad_norm": grad_norm,
        "clipped": float(is_clipped),
        "update_norm": update_norm,
        "step": float(moments.step),
        "learning_rate": float(hyper.learning_rate),
    }


def _new_moments(grads: list[Tensor], moments: Moments, hyper: OptimStep) -> tuple[list[Tensor], list[Tensor]]:
    """Return the moments after this gradient, as new tensors."""
    old_avg = moments.exp_avg or [torch.zeros_like(grad) for grad in grads]
    old_avg_sq = moments.exp_avg_sq or [torch.zeros_like(grad) for grad in grads]
    avg = torch._foreach_lerp(old_avg, grads, 1.0 - hyper.beta1)
    avg_sq = torch._foreach_mul(old_avg_sq, hyper.beta2)
    torch._foreach_addcmul_(avg_sq, grads, grads, 1.0 - hyper.beta2)
    return list(avg), list(avg_sq)


def _new_parameters(
    params: list[Tensor], avg: list[Tensor], avg_sq: list[Tensor], step: int, hyper: OptimStep
) -> list[Tensor]:
    """Return the parameters after step number `step`, as new tensors."""
    correction1 = 1.0 - hyper.beta1**step
    correction2 = 1.0 - hyper.beta2**step
    scale, decay = hyper.learning_rate / correction1, 1.0 - hyper.learning_rate * hyper.weight_decay
    if max(abs(scale), abs(decay)) > torch.finfo(torch.float32).max:
        raise InvalidRequest(f"learning_rate {hyper.learning_rate} leaves the range of float32; the step was refused")
    denominators = torch._foreach_sqrt(avg_sq)
    torch._foreach_div_(denominators, math.sqrt(correction2))
    torch._foreach_add_(denominators, hyper.eps)
    decayed = torch._foreach_mul(params, decay)
    torch._foreach_addcdiv_(decayed, avg, denominators, -scale)
    return list(decayed)
