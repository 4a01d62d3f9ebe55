"""The forward of a step in a cache, without gradients, for decoders of the usual form.

What transformers' layers compute, with fewer calls: a step of few tokens costs what is called, not what is
multiplied. Outputs of a layer's products lie in memory that all layers of a step share, queries and keys are
normalized and rotated together, and what a residual adds is added by the product itself. For a CPU; models of another
form, those on an accelerator, and whatever needs gradients go through transformers.

Weights are never copied: each step reads them where they lie, so they can be patched, parked and brought back.

Axes: `T` packed tokens, `S` those of a segment, `D` hidden, `H` heads, `K` key-value heads, `N` the two together, `E`
head size, `I` inputs, `O` outputs, `R` rank, `F` the inner size of the MLP. Squares of a norm are summed in float32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrl.workers.model import attention
from openrl.workers.model.attention import Rule
from openrl.workers.model.kv_cache import Appending
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import MultiLoraLinear, Segment, current_route
from openrl.workers.model.norms import RootMeanSquareNorm, normalized

ARCHS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose layers are built of `_Layer`'s parts in its order."""


def way_through(loaded: LoadedModel) -> "Decoder | Stock":
    """Return the cheapest way through a model."""
    return Decoder(loaded) if loaded.arch in ARCHS and loaded.device.type == "cpu" else Stock(loaded)


class Stock:
    """The model as transformers runs it."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, _cache: Appending) -> Tensor:
        """Return hidden states [T, D] behind the final norm; inside `cached`."""
        return attention.hidden_states(self._loaded, tokens_T, positions_T)


class Decoder:
    """A model of the usual form, by the short way."""

    def __init__(self, loaded: LoadedModel) -> None:
        body: Any = loaded.model.base_model
        self._embedding, self._rotary = body.embed_tokens, body.rotary_emb
        self._layers = [_Layer(number, layer, loaded) for number, layer in enumerate(body.layers)]
        self._norm = _Norm(body.norm)

    def hidden_states(self, tokens_T: Tensor, positions_T: Tensor, cache: Appending) -> Tensor:
        """Return hidden states [T, D] behind the final norm, without gradients."""
        with torch.no_grad():
            x_TD = nn.functional.embedding(tokens_T, self._embedding.weight)
            rotation = _rotation(*self._rotary(x_TD, positions_T.view(1, -1)))
            room, route = self._layers[0].room(x_TD), current_route()
            for layer in self._layers:
                x_TD = layer.forward(x_TD, rotation, room, cache, route)
            return self._norm.apply(x_TD)


class _Room(NamedTuple):
    """Where the products of one layer go, and then the next one's."""

    q: Tensor
    """[T, H * E]."""
    k: Tensor
    """[T, K * E]."""
    v: Tensor
    """[T, K * E]."""
    qk: Tensor
    """`q` and `k`, head by head: [T, N, E]."""
    v_heads: Tensor
    """`v`, head by head: [T, K, E]."""
    gate: Tensor
    """[T, F]."""
    up: Tensor
    """[T, F]."""


class _Rotation(NamedTuple):
    """Of each token's position. In `sin` the first half is negative: it meets the second half of a head."""

    cos: Tensor
    """[T, 1, E]."""
    sin: Tensor
    """[T, 1, E]."""


