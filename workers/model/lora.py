"""Adapters of many runs in one forward.

Tokens of all runs lie on one packed axis `T`; segments of it name their adapter. Each adapted module computes
its frozen base once for all tokens, and each segment then gets its own adapter's share, so that no run's numbers
or gradients can depend on who else is in the pass. An adapter that owns no segment is not part of the graph: its
gradients stay None.

Axes: `T` packed tokens, `S` tokens of a segment, `R` rank, `I` inputs, `O` outputs. Everything is computed in the
base's dtype: float32 on a CPU; on a bfloat16 base the float32 factors are rounded on use, and their gradients
are float32 again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from openrl.workers.weights.adapter import Adapter

__all__ = ["Adapter", "MultiLoraLinear", "Segment", "routing"]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of the packed axis use `adapter`; None is the base alone."""

    start: int
    stop: int
    adapter: Adapter | None


_ROUTE: ContextVar[tuple[Segment, ...]] = ContextVar("openrl_route", default=())


@contextmanager
def routing(segments: Sequence[Segment]) -> Iterator[None]:
    """Within the `with`, adapted modules obey `segments`, which are in order and don't overlap.

    Tokens between or behind them get the base alone.
    """
    token = _ROUTE.set(_route(segments))
    try:
        yield
    finally:
        _ROUTE.reset(token)


class MultiLoraLinear(nn.Module):
    """A frozen linear layer that adds what the current `routing` asks for."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the leading axes together are `T`."""
        y = nn.functional.linear(x, self.weight, self.bias)
        route = _ROUTE.get()
        if not route:
            return y
        return adapted(self.name, x.reshape(-1, self.in_features), y.view(-1, self.out_features), route).view_as(y)


def adapted(name: str, x_TI: Tensor, y_TO: Tensor, segments: Sequence[Segment]) -> Tensor:
    """`y_TO` plus every segment's own `scale * x A^T B^T` for the module `name`.

    Without gradients `y_TO` itself is changed. `segments` are in order, without overlap.
    """
    if segments and segments[-1].stop > y_TO.shape[0]:
        raise ValueError(f"segments end at {segments[-1].stop}, there are {y_TO.shape[0]} tokens")
    if not torch.is_grad_enabled():
        for segment in segments:
            if segment.adapter is not None and (factors := segment.adapter.factors(name)) is not None:
                _add(y_TO[segment.start : segment.stop], x_TI[segment.start : segment.stop], *factors, inplace=True)
        return y_TO
    return _with_gradients(name, x_TI, y_TO, segments)


def _with_gradients(name: str, x_TI: Tensor, y_TO: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Split once and join once: slices taken one by one would each cost a whole [T, O] in backward."""
    if len(segments) == 1 and segments[0].adapter is not None and segments[0].stop - segments[0].start == len(y_TO):
        factors = segments[0].adapter.factors(name)
        return y_TO if factors is None else _add(y_TO, x_TI, *factors, inplace=False)
    owners = [s.adapter.factors(name) if s.adapter is not None else None for s in segments]
    if all(factors is None for factors in owners):
        return y_TO
    sizes: list[int] = []
    pieces: list[tuple[Tensor, Tensor, float] | None] = []
    position = 0
    for segment, factors in zip(segments, owners, strict=True):
        if segment.start > position:
            sizes.append(segment.start - position)
            pieces.append(None)
        sizes.append(segment.stop - segment.start)
        pieces.append(factors)
        position = segment.stop
    if position < y_TO.shape[0]:
        sizes.append(y_TO.shape[0] - position)
        pieces.append(None)
    parts = [
        y_SO if factors is None else _add(y_SO, x_SI, *factors, inplace=False)
        for x_SI, y_SO, factors in zip(x_TI.split(sizes), y_TO.split(sizes), pieces, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add(y_SO: Tensor, x_SI: Tensor, a_RI: Tensor, b_OR: Tensor, scale: float, *, inplace: bool) -> Tensor:
    h_SR = x_SI @ a_RI.to(x_SI.dtype).t()
    b_RO = b_OR.to(x_SI.dtype).t()
    if inplace:
        return y_SO.addmm_(h_SR, b_RO, alpha=scale)
    return torch.addmm(y_SO, h_SR, b_RO, alpha=scale)


def _route(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Neighbours of one adapter joined, those of the base alone left out."""
    merged: list[Segment] = []
    position = 0
    for segment in segments:
        if segment.start < position or segment.stop < segment.start:
            raise ValueError(f"segment [{segment.start}, {segment.stop}) overlaps the one before, or is reversed")
        position = segment.stop
        if segment.adapter is None or segment.stop == segment.start:
            continue
        if merged and merged[-1].adapter is segment.adapter and merged[-1].stop == segment.start:
            merged[-1] = Segment(merged[-1].start, segment.stop, segment.adapter)
        else:
            merged.append(segment)
    return tuple(merged)
