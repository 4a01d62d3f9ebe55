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
from torch.optim.adamw import adamw

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
    grads_N = _flat(gradients)
    grad_norm = _norm(grads_N)
    if not math.isfinite(grad_norm):
        raise InvalidRequest(f"the gradient norm is not finite ({grad_norm}); the step was refused")
    is_clipped = 0.0 < hyper.grad_clip_norm < grad_norm
    if is_clipped:
        grads_N *= hyper.grad_clip_norm / grad_norm
    avg_N = _flat(moments.exp_avg) if moments.exp_avg else torch.zeros_like(grads_N)
    avg_sq_N = _flat(moments.exp_avg_sq) if moments.exp_avg_sq else torch.zeros_like(grads_N)
    updates_N = _stepped(parameters, grads_N, avg_N, avg_sq_N, moments.step, hyper)
    updates = _cut(updates_N, parameters)
    torch._foreach_sub_(updates, list(parameters))
    update_norm = _norm(updates_N)
    if not math.isfinite(update_norm) or not _all_finite(avg_sq_N):
        raise InvalidRequest(
            f"the step is not finite (update norm {update_norm}, gradient norm {grad_norm}, "
            f"learning_rate {hyper.learning_rate}); it was refused"
        )
    torch._foreach_add_(list(parameters), updates)
    moments.exp_avg, moments.exp_avg_sq = _cut(avg_N, parameters), _cut(avg_sq_N, parameters)
    moments.step += 1
    return {
        "grad_norm": grad_norm,
        "clipped": float(is_clipped),
        "update_norm": update_norm,
        "step": float(moments.step),
        "learning_rate": float(hyper.learning_rate),
    }


def _stepped(
    parameters: Sequence[Tensor], grads_N: Tensor, avg_N: Tensor, avg_sq_N: Tensor, step: int, hyper: OptimStep
) -> Tensor:
    """Return the parameters after one more step than `step`, as a new vector; the moments are changed in place."""
    scale, decay = hyper.learning_rate / (1.0 - hyper.beta1 ** (step + 1)), hyper.learning_rate * hyper.weight_decay
    if max(abs(scale), abs(1.0 - decay)) > torch.finfo(torch.float32).max:
        raise InvalidRequest(f"learning_rate {hyper.learning_rate} leaves the range of float32; the step was refused")
    new_N = _flat(parameters)
    adamw(
        [new_N],
        [grads_N],
        [avg_N],
        [avg_sq_N],
        [],
        [torch.tensor(float(step), device=new_N.device)],
        fused=True,
        amsgrad=False,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.learning_rate,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=False,
    )
    return new_N
