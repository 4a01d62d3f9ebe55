"""A tiny random model of each family, with everything switched on that its config can switch on.

Biases and norms are random too: at their initial zeros and ones a model that forgot them would pass. Windows are 8
tokens long, so that sequences of 40 pass them several times.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WINDOW = 8
SMALL: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.15, "rms_norm_eps": 1e-6,
    "bos_token_id": 257, "eos_token_id": 258, "pad_token_id": 256,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
SCALED_GEMMA = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": WINDOW}

ZOO: dict[str, dict[str, Any]] = {
    "qwen2.5": {
        "model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN,
        "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 20, "attention_bias": True, "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True},
    "smollm3": {
        "model_type": "smollm3", "tie_word_embeddings": True, "no_rope_layers": [1, 0, 1],
        "use_sliding_window": True, "sliding_window": WINDOW,
    },
    "mistral": {"model_type": "mistral", "head_dim": 20, "sliding_window": WINDOW},
    "gemma3": {
        "model_type": "gemma3_text", **GEMMA, "rope_parameters": SCALED_GEMMA, "final_logit_softcapping": 3.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "qwen3-moe": {
        "model_type": "qwen3_moe", "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 2, "norm_topk_prob": True, "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Name -> what its config.json says beyond `SMALL`."""


def make_model(directory: Path, name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """Write a model of the zoo, the same bits each time; `changes` go into its config."""
    said = SMALL | ZOO[name] | changes
    config = AutoConfig.for_model(said.pop("model_type"), **said)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn(parameter.shape))
    model.to(dtype).save_pretrained(directory)
    return directory
