"""A base model from a local directory, frozen, with our attention and our linear layers in it.

The weights are loaded once per process and never change. Float32 on a CPU, bfloat16 on a GPU. Nothing is
fetched, no code that comes with a model is run, and only safetensors are read.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import attention, identity, norms, recomputing
from openrl.workers.model.experts import MultiLoraExperts
from openrl.workers.model.families import Family, check, max_context
from openrl.workers.model.lora import MultiLoraLinear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A frozen base model and the facts about it."""

    model: PreTrainedModel = field(repr=False)
    family: Family
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    """Every module that may have an adapter -> (inputs, outputs), or (experts, inputs, outputs) of a stack of them;
    in the model's order."""
    hidden_size: int
    vocab_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    """Tokens a sequence may have."""
    tied_embeddings: bool
    arch: str
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    tokenizer_path: str
    logit_softcap: float | None = None
    """Logits `l` are `logit_softcap * tanh(l / logit_softcap)`; None leaves them as they are."""
    digest: str = ""
    """Which weights these are; see `openrl.workers.model.identity`."""

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of one token's forward, about; a backward is as much again."""
        used = getattr(self.model.config, "num_experts_per_tok", None) or 1
        weights = [weight for weight in self.model.parameters() if weight.ndim in (2, 3)]
        return 2.0 * sum(weight.numel() * (1.0 if weight.ndim == 2 else used / len(weight)) for weight in weights)

    @property
    def head_name(self) -> str:
        """The module path of the unembedding."""
        return self.family.unembed

    @property
    def head(self) -> Tensor:
        """The unembedding [V, D]; the embedding itself where they are tied."""
        linear = self.model.get_submodule(self.head_name)
        assert isinstance(linear, MultiLoraLinear), "loading replaced the head"
        return linear.weight

    def tensors(self) -> list[Tensor]:
        """Return everything that lies on the device: weights, and what the layers keep beside them."""
        return [*self.model.parameters(), *self.model.buffers()]

    def require(self, digest: str) -> None:
        """Refuse to serve other weights than those that the service was started with; "" means any."""
        if digest and digest != self.digest:
            raise InvalidRequest(f"{self.tokenizer_path} was changed while the service ran; start `openrl up` anew")

    def targets(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> tuple[str, ...]:
        """The module paths that these flags select, in the model's order."""
        flags = {"train_attn": train_attn, "train_mlp": train_mlp, "train_unembed": train_unembed}
        return tuple(name for name in self.shapes if self.family.targets(name, **flags))


def load(
    path: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> LoadedModel:
    """Load a Hugging Face directory; by default onto the GPU in bfloat16 if there is one, else float32.

    Raises:
        InvalidRequest: not a model directory, or a model that can't be served.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    kind = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    if not (Path(path) / "config.json").is_file():
        raise InvalidRequest(f"{str(path)!r} is not a model directory: it has no config.json")
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    layout = check(config.to_dict())
    digest = identity.digest_of(Path(path))
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        config=config,
        dtype=kind,
        attn_implementation=attention.NAME,
        local_files_only=True,
        use_safetensors=True,
    )
    model.to(place)  # type: ignore[arg-type]  # transformers annotates it for itself
    return prepare(model, layout, path=Path(path), digest=digest)


def prepare(model: PreTrainedModel, layout: Family, *, path: Path, digest: str = "") -> LoadedModel:
    """Freeze a model where it lies and put our linear layers into it; it was made with our attention."""
    model.requires_grad_(False).eval()
    shapes = _replace_modules(model, layout)
    norms.install(model)
    layers: Any = model.base_model.layers
    recomputing.install(layers)
    return _facts(model, layout, path=path, digest=digest, shapes=shapes)


def _replace_modules(model: PreTrainedModel, layout: Family) -> dict[str, tuple[int, ...]]:
    """Put a MultiLoraLinear in place of every module that an adapter may sit on, a MultiLoraExperts for a stack."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in list(model.named_modules()):
        if layout.experts and name.rsplit(".", 1)[-1] == layout.experts:
            stack = MultiLoraExperts(module, name)
            model.set_submodule(name, stack)
            shapes |= stack.shapes
        elif layout.targets(name, train_attn=True, train_mlp=True, train_unembed=True):
            assert isinstance(module, nn.Linear), f"{name} is no linear layer"
            model.set_submodule(name, MultiLoraLinear(module, name))
            shapes[name] = (module.in_features, module.out_features)
    return shapes


def _facts(
    model: PreTrainedModel, layout: Family, *, path: Path, digest: str, shapes: dict[str, tuple[int, ...]]
) -> LoadedModel:
    config = model.config
    embedding: Any = model.get_input_embeddings().weight
    return LoadedModel(
        model=model,
        family=layout,
        shapes=shapes,
        hidden_size=config.hidden_size,
        vocab_size=embedding.shape[0],
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_context=max_context(config.to_dict()),
        tied_embeddings=model.get_submodule(layout.unembed).weight is embedding,
        arch=config.model_type,
        dtype=embedding.dtype,
        device=embedding.device,
        eos_token_ids=_eos(model),
        tokenizer_path=str(path),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        digest=digest,
    )


def _eos(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-text ids: the generation config knows those of chat models, the model config is the fallback."""
    found = getattr(model.generation_config, "eos_token_id", None)
    found = model.config.eos_token_id if found is None else found
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list) else (found,)
