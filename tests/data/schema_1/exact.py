"""Weights that are the same bits on every machine: whole numbers, hashed, scaled by powers of two.

`fill(directory)` writes `model.safetensors` beside the `config.json` of a tiny Llama that lies there. It must never
change: what is in `data.tar.xz` was trained on these weights, and the service knows them by their digest.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file


def fill(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    tensors = {
        name: torch.from_numpy(_values(number, shape))
        for number, (name, shape) in enumerate(sorted(_shapes(config).items()))
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _shapes(config: dict) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    pairs = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,),
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (hidden,), f"{at}post_attention_layernorm.weight": (hidden,),
            f"{at}self_attn.q_proj.weight": (queries, hidden), f"{at}self_attn.k_proj.weight": (pairs, hidden),
            f"{at}self_attn.v_proj.weight": (pairs, hidden), f"{at}self_attn.o_proj.weight": (hidden, queries),
            f"{at}mlp.gate_proj.weight": (inner, hidden), f"{at}mlp.up_proj.weight": (inner, hidden),
            f"{at}mlp.down_proj.weight": (hidden, inner),
        }  # fmt: skip
    return shapes


def _values(number: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return a matrix about as large as a fresh one is, or a norm near 1."""
    noise = _noise(number, int(np.prod(shape))).reshape(shape)
    return 1 + noise / 8 if len(shape) == 1 else noise / 4


def _noise(number: int, count: int) -> np.ndarray:
    """Return `count` float32 from -1 to 1, of 24 bits each (the finaliser of Steele et al. 2014, SplitMix)."""
    mixed = np.arange(count, dtype=np.uint64) + np.uint64((number + 1) << 32)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(40)).astype(np.float64) / 2**23 - 1).astype(np.float32)
