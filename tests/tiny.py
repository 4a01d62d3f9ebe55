"""Tiny random models, written file by file: for tests that need a real directory within a moment.

Two layers, four heads over two key-value heads, hidden 64, context 512, and a byte-level tokenizer: token 0..255 is
the byte itself, then <pad>, <bos>, <eos>, <unk>. The same arguments give the same bits.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, CONTEXT = 64, 2, 4, 2, 16, 128, 260, 512
SPECIALS = {"<pad>": 256, "<bos>": 257, "<eos>": 258, "<unk>": 259}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def make_tiny_model(
    directory: Path | str,
    *,
    tied: bool = True,
    model_type: str = "llama",
    dtype: torch.dtype = torch.float32,
    head_dim: int = HEAD_DIM,
) -> Path:
    """Write config, weights and tokenizer of a deterministic random model; returns the directory."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    _write(path / "config.json", _config(model_type, tied=tied, dtype=dtype) | {"head_dim": head_dim})
    _write(path / "generation_config.json", {"bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256})
    weights = {name: tensor.to(dtype) for name, tensor in _weights(model_type, tied=tied, head_dim=head_dim).items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(path)
    return path


def _config(model_type: str, *, tied: bool, dtype: torch.dtype) -> dict:
    return {
        "architectures": [ARCHITECTURES[model_type]],
        "attention_bias": False,
        "bos_token_id": 257,
        "dtype": str(dtype).removeprefix("torch."),
        "eos_token_id": 258,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": CONTEXT,
        "model_type": model_type,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": 256,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": tied,
        "vocab_size": VOCAB,
    }


def _weights(model_type: str, *, tied: bool, head_dim: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * scale * columns**-0.5

    def norm(size: int) -> Tensor:
        return 1 + 0.1 * torch.randn(size, generator=generator)

    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN, 2.0), "model.norm.weight": norm(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": norm(HIDDEN),
            f"{at}post_attention_layernorm.weight": norm(HIDDEN),
            f"{at}self_attn.q_proj.weight": matrix(HEADS * head_dim, HIDDEN),
            f"{at}self_attn.k_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{at}self_attn.v_proj.weight": matrix(KV_HEADS * head_dim, HIDDEN),
            f"{at}self_attn.o_proj.weight": matrix(HIDDEN, HEADS * head_dim, 0.5),
            f"{at}mlp.gate_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": matrix(INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": matrix(HIDDEN, INNER, 0.5),
        }
        if model_type == "qwen3":
            weights |= {f"{at}self_attn.q_norm.weight": norm(head_dim), f"{at}self_attn.k_norm.weight": norm(head_dim)}
    if not tied:
        weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


def _write_tokenizer(path: Path) -> None:
    added = [
        {
            "id": number,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for text, number in SPECIALS.items()
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "vocab": _byte_vocab() | SPECIALS, "merges": []}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }
    _write(path / "tokenizer.json", tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    _write(path / "tokenizer_config.json", config)


def _byte_vocab() -> dict[str, int]:
    """Each byte's stand-in character in the byte-level alphabet: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    stand_ins = {byte: 0x100 + index for index, byte in enumerate(hidden)}
    return {chr(stand_ins.get(byte, byte)): byte for byte in range(256)}


def _write(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
