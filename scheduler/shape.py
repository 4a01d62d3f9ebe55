"""A model's shape by its config.json alone: how many values its layers have, per family. Without torch.

The layouts are those of Hugging Face's modules; tests compare the counts with torch's own and with published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import families

_FOUR_NORMS = ("gemma2", "gemma3_text")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text")
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text", "smollm3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear modules of one size: so many `inputs`, `outputs`, and `copies` of it in a layer.

    `used`: how many of the copies a token goes through; fewer than all where experts share them out.
    """

    part: str
    inputs: int
    outputs: int
    copies: int = 1
    used: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What sizes follow from. `linears` are those of one layer; the head isn't one of them."""

    layers: int
    hidden: int
    vocab: int
    kv_heads: int
    head_dim: int
    parameters: int
    linears: tuple[Linear, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """Read it from a config.json.

        Raises:
            InvalidRequest: the family isn't served, or a field that is needed isn't there.
        """
        families.check(config)
        layers, hidden = _size(config, "num_hidden_layers"), _size(config, "hidden_size")
        heads = _size(config, "num_attention_heads")
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        linears = (*_attention(hidden, heads, kv_heads, head_dim), *_mlp(config, hidden))
        layer = sum(linear.inputs * linear.outputs * linear.copies for linear in linears)
        layer += _biases(config, hidden, heads * head_dim, kv_heads * head_dim) + _norms(config, hidden, head_dim)
        vocab = _size(config, "vocab_size")
        heads_of_vocab = 1 if _is_tied(config) else 2
        return cls(
            layers=layers,
            hidden=hidden,
            vocab=vocab,
            kv_heads=kv_heads,
            head_dim=head_dim,
            parameters=layers * layer + hidden + heads_of_vocab * vocab * hidden,
            linears=linears,
        )

    @property
    def kv_values_per_token(self) -> int:
        """Return how many values the caches of keys and values have for one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def ends_per_layer(self) -> int:
        """Return how many inputs and outputs the linears of a layer have for one token."""
        return sum((linear.inputs + linear.outputs) * linear.used for linear in self.linears)

    def adapter_parameters(self, rank: int, *, attn: bool = True, mlp: bool = True, unembed: bool = True) -> int:
        """Return how many values a LoRA adapter has, on every linear of these parts."""
        wanted = {"attn": attn, "mlp": mlp}
        layer = sum(
            (linear.inputs + linear.outputs) * linear.copies for linear in self.linears if wanted.get(linear.part)
        )
        return rank * (self.layers * layer + (self.hidden + self.vocab if unembed else 0))


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> tuple[Linear, ...]:
    wide, narrow = heads * head_dim, kv_heads * head_dim
    return (
        Linear(part="attn", inputs=hidden, outputs=wide),
        Linear(part="attn", inputs=hidden, outputs=narrow, copies=2, used=2),
        Linear(part="attn", inputs=wide, outputs=hidden),
    )


def _mlp(config: Mapping[str, Any], hidden: int) -> tuple[Linear, ...]:
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
    if not experts:
        inner = _size(config, "intermediate_size")
        return (
            Linear(part="mlp", inputs=hidden, outputs=inner, copies=2, used=2),
            Linear(part="mlp", inputs=inner, outputs=hidden),
        )
    inner, used = _size(config, "moe_intermediate_size"), _size(config, "num_experts_per_tok")
    return (
        Linear(part="mlp", inputs=hidden, outputs=inner, copies=2 * experts, used=2 * used),
        Linear(part="mlp", inputs=inner, outputs=hidden, copies=experts, used=used),
        Linear(part="router", inputs=hidden, outputs=experts),
    )


def _biases(config: Mapping[str, Any], hidden: int, wide: int, narrow: int) -> int:
    of_attention = wide + 2 * narrow
    if config["model_type"] == "qwen2":
        return of_attention
    biases = of_attention + hidden if config.get("attention_bias") else 0
    inner = int(config.get("intermediate_size") or 0)
    return biases + (2 * inner + hidden if config.get("mlp_bias") else 0)


def _norms(config: Mapping[str, Any], hidden: int, head_dim: int) -> int:
    kind = config["model_type"]
    return (4 if kind in _FOUR_NORMS else 2) * hidden + (2 * head_dim if kind in _HEAD_NORMS else 0)


def _is_tied(config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings")
    return config["model_type"] in _TIED_BY_DEFAULT if tied is None else bool(tied)


def _size(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(f"config.json has {field}={value!r}; a number of at least 1 is needed")
    return value
