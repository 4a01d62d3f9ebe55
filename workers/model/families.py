"""Which base models can be served, and what their config.json alone says about them. Without torch.

Only families whose packed forward and adapters a test compares with the stock model are named here. Any other is
refused, at the start of the service and again at loading, since an unknown layout would train the wrong thing
without a word. docs/models.md says how to add one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrl.tasks.errors import InvalidRequest

PARTIAL = "partial_rotary_factor"
STATIC_ROPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that depend on a token's position alone."""
CHANGING_ROPES = ("dynamic", "longrope")
"""Those that depend on the longest sequence at hand: in a pack, one run's on another's."""
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The last path component of the modules that an adapter may sit on."""

    attention: frozenset[str] = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    mlp: frozenset[str] = frozenset({"gate_proj", "up_proj", "down_proj"})
    unembed: str = "lm_head"
    experts: str = ""
    """The name of the modules that hold a stack of experts, each with a `mlp` of its own; "" where there are none."""
    usual: bool = False
    """Whether layers have the usual form, which `layers` and `decoder` compute by themselves: a norm, attention with or
    without norms of its heads, a residual; a norm, a gated MLP, a residual; positions rotated in every layer."""
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict, hash=False)
    """Options of config.json with the values under which it is served."""

    def targets(self, module: str, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> bool:
        """Whether these flags put an adapter on the module of this path."""
        leaf = module.rsplit(".", 1)[-1]
        return (
            (train_attn and leaf in self.attention)
            or (train_mlp and leaf in self.mlp)
            or (train_unembed and module == self.unembed)
        )


_CAUSAL = {"use_bidirectional_attention": (None, False)}
# SmolLM and SmolLM2 are of type llama. Gemma 3's attention has no soft-cap, and transformers ignores one that is named.
# Where some layers are dense, stock PEFT would take the experts' targets from them.
FAMILIES = {
    "gemma2": Family(required=_CAUSAL),
    "gemma3_text": Family(required=_CAUSAL | {"attn_logit_softcapping": (None,)}),
    "llama": Family(usual=True),
    "mistral": Family(usual=True),
    "qwen2": Family(usual=True),
    "qwen3": Family(usual=True),
    "qwen3_moe": Family(experts="experts", required={"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)}),
    "smollm3": Family(),
}
HINTS = {
    "gemma3": "of Gemma 3, the text models (gemma3_text) are",
    "mixtral": "of mixtures of experts, Qwen3-MoE is",
    "qwen2_moe": "of mixtures of experts, Qwen3-MoE is",
}
"""What is near to something that isn't supported."""


def family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        InvalidRequest: not one of those supported, which it names.
    """
    if model_type not in FAMILIES:
        hint = f" ({HINTS[model_type]})" if model_type in HINTS else ""
        supported = ", ".join(sorted(FAMILIES))
        raise InvalidRequest(f"model type {model_type!r} is not supported{hint}; use one of {supported}")
    return FAMILIES[model_type]


def check(config: Mapping[str, Any]) -> Family:
    """The family of a model by its config.json, which says nothing that would be served wrongly.

    Raises:
        InvalidRequest: the type isn't supported; positions are embedded in a way that depends on a sequence's
            neighbours, or in a part of a head; layers attend in a way that isn't known here; the weights are quantized.
    """
    found = family(str(config.get("model_type") or "(none)"))
    for name in ("rope_scaling", "rope_parameters"):
        for kind in _rope_types(config.get(name)):
            _check_rope(name, kind)
        for share in (config.get(PARTIAL), *_partial_ropes(config.get(name))):
            if share not in (None, 1):
                raise InvalidRequest(
                    f"config.json has {PARTIAL}={share!r}: only heads that are rotated as a whole are supported"
                )
    strange = sorted(set(config.get("layer_types") or ()) - set(LAYER_TYPES))
    if strange:
        raise InvalidRequest(f"config.json has layer_types {strange}; those supported are {', '.join(LAYER_TYPES)}")
    for option, served in found.required.items():
        if config.get(option) not in served:
            raise InvalidRequest(
                f"config.json has {option}={config[option]!r}; for this model type only {served[-1]!r} is supported"
            )
    if config.get("quantization_config"):
        raise InvalidRequest("config.json has a quantization_config; use the model's unquantized weights")
    return found


def max_context(config: Mapping[str, Any]) -> int:
    """Tokens that a sequence may have, by the model's config.json; a sliding window bounds what one token sees only."""
    check(config)
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < 1:
        raise InvalidRequest("config.json has no max_position_embeddings")
    return longest


def _check_rope(name: str, kind: str) -> None:
    if kind in CHANGING_ROPES:
        raise InvalidRequest(
            f"config.json has {name} of type {kind!r}, which makes one sequence's numbers depend on another's "
            "length; use a model without it"
        )
    if kind not in STATIC_ROPES:
        raise InvalidRequest(f"config.json has {name} of type {kind!r}; those supported are {', '.join(STATIC_ROPES)}")


def _partial_ropes(parameters: object) -> Iterator[object]:
    """The shares of a head that are rotated, of each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters.get(PARTIAL)
        for inner in parameters.values():
            yield from _partial_ropes(inner)


def _rope_types(parameters: object) -> Iterator[str]:
    """The types that are named: one, or one for each kind of layer."""
    if not isinstance(parameters, Mapping):
        return
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind:
        yield str(kind)
    for inner in parameters.values():
        yield from _rope_types(inner)
