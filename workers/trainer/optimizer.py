"""AdamW with decoupled weight decay and bias correction: one step is one function.

Knows lists of tensors, not adapters. A step either happens as a whole or changes nothing: it is computed first to see
that it is finite. A run that lies in vectors on a CPU is then computed again in place (`stepping`); otherwise all new
values are made, checked and only then written. Parameters, moments and gradients are float32. Computes on vectors of
all `N` values (`vectors`): one operation for each of many small tensors would cost several times as much. After
Loshchilov and Hutter 2019, "Decoupled Weight Decay Regularization".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import OptimStep
from openrl.workers.model import stepping
from openrl.workers.trainer.vectors import (
    Parts,
    add,
    all_finite,
    laid_out,
    norm,
    parts,
    room_of,
    vector_of,
    zeros_like,
)

PIECE = 16 << 20
"""Values that a step over many works on at once: 64 MB each of parameters, gradients and both moments."""


class HalfStepped(Exception):
    """A step broke while it was being written: parameters and moments are neither those before it nor after it."""


@dataclass(slots=True)
class Moments:
    """AdamW's state for a list of parameters; the lists are empty before the first step."""

    exp_avg: Sequence[Tensor] = field(default_factory=list)
    exp_avg_sq: Sequence[Tensor] = field(default_factory=list)
    step: int = 0


def is_finite(tensors: Sequence[Tensor]) -> bool:
    """Tell whether no value is NaN or infinite."""
    if room_of(tensors) > PIECE and not isinstance(tensors, Parts):  # too much to copy
        return all(all_finite(tensor) for tensor in tensors if tensor.numel())
    return not tensors or all_finite(vector_of(tensors))


@torch.no_grad()
def adamw_step(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, hyper: OptimStep
) -> dict[str, float]:
    """Change `parameters` and `moments` by one step; return its metrics. `gradients` stay as they are.

    `grad_norm` is the norm before clipping.

    Raises:
        InvalidRequest: the gradient or the step isn't finite; nothing was changed.
    """
    values_N, grads_N = vector_of(parameters), vector_of(gradients)
    if isinstance(parameters, Parts) and stepping.serves(values_N, grads_N):
        return _step_in_place(parameters, gradients, moments, hyper)
    grad_norm, is_clipped = _clipping(norm(grads_N), hyper)
    if is_clipped:
        grads_N = grads_N * (hyper.grad_clip_norm / grad_norm)
    avg_N = vector_of(moments.exp_avg).clone() if moments.exp_avg else torch.zeros_like(grads_N)
    avg_sq_N = vector_of(moments.exp_avg_sq).clone() if moments.exp_avg_sq else torch.zeros_like(grads_N)
    updates_N = _stepped(values_N, grads_N, avg_N, avg_sq_N, moments.step, hyper).sub_(values_N)
    update_norm = norm(updates_N)
    _require_finite(update_norm, all_finite(avg_sq_N), grad_norm, hyper)
    add(parameters, parts(updates_N, gradients))
    moments.exp_avg, moments.exp_avg_sq = parts(avg_N, gradients), parts(avg_sq_N, gradients)
    moments.step += 1
    return _metrics(grad_norm, update_norm, moments, hyper, is_clipped=is_clipped)


def _step_in_place(
    parameters: Parts, gradients: Sequence[Tensor], moments: Moments, hyper: OptimStep
) -> dict[str, float]:
    """Do as `adamw_step` does, without vectors for what is new."""
    values_N, grads_N = parameters.whole, vector_of(gradients)
    grad_norm, is_clipped = _clipping(math.sqrt(stepping.square_sum(grads_N)), hyper)
    avg, avg_sq = (
        _laid_out(each) if each else zeros_like(parameters) for each in (moments.exp_avg, moments.exp_avg_sq)
    )
    scale, decay = _scale_and_decay(moments.step, hyper)
    by = stepping.Factors(
        clip=hyper.grad_clip_norm / grad_norm if is_clipped else 1.0,
        decay=1.0 - decay,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        scale=scale,
        root=math.sqrt(1.0 - hyper.beta2 ** (moments.step + 1)),
        eps=hyper.eps,
    )
    vectors = values_N, grads_N, avg.whole, avg_sq.whole
    squares, is_finite = stepping.looked_at(*vectors, by)
    update_norm = math.sqrt(squares)
    _require_finite(update_norm, is_finite, grad_norm, hyper)
    stepping.take(*vectors, by)
    moments.exp_avg, moments.exp_avg_sq = avg, avg_sq
    moments.step += 1
    return _metrics(grad_norm, update_norm, moments, hyper, is_clipped=is_clipped)


