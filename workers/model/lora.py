"""Adapters of many runs in one forward.

Tokens of all runs lie on one packed axis `T`; segments of it name their adapter. Each adapted module computes its
frozen base once for all tokens, and each segment then gets its own adapter's share, so that no run's numbers or
gradients can depend on who else is in the pass. An adapter that owns no segment is not part of the graph: its gradients
stay None. Where an accelerator multiplies groups (`grouped`), those shares are a few products for all; for float32 on a
CPU they are compiled loops (`narrow`).

Axes: `T` packed tokens, `S` tokens of a segment, `R` rank, `I` inputs, `O` outputs. Everything is computed in the
base's dtype: float32 on a CPU; on a bfloat16 base the float32 factors are rounded on use, and their gradients
are float32 again.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openrl.workers.model import grouped, products
from openrl.workers.model.segments import Segment, joined, require_within, segments_over
from openrl.workers.weights.adapter import Adapter

__all__ = ["Adapter", "MultiLoraLinear", "Segment", "current_route", "joined", "routing", "segments_over"]


_ROUTE: ContextVar[tuple[Segment, ...]] = ContextVar("openrl_route", default=())


@contextmanager
def routing(segments: Sequence[Segment]) -> Iterator[None]:
    """Within the `with`, adapted modules obey `segments`, which are in order and don't overlap.

    Tokens between or behind them get the base alone.
    """
    token = _ROUTE.set(joined(segments))
    try:
        yield
    finally:
        _ROUTE.reset(token)


def current_route() -> tuple[Segment, ...]:
    """The segments that have an adapter, within a `routing`; elsewhere none."""
    return _ROUTE.get()


class MultiLoraLinear(nn.Module):
    """A frozen linear layer that adds what the current `routing` asks for."""

    def __init__(self, linear: nn.Linear, name: str) -> None:
        super().__init__()
        self.name = name
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]; the leading axes together are `T`."""
        if not (route := _ROUTE.get()):
            return nn.functional.linear(x, self.weight, self.bias)
        y_TO = adapted(self.name, x.reshape(-1, self.in_features), self.weight, self.bias, route)
        return y_TO.view(*x.shape[:-1], self.out_features)


def adapted(name: str, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, segments: Sequence[Segment]) -> Tensor:
    """The linear layer's [T, O] plus every segment's own `scale * x A^T B^T` for the module `name`.

    `segments` are in order, without overlap; those of one adapter don't have to be neighbours. The frozen base has
    no gradient.
    """
    require_within(segments, x_TI.shape[0])
    spans, factors = shares(name, segments)
    if torch.is_grad_enabled() and spans:
        result: Tensor = _Adapted.apply(x_TI, weight_OI, bias_O, spans, *factors)
        return result
    multiplied = nn.functional.linear if torch.is_grad_enabled() else products.product
    y_TO = multiplied(x_TI, weight_OI, bias_O)
    if grouped.serves(x_TI, len(weight_OI), len(spans), (a_RI.shape[0] for a_RI in factors[::2])):
        grouped.Groups(x_TI, len(weight_OI), spans, factors).add(y_TO, x_TI)
    else:
        add_shares(y_TO, x_TI, spans, factors)
    return y_TO


def shares(name: str, segments: Sequence[Segment]) -> tuple[grouped.Spans, list[Tensor]]:
    """Return where the module `name` has an adapter, with its scale, and the A and B of each."""
    spans, factors = [], []
    for segment in segments:
        if segment.adapter is not None and (found := segment.adapter.factors(name)) is not None:
            a_RI, b_OR, scale = found
            spans.append((segment.start, segment.stop, scale))
            factors += [a_RI, b_OR]
    return tuple(spans), factors


def add_shares(y_TO: Tensor, x_TI: Tensor, spans: grouped.Spans, factors: Sequence[Tensor]) -> list[Tensor]:
    """Add each span's `scale * x A^T B^T` to `y_TO`; return what `share_gradients` needs of it."""
    from openrl.workers.model import narrow  # only here: it loads numba, and vLLM's workers stumble over that

    if narrow.serves(x_TI, factors):
        return [narrow.add(y_TO, x_TI, spans, factors)]
    inner = []
    for number, (start, stop, scale) in enumerate(spans):
        x_SI = _rows(x_TI, start, stop)
        h_RS = torch.mm(_in(x_SI.dtype, factors[2 * number]), x_SI.t())
        _rows(y_TO, start, stop).addmm_(h_RS.t(), _in(x_SI.dtype, factors[2 * number + 1]).t(), alpha=scale)
        inner.append(h_RS)
    return inner


