"""The forward of a step in a cache, without gradients, for decoders of the usual form.

What transformers' layers compute, with fewer calls: a step of few tokens costs what is called, not what is multiplied.
Outputs of a layer's products lie in memory that all layers share (`room`), an adapter's factors are put together once
(`laid`; `stacked` in other types or without numba), rotations are looked up (`rotary`), norms, heads and gates are
`rows`', and what a residual adds is added by the product itself. For a CPU; models of another form, those on an
accelerator, and whatever needs gradients go through transformers.

Weights are read where they lie, so they can be patched, parked and brought back; or, as far as the caller gives room
for it, from a copy that follows them (`reordered`).

Axes: `T` packed tokens, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E`
head size, `I` inputs, `O` outputs. Squares of a norm are summed in float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from openrl.workers.model import attention, rows
from openrl.workers.model.attention import Rule
from openrl.workers.model.kv_cache import Appending
from openrl.workers.model.laid import Laid
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import MultiLoraLinear, current_route
from openrl.workers.model.norms import RootMeanSquareNorm, normalized
from openrl.workers.model.reordered import Budget, Reordered
from openrl.workers.model.room import Room, Rooms, Sizes
from openrl.workers.model.rotary import Rotation, Rotations
from openrl.workers.model.rows import GATES, HeadNorms
from openrl.workers.model.segments import require_within
from openrl.workers.model.stacked import Stacked

PARTS = 4
"""Groups of linear layers with one input, in each layer: to heads, from heads, into the MLP, out of it."""


def way_through(loaded: LoadedModel, *, copy_bytes: int = 0) -> "Decoder | Stock":
    """Return the cheapest way through a model; copies of its weights may take `copy_bytes` beside it."""
    if loaded.family.usual and loaded.device.type == "cpu":
        return Decoder(loaded, copy_bytes=copy_bytes)
    return Stock(loaded)


class Stock:
    """The model as transformers runs it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, _cache: Appending) -> Tensor:
        """Return hidden states [T, D] behind the final norm; inside `cached`."""
        return attention.hidden_states(self._loaded, tokens_T, positions_T)

    def weights_changed(self) -> None:
        """Hear that the model's weights were changed in place."""

    def tensors(self) -> list[Tensor]:
        """Return what was computed from adapters and is kept with them."""
        return []


class Decoder:
    """A model of the usual form, by the short way. One thread only."""

    def __init__(self, loaded: LoadedModel, *, copy_bytes: int = 0) -> None:
        body: Any = loaded.model.base_model
        self._embedding, self._rotations = body.embed_tokens, Rotations(body.rotary_emb, loaded.head_dim)
        budget = Budget(copy_bytes)
        is_compiled = rows.serves(*(weight for weight in body.parameters() if weight.ndim == 1), self._embedding.weight)
        self._layers = [_Layer(number, layer, loaded, budget, is_compiled) for number, layer in enumerate(body.layers)]
        self._norm = _Norm(body.norm, is_compiled)
        self._rooms = Rooms(self._layers[0].sizes)
        groups = [group for layer in self._layers for group in layer.groups]
        self._adapters = Laid(groups) if is_compiled else Stacked(groups, loaded.dtype)

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, cache: Appending) -> Tensor:
        """Return hidden states [T, D] behind the final norm, without gradients."""
        with torch.no_grad():
            x_TD = nn.functional.embedding(tokens_T, self._embedding.weight)
            num_tokens, route = len(tokens_T), current_route()
            require_within(route, num_tokens)
            rotation = self._rotations.at(positions_T.view(-1), x_TD)
            step = _Step(num_tokens, self._rooms.of(num_tokens, x_TD), rotation, cache, self._adapters.shares(route))
            for layer in self._layers:
                x_TD = layer.forward(x_TD, step)
            return self._norm.into(torch.empty_like(x_TD), x_TD, step.room.factor_T1)

    def weights_changed(self) -> None:
        """Hear that the model's weights were changed in place: no copy of them is used any more."""
        for layer in self._layers:
            layer.drop_copies()

    def tensors(self) -> list[Tensor]:
        """Return what was computed from adapters and is kept with them. Any thread may ask."""
        return self._adapters.tensors()


class _Shares(Protocol):
    """What adapters have in a step."""

    def add(self, number: int, x_TI: Tensor, out_TO: Tensor) -> None:
        """Add what they have for a group of linear layers."""


class _Step(NamedTuple):
    """What the layers of a step share."""

    num_tokens: int
    room: Room
    rotation: Rotation
    cache: Appending
    shares: _Shares


class _Norm:
    """A root-mean-square norm as `openrl.workers.model.norms` computes it."""

    def __init__(self, norm: RootMeanSquareNorm, is_compiled: bool) -> None:
        self.weight, self.eps = norm.weight, norm.eps
        self._is_compiled = is_compiled
        self._eps_0 = torch.tensor(norm.eps)

    def into(self, out: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        """Fill `out` with what the norm gives for `x`, both [..., D], with `factor` [..., 1] float32 as room."""
        if self._is_compiled:
            return rows.norm_into(out, x, self.weight, self.eps)
        return self.without_weight(out, x, factor).mul_(self.weight)

    def without_weight(self, out: Tensor, x: Tensor, factor: Tensor) -> Tensor:
        """Fill `out`, which may be `x` itself."""
        if x.dtype is not torch.float32:
            return out.copy_(normalized(x, self.eps)[0])
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=factor)
        torch.addcmul(self._eps_0, factor, factor, value=1 / x.shape[-1], out=factor)
        return torch.mul(x, factor.rsqrt_(), out=out)


