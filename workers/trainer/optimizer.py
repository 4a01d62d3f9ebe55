"""AdamW with decoupled weight decay and bias correction: one step is one function.

Knows lists of tensors, not adapters. A step either happens as a whole or changes nothing: all new
values are made, checked and only then written. Parameters, moments and gradients are float32; norms are
summed in float64. Computes on vectors of all `N` values: one operation for each of many small tensors would
cost twice as much. After Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
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
    return not tensors or _all_finite(_flat(tensors))


def global_norm(tensors: Sequence[Tensor]) -> float:
    """Return the 2-norm over all tensors, in float64, so that no square overflows."""
    return _norm(_flat(tensors))


def _norm(values_N: Tensor) -> float:
    return float(torch.linalg.vector_norm(values_N, dtype=torch.float64))


def _all_finite(values_N: Tensor) -> bool:
    """A NaN is both the least and the largest value; one pass, where `isfinite` takes four."""
    return bool(torch.stack(values_N.aminmax()).isfinite().all())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Copy all values into one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _cut(values_N: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the vector in the shapes that it was made of, without a copy."""
    parts = values_N.split([tensor.numel() for tensor in like])
    return [part.view_as(tensor) for part, tensor in zip(parts, like, strict=True)]


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, hyper: OptimStep
) -> dict[str, float]:
    """Change `parameters` and `moments` by one step; return its metrics. `gradients` stay as they are.

    `grad_norm` is the norm before clipping.

    Raises:
        InvalidRequest: the gradient or the step isn't finite; nothing was changed.
    """
    params_N, grads_N = _flat(parameters), _flat(gradients)
    grad_norm = _norm(grads_N)
    if not math.isfinite(grad_norm):
        raise InvalidRequest(f"the gradient norm is not finite ({grad_norm}); the step was refused")
    is_clipped = 0.0 < hyper.grad_clip_norm < grad_norm
    if is_clipped:
        grads_N *= hyper.grad_clip_norm / grad_norm
    avg_N, avg_sq_N = _new_moments(grads_N, moments, hyper)
    new_N = _new_parameters(params_N, avg_N, avg_sq_N, moments.step + 1, hyper)
    update_norm = _norm(new_N - params_N)
    if not math.isfinite(update_norm) or not _all_finite(avg_sq_N):
        raise InvalidRequest(
            f"the step is not finite (update norm {update_norm}, gradient norm {grad_norm}, "
            f"learning_rate {hyper.learning_rate}); it was refused"
        )
    torch._foreach_copy_(list(parameters), _cut(new_N, parameters))
    moments.exp_avg, moments.exp_avg_sq = _cut(avg_N, parameters), _cut(avg_sq_N, parameters)
    moments.step += 1
    return {
        "grad_norm": grad_norm,
        "clipped": float(is_clipped),
        "update_norm": update_norm,
        "step": float(moments.step),
        "learning_rate": float(hyper.learning_rate),
    }


def _new_moments(grads_N: Tensor, moments: Moments, hyper: OptimStep) -> tuple[Tensor, Tensor]:
    """Return the moments after this gradient, as new vectors."""
    avg_N = _flat(moments.exp_avg) if moments.exp_avg else torch.zeros_like(grads_N)
    avg_sq_N = _flat(moments.exp_avg_sq) if moments.exp_avg_sq else torch.zeros_like(grads_N)
    avg_N.lerp_(grads_N, 1.0 - hyper.beta1)
    avg_sq_N.mul_(hyper.beta2).addcmul_(grads_N, grads_N, value=1.0 - hyper.beta2)
    return avg_N, avg_sq_N


def _new_parameters(params_N: Tensor, avg_N: Tensor, avg_sq_N: Tensor, step: int, hyper: OptimStep) -> Tensor:
    """Return the parameters after step number `step`, as a new vector."""
    correction1 = 1.0 - hyper.beta1**step
    correction2 = 1.0 - hyper.beta2**step
    scale, decay = hyper.learning_rate / correction1, 1.0 - hyper.learning_rate * hyper.weight_decay
    if max(abs(scale), abs(decay)) > torch.finfo(torch.float32).max:
        raise InvalidRequest(f"learning_rate {hyper.learning_rate} leaves the range of float32; the step was refused")
    denominators_N = avg_sq_N.sqrt().div_(math.sqrt(correction2)).add_(hyper.eps)
    return (params_N * decay).addcdiv_(avg_N, denominators_N, value=-scale)