class _Norm:
    """A root-mean-square norm as `openrl.workers.model.norms` computes it, in what it gives anew."""

    def __init__(self, norm: RootMeanSquareNorm) -> None:
        self.weight, self._eps = norm.weight, norm.eps

    def apply(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return self.without_weight(x).mul_(self.weight)

    def without_weight(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D]."""
        return normalized(x, self._eps)[0]


class _Layer:
    """Attention and MLP, each behind a norm and beside a residual."""

    def __init__(self, number: int, layer: Any, loaded: LoadedModel) -> None:
        attn, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._q, self._k, self._v, self._o = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj
        self._gate, self._up, self._down, self._act = mlp.gate_proj, mlp.up_proj, mlp.down_proj, mlp.act_fn
        self._before_attention, self._before_mlp = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._of_heads = (_Norm(attn.q_norm), _Norm(attn.k_norm)) if hasattr(attn, "q_norm") else None
        self._head_dim: int = attn.head_dim
        self._num_heads: int = self._q.out_features // self._head_dim
        # Mistral's layers ask the config each time.
        of = attn.config if loaded.arch == "mistral" else attn
        self._rule = Rule(attn.scaling, getattr(of, "sliding_window", None))

    def room(self, x_TD: Tensor) -> _Room:
        """Return what the layers of a step of these tokens share; all are of one shape."""
        sizes = [linear.out_features for linear in (self._q, self._k, self._v)]
        qk, v = x_TD.new_empty(len(x_TD), sum(sizes)).split([sizes[0] + sizes[1], sizes[2]], 1)
        gate, up = x_TD.new_empty(2, len(x_TD), self._gate.out_features)
        qk_heads, v_heads = (each.unflatten(1, (-1, self._head_dim)) for each in (qk, v))
        return _Room(qk[:, : sizes[0]], qk[:, sizes[0] :], v, qk_heads, v_heads, gate, up)

    def forward(
        self, x_TD: Tensor, rotation: _Rotation, room: _Room, cache: Appending, route: Sequence[Segment]
    ) -> Tensor:
        """[T, D] -> [T, D]; tokens meet in the cache alone."""
        y_TD = self._before_attention.apply(x_TD)
        for linear, out_TO in ((self._q, room.q), (self._k, room.k), (self._v, room.v)):
            _product(linear, y_TD, route, out_TO)
        rotated_TNE = _rotated(self._normed_heads(room.qk), rotation)
        q_THE, k_TKE = rotated_TNE[:, : self._num_heads], rotated_TNE[:, self._num_heads :]
        seen_THE = cache.attend(self._number, q_THE, k_TKE, room.v_heads, self._rule)
        x_TD = _added(x_TD, self._o, seen_THE.reshape(len(x_TD), -1), route)
        y_TD = self._before_mlp.apply(x_TD)
        _product(self._gate, y_TD, route, room.gate)
        _product(self._up, y_TD, route, room.up)
        return _added(x_TD, self._down, self._act(room.gate).mul_(room.up), route)

    def _normed_heads(self, qk_TNE: Tensor) -> Tensor:
        if self._of_heads is None:
            return qk_TNE
        of_q, of_k = self._of_heads
        normal_TNE = of_q.without_weight(qk_TNE)
        normal_TNE[:, : self._num_heads].mul_(of_q.weight)
        normal_TNE[:, self._num_heads :].mul_(of_k.weight)
        return normal_TNE


def _rotation(cos_1TE: Tensor, sin_1TE: Tensor) -> _Rotation:
    """Return what `_rotated` multiplies with, of the tables that transformers makes."""
    half = sin_1TE.shape[-1] // 2
    first, second = sin_1TE.split(half, -1)
    return _Rotation(cos_1TE[0, :, None], torch.cat([-first, second], -1)[0, :, None])


def _rotated(x_TNE: Tensor, rotation: _Rotation) -> Tensor:
    """Rotate each pair of the first and the second half of a head (Su et al. 2021, "RoFormer")."""
    return (x_TNE * rotation.cos).addcmul_(x_TNE.roll(x_TNE.shape[-1] // 2, -1), rotation.sin)


def _product(linear: MultiLoraLinear, x_TI: Tensor, route: Sequence[Segment], out_TO: Tensor) -> None:
    """Fill `out_TO` with what the linear layer gives."""
    if linear.bias is None:
        torch.mm(x_TI, linear.weight.t(), out=out_TO)
    else:
        torch.addmm(linear.bias, x_TI, linear.weight.t(), out=out_TO)
    _add_lora(linear.name, x_TI, route, out_TO)


def _added(x_TO: Tensor, linear: MultiLoraLinear, y_TI: Tensor, route: Sequence[Segment]) -> Tensor:
    """Return `x_TO` plus what the linear layer gives for `y_TI`."""
    out_TO = torch.addmm(x_TO, y_TI, linear.weight.t())
    if linear.bias is not None:
        out_TO += linear.bias
    _add_lora(linear.name, y_TI, route, out_TO)
    return out_TO


def _add_lora(name: str, x_TI: Tensor, route: Sequence[Segment], out_TO: Tensor) -> None:
    """Add each segment's own share; the narrow side of a product comes first, as `lora` explains."""
    for segment in route:
        if segment.adapter is not None and (factors := segment.adapter.factors(name)):
            a_RI, b_OR, scale = factors
            part = slice(segment.start, segment.stop)
            x_SI, out_SO = (x_TI, out_TO) if segment.stop - segment.start == len(x_TI) else (x_TI[part], out_TO[part])
            if a_RI.dtype is not x_SI.dtype:
                a_RI, b_OR = a_RI.to(x_SI.dtype), b_OR.to(x_SI.dtype)
            out_SO.addmm_(torch.mm(a_RI, x_SI.t()).t(), b_OR.t(), alpha=scale)
