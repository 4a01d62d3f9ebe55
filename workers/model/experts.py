"""A frozen stack of experts that adds, to each expert, what the adapters of many runs ask for.

Transformers keeps the experts of a layer in two tensors, gate and up fused. An adapter sees three projections of each
expert, as in a dense layer: `gate_proj`, `up_proj`, `down_proj`. The router isn't adapted.

Every run's tokens go through the experts by themselves. Which expert a token goes to depends on its numbers, so in one
shared product a run's tokens would lie beside others for each choice that a neighbour makes.

Axes: `S` tokens of a segment, `N` tokens of it that go to one expert, `K` experts of a token, `E` experts, `I` inputs,
`M` inner size, `R` rank.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from openrl.workers.model.lora import Adapter, current_route, segments_over

PARTS = ("gate_proj", "up_proj", "down_proj")
# The factors of one projection: A and B of each expert, and the scale.
_Factors = tuple[Sequence[Tensor], Sequence[Tensor], float] | None


class MultiLoraExperts(nn.Module):
    """`down(act(gate(x)) * up(x))` of the chosen experts, weighted and summed, with the current routing's adapters."""

    def __init__(self, experts: nn.Module, name: str) -> None:
        """Take over the tensors of transformers' experts: gate_up_proj [E, 2M, I], down_proj [E, I, M]."""
        super().__init__()
        self.name = name
        self.gate_up_proj = cast(nn.Parameter, experts.gate_up_proj)
        self.down_proj = cast(nn.Parameter, experts.down_proj)
        self.act_fn = cast(nn.Module, experts.act_fn)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Path of each projection -> (experts, inputs, outputs)."""
        number, inputs, inner = self.down_proj.shape
        gate, up, down = (f"{self.name}.{part}" for part in PARTS)
        return {gate: (number, inputs, inner), up: (number, inputs, inner), down: (number, inner, inputs)}

    def forward(self, x_TI: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """[T, I] -> [T, I]; `chosen_TK` are numbers of experts, `weights_TK` what their outputs count."""
        segments = segments_over(current_route(), len(x_TI))
        sizes = [segment.stop - segment.start for segment in segments]
        pieces = zip(segments, x_TI.split(sizes), chosen_TK.split(sizes), weights_TK.split(sizes), strict=True)
        parts = [self._segment(segment.adapter, *piece) for segment, *piece in pieces]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _segment(self, adapter: Adapter | None, x_SI: Tensor, chosen_SK: Tensor, weights_SK: Tensor) -> Tensor:
        gate, up, down = (self._factors(adapter, part) for part in PARTS)
        sum_SI = torch.zeros_like(x_SI)
        for expert in chosen_SK.unique().tolist():
            rows_N, places_N = torch.where(chosen_SK == expert)
            x_NI = x_SI[rows_N]
            gate_NM, up_NM = linear(x_NI, self.gate_up_proj[expert]).chunk(2, -1)
            gate_NM, up_NM = _added(gate_NM, x_NI, gate, expert), _added(up_NM, x_NI, up, expert)
            inner_NM = self.act_fn(gate_NM) * up_NM
            y_NI = _added(linear(inner_NM, self.down_proj[expert]), inner_NM, down, expert)
            sum_SI = sum_SI.index_add(0, rows_N, (y_NI * weights_SK[rows_N, places_N, None]).to(x_SI.dtype))
        return sum_SI

    def _factors(self, adapter: Adapter | None, part: str) -> _Factors:
        """One stack's factors, taken apart once: in backward, slices one by one would each cost a whole stack."""
        factors = adapter.factors(f"{self.name}.{part}") if adapter is not None else None
        return None if factors is None else (factors[0].unbind(), factors[1].unbind(), factors[2])


def _added(y_NO: Tensor, x_NI: Tensor, factors: _Factors, expert: int) -> Tensor:
    """`y_NO` plus the adapter's share of one expert; rounded to the base's dtype on use, as in `lora`."""
    if factors is None:
        return y_NO
    a_RI, b_OR = factors[0][expert].to(x_NI.dtype), factors[1][expert].to(x_NI.dtype)
    return torch.addmm(y_NO, x_NI @ a_RI.t(), b_OR.t(), alpha=factors[2])
