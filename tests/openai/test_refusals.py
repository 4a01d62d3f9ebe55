"""What isn't served is refused by name, in OpenAI's shape, and nothing is queued."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from openrl.scheduler.models import describe
from openrl.tasks.journal import Journal
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from tests.openai.conftest import MESSAGES, NAME, PLAIN, Service
from tests.tiny import make_tiny_model

CHAT: dict[str, Any] = {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": NAME, "prompt": "hi"}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}]


def post(api: Service, path: str, body: Any, **options: Any) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{api.url}/v1/{path}", content=json.dumps(body), headers=headers, timeout=20, **options)


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], []]}, "prompt"),
    ({"prompt": [[1], ["a"]]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": {"text": "a"}}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"prompt": [1, 260]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ({"prompt": "a" * 512}, "prompt"),
    ({"prompt": "a" * 500, "max_tokens": 20}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": 1025}, "n"),
    ({"seed": 2**63}, "seed"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": 1}, "echo"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"tempo": 1}}, "stream_options"),
    ({"stream": True, "echo": True, "logprobs": 1}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logit_bias": {"50256": -100}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"frequency_penalty": -1}, "frequency_penalty"),
    ({"top_k": 5}, "top_k"),
    ({"messages": []}, "messages"),
    ({"model": 5}, "model"),
    ({"model": "tinker://x"}, "model"),
]

CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "owner", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": "a", "weight": 1}]}, "messages"),
    ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages"),
    ({"messages": IMAGE}, "messages"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    ({"max_tokens": 600}, "max_tokens"),
    ({"echo": True}, "echo"),
    ({"prompt": "a"}, "prompt"),
]


def test_a_request_that_makes_no_sense_names_its_field_and_queues_nothing(api: Service) -> None:
    for path, whole, cases in (("completions", COMPLETION, COMPLETIONS), ("chat/completions", CHAT, CHATS)):
        for changes, param in cases:
            refuses(post(api, path, {**whole, **changes}), param)
    assert not api.unfinished


def refuses(answer: httpx.Response, param: str) -> None:
    assert (answer.status_code, answer.headers["x-should-retry"]) == (400, "false"), answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert param in error["message"] and "Traceback" not in answer.text and len(error["message"]) < 1000


def test_other_trouble_has_openais_shape_too(api: Service) -> None:
    for answer, status in (
        (httpx.post(f"{api.url}/v1/completions", content=b"{", headers={"Content-Type": "application/json"}), 400),
        (httpx.post(f"{api.url}/v1/completions", content=b"a=b"), 400),
        (post(api, "completions", {**COMPLETION, "model": "gpt-4"}), 404),
        (post(api, "completions", [1]), 400),
    ):
        assert answer.status_code == status
        assert {"message", "type", "param", "code"} <= answer.json()["error"].keys()


def test_a_prompt_that_fills_the_context_says_so_in_openais_word(api: Service) -> None:
    error = post(api, "completions", {**COMPLETION, "prompt": "a" * 600}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "512" in error["message"]


def test_a_text_far_beyond_the_context_is_refused_before_all_of_it_is_tokenised(api: Service) -> None:
    text = "one two " * 100_000
    for path, changes, param in (
        ("completions", {**COMPLETION, "prompt": text}, "prompt"),
        ("completions", {**COMPLETION, "prompt": ["a", text]}, "prompt"),
        ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}, "messages"),
    ):
        answer = post(api, path, changes)
        refuses(answer, param)
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded" and "over 1024 tokens" in error["message"], error
    tokens = post(api, "completions", {**COMPLETION, "prompt": [[1] * (1 << 21)] * 3})
    refuses(tokens, "prompt")
    assert "together" in tokens.text and not api.unfinished


def wait_until_nothing_is_left(api: Service) -> None:
    """What is given up is cancelled beside the answer, which doesn't wait for it."""
    deadline = time.monotonic() + 60
    while api.unfinished:
        assert time.monotonic() < deadline, api.unfinished
        time.sleep(0.02)


def test_a_request_that_nobody_serves_is_given_up_and_cancelled(api: Service) -> None:
    object.__setattr__(api.services.settings, "completion_timeout_s", 0.5)
    with pytest.raises(openai.APIStatusError) as whole:
        api.client().completions.create(model=NAME, prompt="a")
    assert (whole.value.status_code, whole.value.code) == (504, "timeout")
    with pytest.raises(openai.APIError, match="OPENRL_COMPLETION_TIMEOUT_S"):
        list(api.client().completions.create(model=NAME, prompt="a", stream=True))
    wait_until_nothing_is_left(api)


def test_a_process_that_ends_sends_its_clients_elsewhere(api: Service) -> None:
    api.services.polls.release()
    with pytest.raises(openai.RateLimitError) as busy:
        api.client().completions.create(model=NAME, prompt="a")
    assert busy.value.response.headers["Retry-After"] and busy.value.response.headers["x-should-retry"] == "true"
    wait_until_nothing_is_left(api)


def test_a_stream_that_waits_keeps_its_connection_alive(api: Service) -> None:
    with httpx.stream("POST", f"{api.url}/v1/completions", json={**COMPLETION, "stream": True}) as answer:
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        assert next(answer.iter_lines()) == ": keep-alive"


def test_the_prompt_is_what_transformers_makes_of_the_messages(api: Service, model_dir: Any) -> None:
    expected = AutoTokenizer.from_pretrained(model_dir, local_files_only=True).apply_chat_template(
        PLAIN, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    stream = api.client().chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=1, stream=True)
    with Lease(api.store, "played", kind="sampler", slug=api.model.slug) as lease:
        (job,) = Journal(api.store).take_samples(api.model.slug, lease, limit=1)
    stream.close()
    assert list(job.message.prompt) == expected


def test_a_model_without_a_template_says_what_to_do(api: Service, tmp_path: Path) -> None:
    Registry(api.store).add_model(describe("tiny/bare", make_tiny_model(tmp_path / "bare")))
    with pytest.raises(openai.BadRequestError, match="no chat template: use /v1/completions"):
        api.client().chat.completions.create(model="tiny/bare", messages=MESSAGES)
