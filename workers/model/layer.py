"""One layer of a decoder of the usual form: its forward, and its own backward.

Attention and MLP, each behind a norm and beside a residual, as transformers has them. The forward keeps what the
backward needs and no more; attention alone is left to autograd, so that any rule of it serves. What an adapter adds to
a product, and its gradients, are `lora`'s. Knows neither the layers beside it nor who asks. Weights are frozen and read
where they lie.

Axes: `T` packed tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E` head size, `I` inputs,
`O` outputs, `F` the inner size of the MLP.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrl.workers.model import lora, norms, products
from openrl.workers.model.attention import Attend, Rule
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.grouped import Spans
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import MultiLoraLinear, Segment
from openrl.workers.model.rotary import Rotation


class Common(NamedTuple):
    """What all layers of a pass share."""

    rotation: Rotation
    attend: Attend
    recomputes: bool
    records: bool
    """Whether a backward may follow."""


class Kept(NamedTuple):
    """What a layer's backward needs beside the adapters' factors."""

    normal: Tensor
    """The input, normalized [T, D]."""
    factor: Tensor
    """What it was multiplied with, float32 [T, 1]."""
    attention_in: Tensor
    """[T, D]."""
    heads_normal: Tensor
    """Queries and keys, normalized [T, N, E]; empty where they aren't."""
    heads_factor: Tensor
    """[T, N, 1], or empty."""
    seen: Tensor
    """What attention gave [T, H * E]."""
    mlp_normal: Tensor
    """[T, D]."""
    mlp_factor: Tensor
    """[T, 1]."""
    mlp_in: Tensor
    """[T, D]."""
    gate: Tensor
    """[T, F]."""
    up: Tensor
    """[T, F]."""
    gated: Tensor
    """`silu(gate)` [T, F]."""
    down_in: Tensor
    """[T, F]."""


