"""The baseline: what a researcher would write without a service, on stock transformers and PEFT.

One process, one LoRA adapter on every linear layer, AdamW; a batch goes through the model in one of four ways.
Packed sequences get restarting positions and a block-diagonal causal mask, which is as far as stock transformers
packs on a CPU.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import timed
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

WAYS = ("one-by-one", "padded", "packed 512", "packed 1024")
"""How a batch goes through the model."""

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
RANK, ALPHA = 8, 32
ADAMW = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}

Batch = list[tuple[Tensor, Tensor]]
"""Sequences: tokens [T] and targets [T], int64."""

IGNORED = -100
"""`cross_entropy` leaves such a target out."""


class Plain:
    """A model with an adapter and its optimizer."""

    def __init__(self, path: Path) -> None:
        base = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the head is tied to the embedding, and adapted by itself
            self.model: Any = get_peft_model(base, config)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, fused=True, **ADAMW)  # type: ignore[arg-type]

    def step(self, batch: Batch, way: str) -> float:
        """Take one training step; return the summed loss."""
        if way == "one-by-one":
            parts = [_packed([one]) for one in batch]
        elif way == "padded":
            parts = [_padded(batch)]
        else:
            parts = [_packed(pack) for pack in packs(batch, budget=int(way.rpartition(" ")[2]))]
        loss = sum(self._backward(*part) for part in parts)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def _backward(self, inputs: dict[str, Tensor], targets: Tensor) -> float:
        logits = self.model(**inputs, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED)
        loss.backward()
        return float(loss.detach())

    def generate(self, prompts: Tensor, num_tokens: int) -> Tensor:
        """Draw `num_tokens` after each prompt [B, T], the whole batch at once, on merged weights: the faster way."""
        with torch.no_grad():
            self.model.merge_adapter()
            drawn: Tensor = self.model.generate(
                input_ids=prompts,
                attention_mask=torch.ones_like(prompts),
                do_sample=True,
                top_k=0,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
                pad_token_id=0,
            )
            self.model.unmerge_adapter()
        return drawn

    def save_and_generate(self, prompt: Tensor) -> Tensor:
        """Save the adapter, as a loop would for its sampler, and draw one token."""
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model.save_pretrained(folder, save_embedding_layers=False)
            return self.generate(prompt, 1)


def fastest(plain: Plain, batch: Batch, times: int) -> list[str]:
    """Return the ways to feed this batch, the fastest first, by the last of `times` steps."""
    return sorted(WAYS, key=lambda way: timed(partial(plain.step, batch, way), times)[-1])


def packs(batch: Batch, *, budget: int) -> list[Batch]:
    """Cut a batch, in its order, into packs of at most `budget` tokens."""
    found: list[Batch] = []
    room = 0
    for one in batch:
        if len(one[0]) > room:
            found.append([])
            room = budget
        found[-1].append(one)
        room -= len(one[0])
    return found


def _packed(pack: Batch) -> tuple[dict[str, Tensor], Tensor]:
    tokens, targets = (torch.cat(part).unsqueeze(0) for part in zip(*pack, strict=True))
    if len(pack) == 1:
        return {"input_ids": tokens}, targets
    lengths = [len(one[0]) for one in pack]
    mask = torch.block_diag(*(torch.ones(length, length).tril() for length in lengths)).bool()
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": tokens, "position_ids": positions[None], "attention_mask": mask[None, None]}, targets


def _padded(batch: Batch) -> tuple[dict[str, Tensor], Tensor]:
    tokens, targets = (list(part) for part in zip(*batch, strict=True))
    mask = [torch.ones(len(one)) for one in tokens]
    return {"input_ids": _pad(tokens, 0), "attention_mask": _pad(mask, 0).long()}, _pad(targets, IGNORED)


def _pad(rows: Sequence[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)
