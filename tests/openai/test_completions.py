"""/v1/completions through OpenAI's own client, on a tiny model that is really run."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import openai
import pytest

from openrl.tasks import keys
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import Sample
from openrl.tasks.registry import Registry
from openrl.tasks.tenants import Tenants
from openrl.tasks.wire import codec
from tests.openai.conftest import NAME, RUN, Service

PROMPT = "the quick brown fox"


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


def draw(service: Service, model: str = "", **fields: Any) -> dict[str, Any]:
    """Sample as the SDK does; return the result."""
    registry = Registry(service.store)
    session = registry.create_session(service.tenant)
    directory = registry.checkpoint_by_uri(service.tenant, model).directory if model else ""
    sampler = registry.create_sampler(
        service.tenant, session_id=session.session_id, seq=0, base_model=NAME, slug=service.model.slug,
        model_path=model, adapter_dir=directory,
    )  # fmt: skip
    message = Sample(adapter_dir=directory, **({"prompt": tuple(PROMPT.encode()), "num_samples": 1} | fields))
    request_id = Journal(service.store).submit_sample(service.tenant, sampler, 0, message).request_id
    deadline = time.monotonic() + 60
    while (future := Futures(service.store).get(service.tenant, request_id)).state == "pending":
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert future.state == "done", future.error
    return codec.sample_response_to_json(future.result)


def until(happened: Any) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# what is drawn -----------------------------------------------------------------------------------


def test_a_completion_is_the_sample_that_the_sdk_gets(service: Service, client: openai.OpenAI) -> None:
    path = service.save("v1")
    for model in ("", path):
        rule = {"seed": 5, "temperature": 0.7, "top_p": 0.9, "max_tokens": 12}
        (sdk,) = draw(service, model, topk_sample_logprobs=2, **rule)["sequences"]
        answer = client.completions.create(model=model or NAME, prompt=PROMPT, logprobs=2, **rule)
        (choice,) = answer.choices
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == sdk["logprobs"]
        assert choice.finish_reason == sdk["stop_reason"]
        assert choice.text == "".join(choice.logprobs.tokens)
        assert client.completions.create(model=model or NAME, prompt=PROMPT, **rule).choices[0].text == choice.text
        usage = answer.usage
        assert usage and (usage.prompt_tokens, usage.completion_tokens) == (len(PROMPT), len(sdk["tokens"]))


def test_fine_tuned_weights_answer_otherwise_than_their_base(service: Service, client: openai.OpenAI) -> None:
    answers = [
        client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=20)
        for model in (NAME, service.save("v1", seed=1), service.save("v2", seed=2))
    ]
    assert len({answer.choices[0].text for answer in answers}) == 3
    base, first, second = (answer.system_fingerprint for answer in answers)
    assert base is None
    assert "sampler_weights/v1" in first and "sampler_weights/v2" in second


def test_every_chunk_of_a_stream_names_the_weights_that_draw_it(service: Service, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": service.save("v3", seed=3), "prompt": PROMPT, "max_tokens": 3}
    whole = client.completions.create(**asked).system_fingerprint
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    assert "sampler_weights/v3" in whole
    assert {chunk.system_fingerprint for chunk in chunks} == {whole}
    plain = client.completions.create(stream=True, model=NAME, prompt=PROMPT, max_tokens=3)
    assert {chunk.system_fingerprint for chunk in plain} == {None}


def test_a_prompt_has_four_shapes_and_each_answer_its_place(client: openai.OpenAI) -> None:
    def texts(prompt: Any, n: int = 1) -> list[str]:
        answer = client.completions.create(model=NAME, prompt=prompt, n=n, seed=3, max_tokens=6)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
        return [choice.text for choice in answer.choices]

    first, second = texts("hello"), texts("world")
    assert first != second
    assert texts(["hello", "world"]) == first + second
    assert texts(list(b"hello")) == first
    assert texts([list(b"hello"), list(b"world")]) == first + second
    assert texts(["hello", "world"], n=2) == texts("hello", n=2) + texts("world", n=2)
    assert texts("hello", n=2)[0] == first[0] != texts("hello", n=2)[1]


def test_without_max_tokens_a_completion_has_sixteen_at_most(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt=PROMPT, seed=1)
    assert answer.usage and answer.usage.completion_tokens <= 16


# log-probabilities, as evaluation harnesses read them --------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_continuations_likelihood_is_read_off_an_echoed_prompt(
    service: Service, client: openai.OpenAI, max_tokens: int
) -> None:
    contexts, continuations = [list(b"the quick"), list(b"jumps")], [list(b" brown"), list(b" over")]
    answer = client.completions.create(
        model=NAME, prompt=[[*a, *b] for a, b in zip(contexts, continuations, strict=True)], echo=True, logprobs=1,
        temperature=0, max_tokens=max_tokens, seed=1234,
    )  # fmt: skip
    for choice, context, continuation in zip(answer.choices, contexts, continuations, strict=True):
        assert choice.logprobs is not None
        told, tops = choice.logprobs.token_logprobs, choice.logprobs.top_logprobs
        assert told is not None and tops is not None and len(told) == len(context) + len(continuation) + max_tokens
        assert told[0] is None and tops[0] is None
        expected = draw(service, prompt=(*context, *continuation), prompt_logprobs=True, max_tokens=1)
        begin, end = len(context), len(context) + len(continuation)
        assert told[begin:end] == pytest.approx(expected["prompt_logprobs"][begin:end], abs=1e-4)
        greedy = [told[place] == max(tops[place].values()) for place in range(begin, end)]
        whole = draw(service, prompt=(*context, *continuation), topk_prompt_logprobs=1, max_tokens=1)
        likeliest = [whole["topk_prompt_logprobs"][place][0][0] for place in range(begin, end)]
        assert greedy == [token == best for token, best in zip(continuation, likeliest, strict=True)]
    usage = answer.usage
    assert usage and usage.completion_tokens == 2 * max_tokens


def test_offsets_lead_to_each_tokens_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=NAME, prompt="añ日b", echo=True, logprobs=0, max_tokens=12, seed=2)
    (choice,) = answer.choices
    assert choice.logprobs and choice.logprobs.tokens and choice.logprobs.text_offset
    assert choice.text.startswith("añ日b")
    pairs = list(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    assert [offset for _, offset in pairs[:7]] == [0, 1, 1, 2, 2, 2, 3]
    for name, offset in pairs[7:]:
        if not name.startswith("<"):
            assert choice.text[offset : offset + len(name)] == name
    assert "".join(name for name, _ in pairs[:7]) == "añ日b"


def test_the_drawn_token_is_always_among_the_likeliest(client: openai.OpenAI) -> None:
    choice = client.completions.create(model=NAME, prompt=PROMPT, logprobs=3, max_tokens=20, seed=9).choices[0]
    assert choice.logprobs and choice.logprobs.top_logprobs and choice.logprobs.token_logprobs
    for logprob, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert logprob in top.values() and 1 <= len(top) <= 4


# streams -----------------------------------------------------------------------------------------


def test_a_stream_is_the_whole_answer_in_parts(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": NAME, "prompt": ["hello", "world"], "n": 2, "max_tokens": 24, "seed": 4, "logprobs": 2,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    texts, finish, logprobs = [""] * 4, [""] * 4, [[] for _ in range(4)]  # type: ignore[var-annotated]
    usage = None
    for chunk in client.completions.create(stream=True, stream_options={"include_usage": True}, **asked):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not finish[choice.index] and chunk.usage is None
            texts[choice.index] += choice.text
            finish[choice.index] = choice.finish_reason or ""
            if choice.logprobs:
                told = choice.logprobs
                logprobs[choice.index] += list(
                    zip(told.tokens, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True)
                )
    assert texts == [choice.text for choice in whole.choices]
    assert finish == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    for told, choice in zip(logprobs, whole.choices, strict=True):
        expected = choice.logprobs
        assert expected and [row[0] for row in told] == expected.tokens
        assert [row[1] for row in told] == pytest.approx(expected.token_logprobs, abs=1e-4)
        assert [row[2] for row in told] == [pytest.approx(top, abs=1e-4) for top in expected.top_logprobs or ()]
        assert [row[3] for row in told] == expected.text_offset


def test_tokens_come_while_the_sample_is_still_drawn(service: Service, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt="a", max_tokens=500, seed=1, logprobs=0, stream=True)
    next(iter(stream))
    assert len(service.unfinished) == 1
    parts = [chunk.choices[0].finish_reason for chunk in stream]
    assert len(parts) > 5 and parts[-1] in ("stop", "length")
    assert not service.unfinished


def test_a_stop_ends_text_and_stream_before_it(client: openai.OpenAI) -> None:
    free = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=60, seed=8).choices[0].text
    stop = next(free[place : place + 2] for place in range(5, 50) if free[place : place + 2].isascii())
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 60, "seed": 8, "stop": [stop, "never"]}
    whole = client.completions.create(**asked).choices[0]
    assert (whole.text, whole.finish_reason) == (free[: free.index(stop)], "stop")
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (whole.text, "stop")


def test_an_echo_comes_first_in_a_stream(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": NAME, "prompt": PROMPT, "max_tokens": 5, "seed": 8, "echo": True}
    chunks = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked)]
    assert chunks[0] == PROMPT
    assert "".join(chunks) == client.completions.create(**asked).choices[0].text
    nothing = list(client.completions.create(stream=True, **asked | {"max_tokens": 0}))
    assert [chunk.choices[0].text for chunk in nothing] == [PROMPT, ""]
    assert nothing[-1].choices[0].finish_reason == "length"


def test_closing_a_stream_cancels_its_sample(service: Service, client: openai.OpenAI) -> None:
    stream = client.completions.create(model=NAME, prompt="a", max_tokens=500, seed=1, logprobs=0, n=8, stream=True)
    next(iter(stream))
    (member,) = service.unfinished
    stream.close()
    until(lambda: not service.unfinished)
    future = Futures(service.store).get(*member.split(" ", 1))
    assert future.error == "cancelled by its client"


def test_nothing_is_published_for_who_does_not_stream(service: Service, client: openai.OpenAI) -> None:
    with service.store.redis.pubsub() as ear:
        ear.psubscribe(keys.drafts("*"))
        client.completions.create(model=NAME, prompt="a", max_tokens=3)
        service.store.redis.publish(keys.drafts("last"), b"")
        heard = [ear.get_message(timeout=10) for _ in range(2)]
        assert [each["type"] for each in heard] == ["psubscribe", "pmessage"]
        assert heard[1]["channel"] == keys.drafts("last").encode()


def test_a_sample_that_fails_ends_its_stream_with_an_error(service: Service, client: openai.OpenAI) -> None:
    path = service.save("damaged")
    (weights,) = (service.store.settings.data_dir / "tenants" / service.tenant).rglob("adapter_model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(openai.InternalServerError) as whole:
        client.completions.create(model=path, prompt="a")
    assert whole.value.response.headers["x-should-retry"] == "false"
    with pytest.raises(openai.APIError, match="can't be loaded") as streamed:
        list(client.completions.create(model=path, prompt="a", stream=True))
    for error in (whole.value, streamed.value):
        assert isinstance(error.body, dict) and (error.type, error.code) == ("server_error", "sample_failed")


# models and tenants ------------------------------------------------------------------------------


def test_weights_keep_one_sampler_however_often_they_are_asked_for(service: Service, client: openai.OpenAI) -> None:
    path = service.save("v1")
    for _ in range(3):
        client.completions.create(model=path, prompt="a", max_tokens=1)
        client.completions.create(model=NAME, prompt="a", max_tokens=1)
    ((session,), total) = Registry(service.store).sessions(service.tenant, 10, 0)
    _, samplers = Registry(service.store).session_contents(service.tenant, session.session_id)
    assert (total, len(samplers)) == (1, 2)


def test_a_finished_session_is_followed_by_another(service: Service, client: openai.OpenAI) -> None:
    client.completions.create(model=NAME, prompt="a", max_tokens=1)
    ((session,), _) = Registry(service.store).sessions(service.tenant, 10, 0)
    Registry(service.store).finish_session(service.tenant, session.session_id, "success")
    client.completions.create(model=NAME, prompt="a", max_tokens=1)


def test_a_sampler_stays_what_it_was_when_its_weights_are_saved_anew(service: Service, client: openai.OpenAI) -> None:
    def text(model: str) -> str:
        return client.completions.create(model=model, prompt=PROMPT, temperature=0, max_tokens=16).choices[0].text

    path = service.save("latest", seed=1, token=1)
    old = text(path)
    ((session,), _) = Registry(service.store).sessions(service.tenant, 10, 0)
    _, (sampler,) = Registry(service.store).session_contents(service.tenant, session.session_id)
    service.save("latest", seed=2, token=2)
    assert text(path) != old
    assert text(sampler) == old


def test_models_lists_what_can_be_named(service: Service, client: openai.OpenAI) -> None:
    path = service.save("v1")
    assert [model.id for model in client.models.list()] == [NAME, path]
    assert [client.models.retrieve(name).id for name in (NAME, path)] == [NAME, path]
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("gpt-4")
    assert missing.value.code == "model_not_found"


def test_published_weights_are_shown_without_their_owner_and_what_cannot_be_sampled_is_not(service: Service) -> None:
    path, registry = service.save("shown"), Registry(service.store)
    registry.set_public(service.tenant, RUN, "sampler_weights/shown", public=True)
    bob = service.client(Tenants(service.store).create_key("bob"))
    assert bob.models.retrieve(path).owned_by == ""
    ada = service.client(Tenants(service.store).create_key(service.tenant))
    assert ada.models.retrieve(path).owned_by == service.tenant
    row = replace(registry.checkpoint(service.tenant, RUN, "sampler_weights/shown"), checkpoint_id="weights/shown")
    service.store.redis.hset(keys.checkpoints(service.tenant, RUN), row.checkpoint_id, row.to_json())
    with pytest.raises(openai.NotFoundError, match="sampled"):
        ada.models.retrieve(row.uri)


def test_another_tenants_weights_look_like_none(service: Service, client: openai.OpenAI) -> None:
    path = service.save("secret")
    client.completions.create(model=path, prompt="a", max_tokens=1)
    ((session,), _) = Registry(service.store).sessions(service.tenant, 10, 0)
    _, (sampler,) = Registry(service.store).session_contents(service.tenant, session.session_id)
    bob = service.client(Tenants(service.store).create_key("bob"))
    made_up = f"tinker://{RUN}/sampler_weights/nothing"
    nobodys = sampler.replace(session.session_id, f"s-{'0' * 32}")
    for real, false in ((path, made_up), (sampler, nobodys)):
        told = []
        for model in (real, false):
            with pytest.raises(openai.NotFoundError) as missing:
                bob.completions.create(model=model, prompt="a")
            assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
            told.append(missing.value.message.replace(model, "MODEL"))
        assert told[0] == told[1]
    assert path not in [model.id for model in bob.models.list()]


def test_a_key_is_needed_and_the_scope_to_sample(service: Service) -> None:
    reader = service.client(Tenants(service.store).create_key("ada", scopes=["read"]))
    assert [model.id for model in reader.models.list()] == [NAME]
    with pytest.raises(openai.PermissionDeniedError, match="scope sample"):
        reader.completions.create(model=NAME, prompt="a")
    with pytest.raises(openai.AuthenticationError) as refusal:
        service.client("tml-wrong").models.list()
    assert refusal.value.code == "invalid_api_key"
