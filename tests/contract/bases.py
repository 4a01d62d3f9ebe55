"""Tiny base models, adapters of theirs on disk, and what stock transformers and PEFT make of both.

Nothing here loads a model by our own code: it serves the environment of either engine.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, save_adapter
from tests import tiny

HEAD_DIM = 32
"""vLLM's CPU build knows none as small as the other tests'."""
ATTENTION = {
    "q_proj": (tiny.HIDDEN, tiny.HEADS * HEAD_DIM),
    "k_proj": (tiny.HIDDEN, tiny.KV_HEADS * HEAD_DIM),
    "v_proj": (tiny.HIDDEN, tiny.KV_HEADS * HEAD_DIM),
    "o_proj": (tiny.HEADS * HEAD_DIM, tiny.HIDDEN),
}
MLP = {
    "gate_proj": (tiny.HIDDEN, tiny.INNER),
    "up_proj": (tiny.HIDDEN, tiny.INNER),
    "down_proj": (tiny.INNER, tiny.HIDDEN),
}


class Shapes:
    """What an adapter must know of a tiny model."""

    device = torch.device("cpu")

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        layers = range(tiny.LAYERS)
        found = {f"model.layers.{at}.self_attn.{name}": size for at in layers for name, size in ATTENTION.items()}
        found |= {f"model.layers.{at}.mlp.{name}": size for at in layers for name, size in MLP.items()}
        return found | {"lm_head": (tiny.HIDDEN, tiny.VOCAB)}

    def targets(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> tuple[str, ...]:
        flags = {"self_attn": train_attn, "mlp": train_mlp, "lm_head": train_unembed}
        return tuple(name for name in self.shapes if any(flags[part] for part in name.split(".") if part in flags))


class Base:
    """A model directory, a data directory beside it, and the stock forward of both."""

    def __init__(self, home: Path, *, tied: bool, dtype: torch.dtype = torch.float32) -> None:
        self.path = tiny.make_tiny_model(home / "model", tied=tied, dtype=dtype, head_dim=HEAD_DIM)
        self.data_dir = home / "data"
        self.data_dir.mkdir()

    def save(self, name: str, seed: int, *, rank: int = 4, tenant: str = "local", **flags: bool) -> str:
        """Write a version that changes the model well and truly; return its directory under the data directory."""
        everything = {"train_attn": True, "train_mlp": True, "train_unembed": True} | flags
        adapter = Adapter.init(Shapes(), rank=rank, seed=seed, **everything)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            # As much of a change whatever the rank.
            for _, b_OR in adapter.weights.values():
                b_OR.normal_(0, 0.025 * rank**0.5, generator=generator)
        relative = layout.sampler_dir(tenant, "s-1:train:0", name, 1)
        staged = layout.staging(self.data_dir / relative)
        save_adapter(staged, adapter, "Tiny")
        facts = manifest.Manifest(
            kind="sampler", base_model="Tiny", rank=rank, alpha=32.0, targets=adapter.targets, step=1, **everything
        )  # fmt: skip
        manifest.write(staged, facts)
        layout.publish(staged, self.data_dir / relative)
        return relative

    def logits(self, tokens: Sequence[int], version: str = "") -> Tensor:
        """Logits [T, V], float32."""
        with torch.inference_mode():
            return self._model(version)(input_ids=torch.tensor([list(tokens)])).logits[0].float()

    def greedy(self, prompt: Sequence[int], count: int, version: str = "") -> list[int]:
        """The likeliest token, `count` times."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens, version)[-1].argmax()))
        return tokens[len(prompt) :]

    def logprobs(
        self, prompt: Sequence[int], tokens: Sequence[int], version: str = "", temperature: float = 1.0
    ) -> Tensor:
        """What `tokens` are worth after the prompt, [T]."""
        logits_TV = self.logits([*prompt, *tokens], version)[len(prompt) - 1 : -1] / temperature
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(list(tokens))[:, None])[:, 0]

    @functools.cache  # noqa: B019  a few models, for as long as the tests run
    def _model(self, version: str) -> torch.nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
            found = PeftModel.from_pretrained(stock, self.data_dir / version) if version else stock
        return found.eval()
