"""One layer of a decoder of the usual form: its forward, and its own backward.

Attention and MLP, each behind a norm and beside a residual, as transformers has them. The forward keeps what the
backward needs and no more. Attention is `short`'s or, where that doesn't serve, autograd's, so that any rule of it is
right; rows by themselves are `rows`', what adapters add `layer_adapters`'. Knows neither the layers beside it nor who
asks. Weights are frozen and read where they lie.

Axes: `T` packed tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E` head size, `I` inputs,
`O` outputs, `F` the inner size of the MLP.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from openrl.workers.model import products, rows, short
from openrl.workers.model.attention import Attend, Rule
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.layer_adapters import LayerAdapters, OfTensors, OnSheet
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import MultiLoraLinear
from openrl.workers.model.narrow import Sheet
from openrl.workers.model.rotary import Rotation
from openrl.workers.model.rows import HeadNorms, Heads, Normed
from openrl.workers.model.segments import Segment


class Common(NamedTuple):
    """What all layers of a pass share."""

    rotation: Rotation
    lengths: Sequence[int]
    """Of the sequences, one behind another."""
    attend: Attend
    recomputes: bool
    records: bool
    """Whether a backward may follow."""


class Attended(Protocol):
    """Attention, as its backward needs it."""

    out_THE: Tensor  # noqa: N815

    def gradient(self, dout_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of queries [T, H, E], keys and values [T, K, E]."""


class Kept(NamedTuple):
    """What a layer's backward needs beside the adapters' factors."""

    normed: Normed
    """Of the input; each [T, D]."""
    heads: Heads
    attended: Attended
    seen: Tensor
    """What attention gave [T, H * E]."""
    mlp_normed: Normed
    """Each [T, D]."""
    gate: Tensor
    """[T, F]."""
    up: Tensor
    """[T, F]."""
    down_in: Tensor
    """[T, F]."""


Q, K, V, O, GATE, UP, DOWN = range(7)  # noqa: E741  # the letters of the field


