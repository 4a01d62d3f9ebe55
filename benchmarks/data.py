"""What is trained on: random sequences, as the plain loop has them and as the SDK sends them; and the tiny model."""

from __future__ import annotations

from pathlib import Path

import tinker
import torch
from plain import Batch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

VOCAB = 512
"""Tokens are drawn below this, whatever the model."""


def batch_of(lengths: list[int], *, seed: int = 0) -> Batch:
    """Return sequences of these lengths, each with its next tokens as targets."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(VOCAB, (length + 1,), generator=draw) for length in lengths]
    return [(row[:-1], row[1:]) for row in rows]


def datums(batch: Batch) -> list[tinker.Datum]:
    """Return a batch as the SDK sends it."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens.tolist()),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData.from_torch(targets),
                "weights": tinker.TensorData.from_torch(torch.ones(len(targets))),
            },
        )
        for tokens, targets in batch
    ]


def tiny_qwen3(path: Path) -> Path:
    """Write a small random Qwen3 with a tokenizer of one word a token, which nothing here reads."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {str(token): token for token in range(VOCAB)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(path / "tokenizer.json"))  # noqa: S106  # a word, no secret
    return path
