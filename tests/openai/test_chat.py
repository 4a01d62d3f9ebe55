"""/v1/chat/completions through OpenAI's own client, on a tiny model that is really run."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.openai.conftest import MESSAGES, NAME, PLAIN, Service


def test_an_answer_is_one_message_of_the_assistants(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 20, "seed": 6}
    answer = client.chat.completions.create(**asked)
    (choice,) = answer.choices
    assert (choice.message.role, choice.index) == ("assistant", 0) and choice.message.content
    assert choice.logprobs is None
    assert answer.usage and answer.usage.completion_tokens <= 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    old = client.chat.completions.create(**asked | {"max_completion_tokens": openai.omit, "max_tokens": 20})
    assert old.choices[0].message.content == choice.message.content


def test_without_a_limit_a_chat_ends_with_the_model_or_its_context(service: Service, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=NAME, messages=MESSAGES, seed=1)
    assert answer.usage and answer.usage.completion_tokens > 16
    full = answer.usage.total_tokens == service.model.max_context
    assert answer.choices[0].finish_reason == ("length" if full else "stop")


@pytest.mark.parametrize("stop", [None, "o", ["e", "7"]])
def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI, stop: Any) -> None:
    asked: dict[str, Any] = {
        "model": NAME, "messages": MESSAGES, "n": 2, "max_tokens": 40, "seed": 2, "stop": stop, "logprobs": True,
        "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, finish, tokens = ["", ""], ["", ""], [[], []]  # type: ignore[var-annotated]
    roles: list[Any] = []
    usage = None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles += [choice.delta.role] if choice.delta.role else []
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] += choice.finish_reason or ""
            tokens[choice.index] += [each.token for each in (choice.logprobs and choice.logprobs.content) or ()]
    assert roles == ["assistant"] * 2
    assert texts == [choice.message.content for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    for told, choice in zip(tokens, whole.choices, strict=True):
        assert choice.logprobs and told == [each.token for each in choice.logprobs.content or ()]
    assert usage == whole.usage


def test_log_probabilities_come_with_every_token(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, seed=3, logprobs=True, top_logprobs=4, temperature=0
    ).choices
    assert choice.logprobs and choice.logprobs.content
    for each in choice.logprobs.content:
        assert bytes(each.bytes or ()).decode() == each.token
        assert len(each.top_logprobs) == 4 and each.top_logprobs[0].logprob == pytest.approx(each.logprob, abs=1e-4)


def test_what_the_template_refuses_is_the_requests_fault(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no such role: tool") as refusal:
        asked: dict[str, Any] = {"messages": [{"role": "tool", "content": "1", "name": "x"}]}
        client.chat.completions.create(model=NAME, **asked)
    assert refusal.value.param == "messages"


def test_nothing_is_left_of_a_chat_that_ended(service: Service, client: openai.OpenAI) -> None:
    for stream in (False, True):
        asked: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "max_tokens": 2, "stream": stream}
        assert list(client.chat.completions.create(**asked))
    assert not service.unfinished
    assert not list(service.store.redis.scan_iter(match=f"openrl:t:{service.tenant}:*:done:*"))


NEUTRAL: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "user": "someone"},
    {"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "modalities": ["text"]},
    {"tools": None, "audio": None, "store": False, "metadata": None, "service_tier": "auto", "stop": None},
)


def test_what_asks_for_nothing_special_is_accepted(client: openai.OpenAI) -> None:
    for neutral in NEUTRAL:
        asked: dict[str, Any] = {"model": NAME, "messages": PLAIN, "max_tokens": 1, **neutral}
        assert client.chat.completions.create(**asked).choices
