"""Raw HTTP against the service, in the SDK's own wire forms, for what the SDK itself would never send."""

from __future__ import annotations

import time
from typing import Any

import httpx
import numpy as np

from openrl.tasks.wire import openrl_pb2 as pb

PROTO = "application/x-protobuf"


def new_session(http: httpx.Client) -> str:
    answer = http.post("/create_session", json={"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})
    answer.raise_for_status()
    return str(answer.json()["session_id"])


def new_run(http: httpx.Client, *, model: str, session: str | None = None, number: int = 0, rank: int = 4) -> str:
    session = session or new_session(http)
    body = {
        "session_id": session, "model_seq_id": number, "base_model": model, "type": "create_model",
        "lora_config": {"rank": rank, "seed": 1, "train_unembed": True, "train_mlp": True, "train_attn": True},
    }  # fmt: skip
    answer = http.post("/create_model", json=body)
    answer.raise_for_status()
    result = poll(http, answer.json()["request_id"]).json()
    assert "error" not in result, result
    return str(result["model_id"])


def forward_backward_body(run: str, seq: int, tokens: list[int], *, weight: float = 1.0) -> bytes:
    request = pb.ForwardBackwardCall(model_id=run, seq_id=seq, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array(tokens[:-1], dtype="<i4").tobytes()
    length = len(tokens) - 1
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array(tokens[1:], dtype="<i8").tobytes(), pb.ELEMENT_INT64
    targets.shape.append(length)
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = np.full(length, weight, dtype="<f4").tobytes(), pb.ELEMENT_FLOAT32
    weights.shape.append(length)
    return bytes(request.SerializeToString())


def forward_backward(http: httpx.Client, run: str, seq: int, tokens: list[int], **kwargs: Any) -> httpx.Response:
    body = forward_backward_body(run, seq, tokens, **kwargs)
    return http.post("/forward_backward", content=body, headers={"Content-Type": PROTO})


def optim_step(http: httpx.Client, run: str, seq: int, **params: float) -> httpx.Response:
    return http.post("/optim_step", json={"model_id": run, "seq_id": seq, "type": "optim_step", "adam_params": params})


def asample(http: httpx.Client, sampler: str, seq: int, prompt: list[int], **params: Any) -> httpx.Response:
    body = {
        "sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, "type": "sample",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt}]}, "sampling_params": params,
        "prompt_logprobs": False, "topk_prompt_logprobs": 0,
    }  # fmt: skip
    return http.post("/asample", json=body)


def poll(
    http: httpx.Client, request_id: str, *, timeout_s: float = 60.0, accept: str = "application/json"
) -> httpx.Response:
    """Poll as the SDK does, until the answer isn't 408."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        answer = http.post(
            "/retrieve_future", json={"request_id": request_id, "allow_metadata_only": True}, headers={"Accept": accept}
        )
        if answer.status_code != 408:
            return answer
    raise AssertionError(f"{request_id} is still pending after {timeout_s} s")