def share_gradients(
    dy_TO: Tensor,
    x_TI: Tensor,
    spans: grouped.Spans,
    factors: Sequence[Tensor],
    inner: Sequence[Tensor],
    dx_TI: Tensor | None,
    into: Sequence[Tensor] = (),
) -> list[Tensor]:
    """Return the gradients of each span's A and B, in the factors' dtype; add what comes through them to `dx_TI`.

    `into`: where they are added, in the order of the factors; else they come in memory of their own.
    """
    from openrl.workers.model import narrow  # only here: it loads numba, and vLLM's workers stumble over that

    if narrow.serves(x_TI, factors):
        return narrow.gradients(dy_TO, x_TI, spans, factors, inner[0], dx_TI, into)
    gradients = []
    for number, ((start, stop, scale), h_RS) in enumerate(zip(spans, inner, strict=True)):
        dy_SO, dtype = _rows(dy_TO, start, stop), factors[2 * number].dtype
        a_RI, b_RO = _in(dy_SO.dtype, factors[2 * number]), _in(dy_SO.dtype, factors[2 * number + 1]).t()
        dh_RS = torch.mm(b_RO, dy_SO.t())
        if dx_TI is not None:
            _rows(dx_TI, start, stop).addmm_(dh_RS.t(), a_RI, alpha=scale)
        # With beta 0 what is added to counts for nothing: a product times `scale`.
        da_RI = torch.addmm(a_RI, dh_RS, _rows(x_TI, start, stop), beta=0, alpha=scale)
        db_RO = torch.addmm(b_RO, h_RS, dy_SO, beta=0, alpha=scale)
        gradients += [_in(dtype, da_RI), _in(dtype, db_RO).t()]
    if into:
        torch._foreach_add_(list(into), gradients)
        return list(into)
    return gradients


def _rows(all_T: Tensor, start: int, stop: int) -> Tensor:
    """Return the rows [start, stop); where they are all, what was given: on a short pass a view is not for free."""
    return all_T if stop - start == all_T.size(0) else all_T[start:stop]  # `len` of a tensor is slow Python


def _in(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    """Return the tensor in this dtype; nothing is asked of torch where it is there already."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


class _Adapted(torch.autograd.Function):
    """One node of the graph for base and adapters: nothing is split or joined, and no gradient is summed up twice.

    Where torch multiplies, a product with one narrow side runs several times faster on a CPU when that side is its
    first, so what is of rank `R` is kept as [R, S]: of 1,024 tokens and 1,536 features at rank 8, dB takes 0.5 ms in
    place of 2.8."""

    @staticmethod
    def forward(
        ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, spans: grouped.Spans, *factors: Tensor
    ) -> Tensor:
        y_TO = products.product(x_TI, weight_OI, bias_O)
        ctx.spans = spans
        ctx.is_grouped = grouped.serves(x_TI, len(weight_OI), len(spans), (a_RI.shape[0] for a_RI in factors[::2]))
        if ctx.is_grouped:
            h_TR = grouped.Groups(x_TI, len(weight_OI), spans, factors).add(y_TO, x_TI)
            ctx.save_for_backward(x_TI, weight_OI, *factors, h_TR)
            return y_TO
        inner = add_shares(y_TO, x_TI, spans, factors)
        ctx.save_for_backward(x_TI, weight_OI, *factors, *inner)
        return y_TO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, *rest = ctx.saved_tensors
        number = 2 * len(ctx.spans)
        factors, inner = rest[:number], rest[number:]
        dx_TI = products.product(dy_TO, weight_OI.t()) if ctx.needs_input_grad[0] else None
        if ctx.is_grouped:
            groups = grouped.Groups(x_TI, len(weight_OI), ctx.spans, factors)
            return dx_TI, None, None, None, *groups.gradients(dy_TO.contiguous(), x_TI, inner[0], dx_TI)
        return dx_TI, None, None, None, *share_gradients(dy_TO, x_TI, ctx.spans, factors, inner, dx_TI)
