"""OpenAI's client against the running service, under its own server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import openai
import pytest
import redis
import tinker
from tinker import types

from openrl.tasks import keys
from tests.stack.conftest import MODEL, Service

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180), pytest.mark.full]

DOCS = Path(__file__).parent.parent.parent / "docs" / "openai.md"


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="tml-local", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
def store(service: Service) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(service.redis_url(), decode_responses=True) as store:
        yield store


def test_the_evaluation_in_the_docs_finds_a_fine_tuned_answer_likelier(
    service: Service, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
        training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
        ids = list(b"the quick brown fox")
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
        )
        for _ in range(30):
            training.forward_backward([datum], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        path = training.save_weights_for_sampler("taught").result().path
    (example,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    example = example.replace("http://127.0.0.1:8000", service.base_url)
    names = {"MODEL_DIRECTORY": str(model_dir), "MODELS": [MODEL, path]}
    exec(compile(example, str(DOCS), "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    base, taught = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (base[0], taught[0]) == (MODEL, path)
    assert float(taught[1]) > -1 > float(base[1]) + 5
    assert (base[2], taught[2]) == ("False", "True")


def test_a_stream_tells_its_tokens_as_they_come_and_all_of_them(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 60, "seed": 1}
    chunks = [chunk.choices[0] for chunk in client.completions.create(stream=True, **asked)]  # type: ignore[call-overload]
    assert len(chunks) > 3
    whole = client.completions.create(**asked).choices[0]  # type: ignore[call-overload]
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (whole.text, whole.finish_reason)


@pytest.mark.parametrize("stream", [True, False])
def test_who_goes_away_has_the_sample_cancelled(
    service: Service, client: openai.OpenAI, store: redis.Redis, stream: bool
) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 500, "n": 1000, "seed": 1}
    unfinished = keys.unfinished(keys.slug(MODEL))
    if stream:
        answer = client.completions.create(stream=True, **asked)  # type: ignore[call-overload]
        next(iter(answer))
        (member,) = store.zrange(unfinished, 0, -1)
        answer.close()
    else:
        leaving = HTTPConnection("127.0.0.1", service.port)
        said = {"Content-Type": "application/json", "Authorization": "Bearer tml-local"}
        leaving.request("POST", "/v1/completions", json.dumps(asked), said)
        while not (found := store.zrange(unfinished, 0, -1)):
            time.sleep(0.05)
        leaving.close()
        (member,) = found
    deadline = time.monotonic() + 60
    while store.zrange(unfinished, 0, -1):
        assert time.monotonic() < deadline, service.logs()
        time.sleep(0.1)
    assert store.hget(keys.future(*member.split(" ", 1)), "error") == "cancelled by its client"
