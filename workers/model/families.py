"""Which linear layers of a model family are attention, MLP and unembedding.

Only families whose packed forward and adapters a test compares with the stock model are named here; any other
is refused at loading, since an unknown layout would train the wrong thing without a word.
"""

from dataclasses import dataclass

from openrl.tasks.errors import InvalidRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The last path component of the modules that an adapter may sit on."""

    attention: frozenset[str] = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    mlp: frozenset[str] = frozenset({"gate_proj", "up_proj", "down_proj"})
    unembed: str = "lm_head"

    def targets(self, module: str, *, train_attn: bool, train_mlp: bool, train_unembed: bool) -> bool:
        """Whether these flags put an adapter on the module of this path."""
        leaf = module.rsplit(".", 1)[-1]
        return (
            (train_attn and leaf in self.attention)
            or (train_mlp and leaf in self.mlp)
            or (train_unembed and module == self.unembed)
        )


# SmolLM and SmolLM2 are of type llama.
FAMILIES = {name: Family() for name in ("llama", "mistral", "qwen2", "qwen3", "smollm3")}


def family(model_type: str) -> Family:
    """The family of a Hugging Face `model_type`.

    Raises:
        InvalidRequest: not one of those supported, which it names.
    """
    if model_type not in FAMILIES:
        raise InvalidRequest(f"model type {model_type!r} is not supported; use one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]