class _Group:
    """Linear layers with one input, whose outputs lie side by side."""

    def __init__(self, number: int, linears: Sequence[MultiLoraLinear], budget: Budget) -> None:
        self.linears = linears
        self._number = number
        self._pairs = [(linear.weight, linear.bias) for linear in linears]
        self.copy = Reordered(linears, budget)

    def of(self, x_TI: Tensor, step: _Step, out_TO: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return what the layers give; in `out_TO`, which is `parts` side by side, or in memory of its own."""
        # A single row is no product of matrices: its weights are read once, as they lie.
        if step.num_tokens > 1 and self.copy.ready():
            out_TO = self.copy.product(x_TI)
        else:
            for (weight_OI, bias_O), part in zip(self._pairs, parts, strict=True):
                if bias_O is None:
                    torch.mm(x_TI, weight_OI.t(), out=part)
                else:
                    torch.addmm(bias_O, x_TI, weight_OI.t(), out=part)
        return self._with_shares(out_TO, x_TI, step)

    def added(self, to_TO: Tensor, x_TI: Tensor, step: _Step) -> Tensor:
        """Return `to_TO`, which may be changed, plus what the one layer gives."""
        ((weight_OI, bias_O),) = self._pairs
        if step.num_tokens > 1 and self.copy.ready():
            out_TO = self.copy.added(x_TI, to_TO)
        else:
            out_TO = to_TO.addmm_(x_TI, weight_OI.t())
            if bias_O is not None:
                out_TO += bias_O
        return self._with_shares(out_TO, x_TI, step)

    def _with_shares(self, out_TO: Tensor, x_TI: Tensor, step: _Step) -> Tensor:
        step.shares.add(self._number, x_TI, out_TO)
        return out_TO


class _Layer:
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, number: int, layer: Any, loaded: LoadedModel, budget: Budget, is_compiled: bool) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._number, self._is_compiled = number, is_compiled
        self._act = mlp.act_fn
        self._before_attention = _Norm(layer.input_layernorm, is_compiled)
        self._before_mlp = _Norm(layer.post_attention_layernorm, is_compiled)
        self._attention = attn
        of_heads = (attn.q_norm, attn.k_norm) if hasattr(attn, "q_norm") else ()
        self._of_heads = tuple(_Norm(norm, is_compiled) for norm in of_heads)
        self._gates = is_compiled and loaded.model.config.hidden_act in GATES
        self._rule = Rule.of(attn, loaded.arch)
        head_dim: int = attn.head_dim
        heads = (attn.q_proj.out_features // head_dim, attn.k_proj.out_features // head_dim, head_dim)
        self.sizes = Sizes(attn.o_proj.out_features, *heads, mlp.gate_proj.out_features)
        self.groups = (
            [attn.q_proj, attn.k_proj, attn.v_proj],
            [attn.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        )
        made = [_Group(PARTS * number + i, linears, budget) for i, linears in enumerate(self.groups)]
        self._to_heads, self._from_heads, self._into_mlp, self._out_of_mlp = self._made = made

    def forward(self, x_TD: Tensor, step: _Step) -> Tensor:
        """[T, D] -> [T, D], where `x_TD` was or elsewhere; tokens meet in the cache alone."""
        room = step.room
        y_TD = self._before_attention.into(room.normal_TD, x_TD, room.factor_T1)
        qkv = self._to_heads.of(y_TD, step, room.qkv, (room.q, room.k, room.v))
        if qkv is not room.qkv:
            room.qkv.copy_(qkv)
        self._turn_heads(room, step.rotation)
        seen_THE = step.cache.attend(self._number, room.rotated_q_THE, room.rotated_k_TKE, room.v_TKE, self._rule)
        x_TD = self._from_heads.added(x_TD, seen_THE.flatten(1), step)
        y_TD = self._before_mlp.into(room.normal_TD, x_TD, room.factor_T1)
        gate_TF, up_TF = self._into_mlp.of(y_TD, step, room.gate_up, (room.gate, room.up)).chunk(2, 1)
        gated_TF = rows.gated(gate_TF, up_TF) if self._gates else self._act(gate_TF).mul_(up_TF)
        return self._out_of_mlp.added(x_TD, gated_TF, step)

    def drop_copies(self) -> None:
        """Use no copy of the weights any more."""
        for group in self._made:
            group.copy.drop()

    def _turn_heads(self, room: Room, rotation: Rotation) -> None:
        """Fill the room's rotated queries and keys, which are normalized first where the model does that."""
        if self._is_compiled:
            rows.heads_into(room.rotated_TNE, room.qk_TNE, room.q_THE.size(1), rotation, HeadNorms.of(self._attention))
            return
        if self._of_heads:
            of_q, of_k = self._of_heads
            of_q.without_weight(room.qk_TNE, room.qk_TNE, room.factor_TN1)
            room.q_THE.mul_(of_q.weight)
            room.k_TKE.mul_(of_k.weight)
        _rotate(room, rotation)


def _rotate(room: Room, rotation: Rotation) -> None:
    """Rotate each pair of the first and the second half of a head (Su et al. 2021, "RoFormer")."""
    torch.mul(room.qk_TNE, rotation.cos, out=room.rotated_TNE)
    room.rotated_first.addcmul_(room.second, rotation.of_first)
    room.rotated_second.addcmul_(room.first, rotation.of_second)