class Attended(NamedTuple):
    """Attention as autograd keeps it."""

    seen: Tensor
    """[1, H, T, E]."""
    queries: Tensor
    keys: Tensor
    values: Tensor


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
        self._head_norms = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None
        self._heads_weight_NE: Tensor | None = None  # a copy: what is frozen doesn't change
        self._rule = Rule.of(attn, loaded.arch)
        sizes = [linear.out_features for linear in self._linears[: V + 1]]
        self._head_dim: int = attn.head_dim
        self._num_heads = sizes[Q] // self._head_dim
        self._splits = sizes[Q], sizes[Q] + sizes[K], sum(sizes)

    def adapted(self, route: Sequence[Segment], gathering: Gathering | None) -> "Adapted":
        """Return what the adapters have here, and where their gradients go."""
        shares = [lora.shares(linear.name, route) for linear in self._linears]
        if gathering is None:
            return Adapted(shares)
        rooms = [gathering.of(segment.adapter) for segment in route if segment.adapter is not None]
        into = [[one for pairs in rooms for one in pairs.get(linear.name, ())] for linear in self._linears]
        return Adapted(shares, into)

    def forward(
        self, x_TD: Tensor, here: Common, adapted: "Adapted", *, records: bool
    ) -> tuple[Tensor, Kept, Attended]:
        """[T, D] -> [T, D], and what backward needs; attention's part of it only if that `records`."""
        normal_TD, factor_T1 = norms.normalized(x_TD, self._norm.eps)
        y_TD = normal_TD * self._norm.weight
        q_TO, k_TO, v_TO = (self._product(which, y_TD, adapted) for which in (Q, K, V))
        qk_TNE, v_TKE = (part.unflatten(1, (-1, self._head_dim)) for part in (torch.cat([q_TO, k_TO], 1), v_TO))
        heads_normal = heads_factor = x_TD.new_empty(0)
        if self._head_norms is not None:
            heads_normal, heads_factor = norms.normalized(qk_TNE, self._head_norms[0].eps)
            qk_TNE = heads_normal * self._heads_weight()
        attended = self._attend(here, here.rotation.turn(qk_TNE), v_TKE, records)
        seen_TO = attended.seen.detach()[0].transpose(0, 1).reshape(len(x_TD), -1)
        x_TD = self._added(O, x_TD, seen_TO, adapted)
        mlp_normal_TD, mlp_factor_T1 = norms.normalized(x_TD, self._mlp_norm.eps)
        y2_TD = mlp_normal_TD * self._mlp_norm.weight
        gate_TF, up_TF = (self._product(which, y2_TD, adapted) for which in (GATE, UP))
        gated_TF = nn.functional.silu(gate_TF)
        z_TF = gated_TF * up_TF
        kept = Kept(
            normal_TD, factor_T1, y_TD, heads_normal, heads_factor, seen_TO,
            mlp_normal_TD, mlp_factor_T1, y2_TD, gate_TF, up_TF, gated_TF, z_TF,
        )  # fmt: skip
        return self._added(DOWN, x_TD, z_TF, adapted), kept, attended

    def backward(
        self, dy_TD: Tensor, here: Common, adapted: "Adapted", kept: Kept, attended: Attended, *, wants_input: bool
    ) -> Tensor | None:
        """Gradient of the output [T, D] -> of the input, if that is wanted; those of the factors go to `adapted`."""
        dz_TF = self._back(DOWN, dy_TD, kept.down_in, adapted)
        dup_TF = dz_TF * kept.gated
        dgate_TF = torch.ops.aten.silu_backward(dz_TF.mul_(kept.up), kept.gate)
        din_TD = self._back(GATE, dgate_TF, kept.mlp_in, adapted)
        din_TD = self._back(UP, dup_TF, kept.mlp_in, adapted, din_TD)
        dx_TD = norms.gradient(din_TD, kept.mlp_normal, kept.mlp_factor, self._mlp_norm.weight, dy_TD)
        if not (wants_input or adapted.has(Q, K, V, O)):
            return None
        dseen_TO = self._back(O, dx_TD, kept.seen, adapted)
        dqk_TNE, dv_TO = self._attend_back(attended, dseen_TO)
        dqk_TNE = here.rotation.turn_back(dqk_TNE)
        if self._head_norms is not None:
            dqk_TNE = norms.gradient(dqk_TNE, kept.heads_normal, kept.heads_factor, self._heads_weight())
        dq_TO, dk_TO = dqk_TNE.flatten(1).tensor_split(self._splits[:1], 1)
        if not wants_input:
            for which, dy_TO in ((Q, dq_TO), (K, dk_TO), (V, dv_TO)):
                adapted.back(which, dy_TO, kept.attention_in, None)
            return None
        din_TD = self._back(Q, dq_TO, kept.attention_in, adapted)
        for which, dy_TO in ((K, dk_TO), (V, dv_TO)):
            din_TD = self._back(which, dy_TO, kept.attention_in, adapted, din_TD)
        return norms.gradient(din_TD, kept.normal, kept.factor, self._norm.weight, dx_TD)

    def _product(self, which: int, x_TI: Tensor, adapted: "Adapted") -> Tensor:
        """Return what a linear layer gives."""
        linear = self._linears[which]
        out_TO = products.product(x_TI, linear.weight, linear.bias)
        adapted.add(which, x_TI, out_TO)
        return out_TO

    def _added(self, which: int, x_TO: Tensor, y_TI: Tensor, adapted: "Adapted") -> Tensor:
        """Return `x_TO` plus what a linear layer gives for `y_TI`."""
        linear = self._linears[which]
        out_TO = products.added(x_TO, y_TI, linear.weight, linear.bias)
        adapted.add(which, y_TI, out_TO)
        return out_TO

    def _back(self, which: int, dy_TO: Tensor, x_TI: Tensor, adapted: "Adapted", dx_TI: Tensor | None = None) -> Tensor:
        """Return the gradient of a linear layer's input, plus `dx_TI` where that is given."""
        weight_IO = self._linears[which].weight.t()
        dx_TI = products.product(dy_TO, weight_IO) if dx_TI is None else products.added(dx_TI, dy_TO, weight_IO)
        adapted.back(which, dy_TO, x_TI, dx_TI)
        return dx_TI

    def _heads_weight(self) -> Tensor:
        """What normalized queries and keys are multiplied with [N, E]."""
        assert self._head_norms is not None, "this model doesn't normalize heads"
        if self._heads_weight_NE is None:
            num_keys = self._linears[K].out_features // self._head_dim
            parts = zip(self._head_norms, (self._num_heads, num_keys), strict=True)
            self._heads_weight_NE = torch.cat([norm.weight.detach().expand(num, -1) for norm, num in parts])
        return self._heads_weight_NE

    def _attend(self, here: Common, qk_TNE: Tensor, v_TKE: Tensor, records: bool) -> Attended:
        q_THE, k_TKE = qk_TNE[:, : self._num_heads], qk_TNE[:, self._num_heads :]
        q, k, v = (each.transpose(0, 1)[None].requires_grad_(records) for each in (q_THE, k_TKE, v_TKE))
        with torch.set_grad_enabled(records):
            return Attended(here.attend(self._number, q, k, v, self._rule), q, k, v)

    def _attend_back(self, attended: Attended, dseen_TO: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries and keys [T, N, E], and of values [T, K * E]."""
        dseen_THE = dseen_TO.unflatten(1, (-1, self._head_dim))
        ends = attended.queries, attended.keys, attended.values
        dq, dk, dv = torch.autograd.grad(attended.seen, ends, dseen_THE.transpose(0, 1)[None])
        return torch.cat([each[0].transpose(0, 1) for each in (dq, dk)], 1), dv[0].transpose(0, 1).flatten(1)


class Adapted:
    """The adapters' part in one layer: their factors, what was computed between the two, and their gradients."""

    def __init__(
        self, shares: Sequence[tuple[Spans, list[Tensor]]], into: Sequence[list[Tensor]] | None = None
    ) -> None:
        """`shares`: of each module, which tokens have an adapter, and the factors. `into`: where gradients go."""
        self._shares = shares
        self._into = into
        self._inner: list[Sequence[Tensor]] = [[] for _ in shares]
        self._gradients: list[Sequence[Tensor | None]] = [[None] * len(factors) for _, factors in shares]
        self.is_first = False
        """Whether nothing before this layer wants a gradient."""

    def has(self, *which: int) -> bool:
        """Tell whether one of these modules has an adapter; without any named, whether some module has."""
        return any(self._shares[one][0] for one in which or range(len(self._shares)))

    def leaves(self) -> list[Tensor]:
        """Return the factors whose gradients go through autograd."""
        return [] if self._into is not None else [factor for _, factors in self._shares for factor in factors]

    def gradients(self) -> list[Tensor | None]:
        """Return those of the leaves."""
        return [] if self._into is not None else [one for mine in self._gradients for one in mine]

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add to `y_TO` what the adapters of a module give."""
        spans, factors = self._shares[which]
        if spans:
            self._inner[which] = lora.add_shares(y_TO, x_TI, spans, factors)

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        """Take the gradients of a module's factors, and add to `dx_TI` what comes through them."""
        spans, factors = self._shares[which]
        if spans:
            into = self._into[which] if self._into is not None else ()
            self._gradients[which] = lora.share_gradients(dy_TO, x_TI, spans, factors, self._inner[which], dx_TI, into)

    def forget(self) -> None:
        """Let go of what the forward left: it will be computed again."""
        self._inner = [[] for _ in self._shares]
