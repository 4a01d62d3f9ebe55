"""What is said to the service before the upgrade and again after it: a run's operations, and a sample."""

from __future__ import annotations

from typing import Any

MODEL = "tiny/exact"
TEXT = list(b"pack my box with five dozen liquor jugs")


def creation(session: str, number: int) -> dict[str, Any]:
    lora = {"rank": 2, "seed": 5, "train_attn": True, "train_mlp": False, "train_unembed": False}
    return {"session_id": session, "model_seq_id": number, "base_model": MODEL, "lora_config": lora}


def steps(run: str) -> list[tuple[str, dict[str, Any]]]:
    """All operations of a run, from its first one on: route and body."""
    adam = {"adam_params": {"learning_rate": 0.01}}
    number = int(run.rpartition(":")[2])
    listed: list[tuple[str, dict[str, Any]]] = [
        ("forward_backward", {}), ("optim_step", adam), ("optim_step", adam), ("forward_backward", {}),
        ("optim_step", adam), ("save_weights", {"path": "kept"}), ("save_weights_for_sampler", {"path": "named"}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": number}), ("forward_backward", {}),
        ("forward_backward", {}), ("optim_step", adam), ("forward_backward", {"times": 12}), ("optim_step", adam),
        ("forward", {}),
    ]  # fmt: skip
    return [(route, body(route, run, seq, more)) for seq, (route, more) in enumerate(listed, start=1)]


def body(route: str, run: str, seq: int, more: dict[str, Any]) -> dict[str, Any]:
    given = {"model_id": run, "seq_id": seq, **more}
    if route.startswith("forward"):
        content = {"data": [datum()] * given.pop("times", 1), "loss_fn": "cross_entropy"}
        given["forward_input" if route == "forward" else "forward_backward_input"] = content
    return given


def datum() -> dict[str, Any]:
    length = len(TEXT) - 1
    return {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:-1]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": TEXT[1:], "dtype": "int64", "shape": [length]},
            "weights": {"data": [1.0] * length, "dtype": "float32", "shape": [length]},
        },
    }


def sample(sampler: str, seq: int) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler, "seq_id": seq, "num_samples": 2, "prompt_logprobs": True,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:12]}]},
        "sampling_params": {"max_tokens": 16, "seed": 11, "temperature": 1.0},
    }  # fmt: skip
