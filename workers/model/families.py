"""Which base models can be served, and what their config.json alone says about them. Without torch.

Only families whose packed forward and adapters a test compares with the stock model are named here. Any other is
refused, at the start of the service and again at loading, since an unknown layout would train the wrong thing
without a word.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from openrl.tasks.errors import InvalidRequest

CHANGING_ROPES = ("dynamic", "longrope")
"""Rotary embeddings that depend on the longest sequence at hand: in a pack, one run's on another's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The last path component of the modules that an adapter may sit on."""

    attention: frozenset[str] = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    mlp: frozenset[str] = frozenset({"gate_proj", "up_proj", "down_proj"})
    unembed: str = "lm_head"
    window: int | None = None
    """The sliding window of a config that doesn't name one."""
    always_slides: bool = False
    """The window counts without `use_sliding_window`."""

    def targets(self, module: str, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> bool:
        """Whether these flags put an adapter on the module of this path."""
        leaf = module.rsplit(".", 1)[-1]
        return (
            (train_attn and leaf in self.attention)
            or (train_mlp and leaf in self.mlp)
            or (train_unembed and module == self.unembed)
        )


# SmolLM and SmolLM2 are of type llama.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=4096, always_slides=True),
    "qwen2": Family(window=4096),
    "qwen3": Family(window=4096),
    "smollm3": Family(),
}


def family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        InvalidRequest: not one of those supported, which it names.
    """
    if model_type not in FAMILIES:
        raise InvalidRequest(f"model type {model_type!r} is not supported; use one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def check(config: Mapping[str, Any]) -> Family:
    """The family of a model by its config.json, which says nothing that would be served wrongly.

    Raises:
        InvalidRequest: the type isn't supported, positions are embedded in a way that depends on a sequence's
            neighbours, or the weights are quantized.
    """
    found = family(str(config.get("model_type") or "(none)"))
    for name in ("rope_scaling", "rope_parameters"):
        kind = _rope_type(config.get(name))
        if kind in CHANGING_ROPES:
            raise InvalidRequest(
                f"config.json has {name} of type {kind!r}, which makes one sequence's numbers depend on another's "
                "length; use a model without it"
            )
    if config.get("quantization_config"):
        raise InvalidRequest("config.json has a quantization_config; use the model's unquantized weights")
    return found


def max_context(config: Mapping[str, Any]) -> int:
    """Tokens that a sequence may have, by the model's config.json.

    Within a sliding window, full attention is the same, so the window is the bound.
    """
    found = check(config)
    longest = config.get("max_position_embeddings")
    if not isinstance(longest, int) or longest < 1:
        raise InvalidRequest("config.json has no max_position_embeddings")
    slides = found.always_slides or config.get("use_sliding_window")
    window = config.get("sliding_window", found.window) if slides else None
    return longest if window is None else min(longest, window)


def _rope_type(parameters: object) -> str:
    if not isinstance(parameters, Mapping):
        return ""
    return str(parameters.get("rope_type") or parameters.get("type") or "")