@torch.no_grad()
def adamw_step_in_pieces(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Moments,
    hyper: OptimStep,
    *,
    offloads: bool = False,
    piece: int = PIECE,
) -> dict[str, float]:
    """Do as `adamw_step`, for parameters that are too many to be copied: a piece of `piece` values at a time.

    Each piece is computed twice: first all of them to see that the step is finite, then to take it. `offloads`:
    moments lie in host memory, and pass by the parameters' device piece by piece. The same `piece` gives the same bits.

    Raises:
        InvalidRequest: the gradient or the step isn't finite; nothing was changed.
        HalfStepped: the second time broke; parameters and moments must not be used any more. Any other error comes
            before the first change.
    """
    norms = (norm(part) for tensor in gradients for part in tensor.reshape(-1).split(piece))
    grad_norm, is_clipped = _clipping(math.hypot(*norms), hyper)
    clip = hyper.grad_clip_norm / grad_norm if is_clipped else 1.0
    given = moments
    if not moments.exp_avg:
        both = [[_empty(tensor, offloads) for tensor in parameters] for _ in range(2)]
        given = Moments(exp_avg=both[0], exp_avg_sq=both[1])

    def stepped() -> Iterator[tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]:
        """Yield the old values of each piece, as views of where they lie, and its new ones."""
        for old_N, grad_N, avg_N, avg_sq_N in _pieces(parameters, gradients, given, piece):
            near = [each.to(old_N.device, copy=True) for each in (avg_N, avg_sq_N)]
            new_N = _stepped(old_N, grad_N * clip, near[0], near[1], moments.step, hyper)
            yield (old_N, avg_N, avg_sq_N), (new_N, near[0], near[1])

    squares, are_finite = [], True
    for old, new in stepped():
        squares.append(norm(new[0] - old[0]))
        are_finite &= all_finite(new[2])
    update_norm = math.hypot(*squares)
    _require_finite(update_norm, are_finite, grad_norm, hyper)
    try:
        for old, new in stepped():
            for to_N, from_N in zip(old, new, strict=True):
                to_N.copy_(from_N)
    except Exception as error:
        raise HalfStepped("the step broke while it was being written") from error
    moments.exp_avg, moments.exp_avg_sq = given.exp_avg, given.exp_avg_sq
    moments.step += 1
    return _metrics(grad_norm, update_norm, moments, hyper, is_clipped=is_clipped)


def _laid_out(tensors: Sequence[Tensor]) -> Parts:
    return tensors if isinstance(tensors, Parts) else laid_out(tensors)


def _clipping(grad_norm: float, hyper: OptimStep) -> tuple[float, bool]:
    """Return the gradient's norm, and whether it is clipped."""
    if not math.isfinite(grad_norm):
        raise InvalidRequest(f"the gradient norm is not finite ({grad_norm}); the step was refused")
    return grad_norm, 0.0 < hyper.grad_clip_norm < grad_norm


def _require_finite(update_norm: float, are_moments: bool, grad_norm: float, hyper: OptimStep) -> None:
    if not math.isfinite(update_norm) or not are_moments:
        raise InvalidRequest(
            f"the step is not finite (update norm {update_norm}, gradient norm {grad_norm}, "
            f"learning_rate {hyper.learning_rate}); it was refused"
        )


def _scale_and_decay(step: int, hyper: OptimStep) -> tuple[float, float]:
    """Return what the update of one more step than `step`, and what the parameters, are multiplied with."""
    scale, decay = hyper.learning_rate / (1.0 - hyper.beta1 ** (step + 1)), hyper.learning_rate * hyper.weight_decay
    if max(abs(scale), abs(1.0 - decay)) > torch.finfo(torch.float32).max:
        raise InvalidRequest(f"learning_rate {hyper.learning_rate} leaves the range of float32; the step was refused")
    return scale, decay


def _pieces(
    parameters: Sequence[Tensor], gradients: Sequence[Tensor], moments: Moments, piece: int
) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of each parameter with its gradient and both moments, as views of what they are parts of."""
    for together in zip(parameters, gradients, moments.exp_avg, moments.exp_avg_sq, strict=True):
        yield from zip(*(tensor.reshape(-1).split(piece) for tensor in together), strict=True)


def _empty(like: Tensor, offloads: bool) -> Tensor:
    """Return a moment before the first step: pinned host memory where it is offloaded from a GPU."""
    if not offloads:
        return torch.zeros_like(like, requires_grad=False)
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _metrics(
    grad_norm: float, update_norm: float, moments: Moments, hyper: OptimStep, *, is_clipped: bool
) -> dict[str, float]:
    return {
        "grad_norm": grad_norm,
        "clipped": float(is_clipped),
        "update_norm": update_norm,
        "step": float(moments.step),
        "learning_rate": float(hyper.learning_rate),
    }


def _stepped(values_N: Tensor, grads_N: Tensor, avg_N: Tensor, avg_sq_N: Tensor, step: int, hyper: OptimStep) -> Tensor:
    """Return the values after one more step than `step`, as a new vector; the moments are changed in place."""
    _scale_and_decay(step, hyper)
    new_N = values_N.clone()
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
