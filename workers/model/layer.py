"""One layer of a decoder of the usual form: its forward, and its own backward.

Attention and MLP, each behind a norm and beside a residual, as transformers has them. The forward keeps what the
backward needs and no more; attention alone is left to autograd, so that any rule of it serves. What an adapter adds to
a product, and its gradients, are `lora`'s. Knows neither the layers beside it nor who asks. Weights are frozen and read
where they lie.

Axes: `T` packed tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E` head size, `I` inputs,
`O` outputs, `F` the inner size of the MLP.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from openrl.workers.model import lora, products, rows, short
from openrl.workers.model.attention import Attend, Rule
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.grouped import Spans
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import MultiLoraLinear, Segment
from openrl.workers.model.narrow import Sheet
from openrl.workers.model.rotary import Rotation
from openrl.workers.model.rows import HeadNorms, Heads, Normed


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
        self._head_norms = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else None
        self._rule = Rule.of(attn, loaded.arch)
        self._head_dim: int = attn.head_dim

    @property
    def names(self) -> list[str]:
        """What the linear layers are called."""
        return [linear.name for linear in self._linears]

    def adapted(self, route: Sequence[Segment], sheet: Sheet | None, gathering: Gathering[Any] | None) -> "Adapted":
        """Return what the adapters have here, by the `sheet` of all layers where there is one."""
        if sheet is not None:
            return _OnSheet(sheet, self._number * len(self._linears))
        shares = [lora.shares(linear.name, route) for linear in self._linears]
        if gathering is None:
            return _OfTensors(shares)
        rooms = [gathering.pairs(segment.adapter) for segment in route if segment.adapter is not None]
        into = [[one for pairs in rooms for one in pairs.get(linear.name, ())] for linear in self._linears]
        return _OfTensors(shares, into)

    def forward(self, x_TD: Tensor, here: Common, adapted: "Adapted", *, records: bool) -> tuple[Tensor, Kept]:
        """[T, D] -> [T, D], and what backward needs; attention's part of it only if that `records`."""
        normed = rows.normed(x_TD, self._norm.weight, self._norm.eps)
        q_TO, k_TO, v_TO = (self._product(which, normed.y, adapted) for which in (Q, K, V))
        heads = rows.heads(q_TO, k_TO, here.rotation, self._normed_by())
        attended = self._attend(here, heads, v_TO.unflatten(1, (-1, self._head_dim)), records)
        seen_TO = attended.out_THE.flatten(1)
        x_TD = self._added(O, x_TD, seen_TO, adapted)
        mlp_normed = rows.normed(x_TD, self._mlp_norm.weight, self._mlp_norm.eps)
        gate_TF, up_TF = (self._product(which, mlp_normed.y, adapted) for which in (GATE, UP))
        z_TF = rows.gated(gate_TF, up_TF)
        kept = Kept(normed, heads, attended, seen_TO, mlp_normed, gate_TF, up_TF, z_TF)
        return self._added(DOWN, x_TD, z_TF, adapted), kept

    def backward(
        self, dy_TD: Tensor, here: Common, adapted: "Adapted", kept: Kept, *, wants_input: bool
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
        dq_TO, dk_TO = rows.heads_gradient(dq_THE, dk_TKE, kept.heads, here.rotation, self._normed_by())
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

    def _normed_by(self) -> HeadNorms | None:
        if self._head_norms is None:
            return None
        of_q, of_k = self._head_norms
        return HeadNorms(of_q.weight, of_k.weight, of_q.eps)

    def _attend(self, here: Common, heads: Heads, v_TKE: Tensor, records: bool) -> Attended:
        if short.serves(heads.q, here.lengths, self._rule):
            return short.Short(heads.q, heads.k, v_TKE, here.lengths, self._rule.scale)
        return _ByAutograd(here.attend, self._number, heads, v_TKE, self._rule, records=records)


class _ByAutograd:
    """Attention by any rule: its gradient is autograd's."""

    def __init__(self, attend: Attend, number: int, heads: Heads, v_TKE: Tensor, rule: Rule, *, records: bool) -> None:
        q, k, v = (each.transpose(0, 1)[None].requires_grad_(records) for each in (heads.q, heads.k, v_TKE))
        with torch.set_grad_enabled(records):
            self._seen = attend(number, q, k, v, rule)
        self._ends = q, k, v
        self.out_THE = self._seen.detach()[0].transpose(0, 1)

    def gradient(self, dout_THE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.autograd.grad(self._seen, self._ends, dout_THE.transpose(0, 1)[None])
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)


class Adapted(Protocol):
    """The adapters' part in one layer: their factors, what was computed between the two, and their gradients."""

    is_first: bool
    """Whether nothing before this layer wants a gradient."""

    def has(self, *which: int) -> bool:
        """Tell whether one of these modules has an adapter; without any named, whether some module has."""

    def leaves(self) -> list[Tensor]:
        """Return the factors whose gradients go through autograd."""

    def gradients(self) -> list[Tensor | None]:
        """Return those of the leaves."""

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add to `y_TO` what the adapters of a module give."""

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        """Take the gradients of a module's factors, and add to `dx_TI` what comes through them."""

    def forget(self) -> None:
        """Let go of what the forward left: it will be computed again."""


class _OnSheet:
    """By the sheet of all layers; gradients are gathered, none goes through autograd."""

    def __init__(self, sheet: Sheet, first: int) -> None:
        """`first` is the number of the layer's first module."""
        self._sheet, self._first = sheet, first
        self._inner: dict[int, Tensor] = {}
        self.is_first = False

    def has(self, *which: int) -> bool:
        return any(self._sheet.has(self._first + one) for one in which or range(DOWN + 1))

    def leaves(self) -> list[Tensor]:
        return []

    def gradients(self) -> list[Tensor | None]:
        return []

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        if self._sheet.has(self._first + which):
            self._inner[which] = self._sheet.add(self._first + which, x_TI, y_TO)

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        if which in self._inner:
            self._sheet.back(self._first + which, dy_TO, x_TI, self._inner[which], dx_TI)

    def forget(self) -> None:
        self._inner = {}


class _OfTensors:
    """By each module's own factors."""

    def __init__(
        self, shares: Sequence[tuple[Spans, list[Tensor]]], into: Sequence[list[Tensor]] | None = None
    ) -> None:
        """`shares`: of each module, which tokens have an adapter, and the factors. `into`: where gradients go."""
        self._shares = shares
        self._into = into
        self._inner: list[Sequence[Tensor]] = [[] for _ in shares]
        self._gradients: list[Sequence[Tensor | None]] = [[None] * len(factors) for _, factors in shares]
        self.is_first = False

    def has(self, *which: int) -> bool:
        return any(self._shares[one][0] for one in which or range(DOWN + 1))

    def leaves(self) -> list[Tensor]:
        return [] if self._into is not None else [factor for _, factors in self._shares for factor in factors]

    def gradients(self) -> list[Tensor | None]:
        return [] if self._into is not None else [one for mine in self._gradients for one in mine]

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        spans, factors = self._shares[which]
        if spans:
            self._inner[which] = lora.add_shares(y_TO, x_TI, spans, factors)

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        spans, factors = self._shares[which]
        if spans:
            into = self._into[which] if self._into is not None else ()
            self._gradients[which] = lora.share_gradients(dy_TO, x_TI, spans, factors, self._inner[which], dx_TI, into)

    def forget(self) -> None:
        self._inner = [[] for _ in self._shares]