class Layer:
    """One layer's modules: attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, number: int, layer: Any, loaded: LoadedModel) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._linears: tuple[MultiLoraLinear, ...] = (
            attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj,
        )  # fmt: skip
        self._norm, self._mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self._attention = attn
        self._rule = Rule.of(attn, loaded.arch)
        self._head_dim: int = attn.head_dim

    @property
    def names(self) -> list[str]:
        """What the linear layers are called."""
        return [linear.name for linear in self._linears]

    def adapters(
        self, route: Sequence[Segment], sheet: Sheet | None, gathering: Gathering[Any] | None
    ) -> LayerAdapters:
        """Return what the adapters have here, by the `sheet` of all layers where there is one."""
        if sheet is not None:
            return OnSheet(sheet, self._number * len(self._linears), len(self._linears))
        return OfTensors(self.names, route, gathering)

    def forward(self, x_TD: Tensor, here: Common, adapted: LayerAdapters, *, keeps_graph: bool) -> tuple[Tensor, Kept]:
        """[T, D] -> [T, D], and what backward needs; attention's part of it only if it `keeps_graph`."""
        normed = rows.normed(x_TD, self._norm.weight, self._norm.eps)
        q_TO, k_TO, v_TO = (self._product(which, normed.y, adapted) for which in (Q, K, V))
        heads = rows.heads(q_TO, k_TO, here.rotation, HeadNorms.of(self._attention))
        attended = self._attend(here, heads, v_TO.unflatten(1, (-1, self._head_dim)), keeps_graph)
        seen_TO = attended.out_THE.flatten(1)
        x_TD = self._added(O, x_TD, seen_TO, adapted)
        mlp_normed = rows.normed(x_TD, self._mlp_norm.weight, self._mlp_norm.eps)
        gate_TF, up_TF = (self._product(which, mlp_normed.y, adapted) for which in (GATE, UP))
        z_TF = rows.gated(gate_TF, up_TF)
        kept = Kept(normed, heads, attended, seen_TO, mlp_normed, gate_TF, up_TF, z_TF)
        return self._added(DOWN, x_TD, z_TF, adapted), kept

    def backward(
        self, dy_TD: Tensor, here: Common, adapted: LayerAdapters, kept: Kept, *, wants_input: bool
    ) -> Tensor | None:
        """Gradient of the output [T, D] -> of the input, if that is wanted; those of the factors go to `adapted`."""
        dz_TF = self._back(DOWN, dy_TD, kept.down_in, adapted)
        dgate_TF, dup_TF = rows.gated_gradient(dz_TF, kept.gate, kept.up)
        mlp_in_TD = kept.mlp_normed.y
        din_TD = self._back(GATE, dgate_TF, mlp_in_TD, adapted)
        din_TD = self._back(UP, dup_TF, mlp_in_TD, adapted, din_TD)
        dx_TD = rows.norm_gradient(din_TD, kept.mlp_normed, self._mlp_norm.weight, dy_TD)
        if not (wants_input or adapted.has(Q, K, V, O)):
            return None
        dseen_TO = self._back(O, dx_TD, kept.seen, adapted)
        dq_THE, dk_TKE, dv_TKE = kept.attended.gradient(dseen_TO.unflatten(1, (-1, self._head_dim)))
        dq_TO, dk_TO = rows.heads_gradient(dq_THE, dk_TKE, kept.heads, here.rotation, HeadNorms.of(self._attention))
        through = ((Q, dq_TO), (K, dk_TO), (V, dv_TKE.flatten(1)))
        if not wants_input:
            for which, dy_TO in through:
                adapted.back(which, dy_TO, kept.normed.y, None)
            return None
        sum_TD: Tensor | None = None
        for which, dy_TO in through:
            sum_TD = self._back(which, dy_TO, kept.normed.y, adapted, sum_TD)
        assert sum_TD is not None
        return rows.norm_gradient(sum_TD, kept.normed, self._norm.weight, dx_TD)

    def _product(self, which: int, x_TI: Tensor, adapted: LayerAdapters) -> Tensor:
        """Return what a linear layer gives."""
        linear = self._linears[which]
        out_TO = products.product(x_TI, linear.weight, linear.bias)
        adapted.add(which, x_TI, out_TO)
        return out_TO

    def _added(self, which: int, x_TO: Tensor, y_TI: Tensor, adapted: LayerAdapters) -> Tensor:
        """Return `x_TO` plus what a linear layer gives for `y_TI`."""
        linear = self._linears[which]
        out_TO = products.added(x_TO, y_TI, linear.weight, linear.bias)
        adapted.add(which, y_TI, out_TO)
        return out_TO

    def _back(
        self, which: int, dy_TO: Tensor, x_TI: Tensor, adapted: LayerAdapters, dx_TI: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of a linear layer's input, plus `dx_TI` where that is given."""
        weight_IO = self._linears[which].weight.t()
        dx_TI = products.product(dy_TO, weight_IO) if dx_TI is None else products.added(dx_TI, dy_TO, weight_IO)
        adapted.back(which, dy_TO, x_TI, dx_TI)
        return dx_TI

    def _attend(self, here: Common, heads: Heads, v_TKE: Tensor, keeps_graph: bool) -> Attended:
        if short.serves(heads.q, here.lengths, self._rule):
            return short.Short(heads.q, heads.k, v_TKE, here.lengths, self._rule.scale)
        return _ByAutograd(here.attend, self._number, heads, v_TKE, self._rule, keeps_graph=keeps_graph)


class _ByAutograd:
    """Attention by any rule: its gradient is autograd's."""

    def __init__(
        self, attend: Attend, number: int, heads: Heads, v_TKE: Tensor, rule: Rule, *, keeps_graph: bool
    ) -> None:
        q, k, v = (each.transpose(0, 1)[None].requires_grad_(keeps_graph) for each in (heads.q, heads.k, v_TKE))
        with torch.set_grad_enabled(keeps_graph):
            self._seen = attend(number, q, k, v, rule)
        self._ends = q, k, v
        self.out_THE = self._seen.detach()[0].transpose(0, 1)

    def gradient(self, dout_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(self._seen, self._ends, dout_THE.transpose(0, 1)[None])
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
