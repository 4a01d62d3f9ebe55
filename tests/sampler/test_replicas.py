"""Several samplers behind one queue set: each fetches what it lacks, and together they answer everything once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import Sample
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.wire import codec
from openrl.workers.sampler.__main__ import build
from openrl.workers.sampler.engine import SamplerEngine
from openrl.workers.sampler.settings import SamplerSettings
from tests.sampler.full_run import Run
from tests.tiny import make_tiny_model

torch.set_num_threads(1)

SETTINGS = SamplerSettings(slots=2, poll_s=0.05, version_turn_s=0.1, version_drain_s=0.5)


@pytest.fixture
def run(tmp_path, store) -> Run:
    path = make_tiny_model(tmp_path / "model")
    Registry(store).add_model(
        BaseModel(
            name="Tiny", slug="tiny", path=str(path), vocab_size=260, max_context=512, arch="llama",
            tokenizer_id="Tiny", hidden_size=64, num_layers=2, tied_embeddings=True,
        )
    )  # fmt: skip
    return Run(store.settings.data_dir, path)


@pytest.fixture
def pool() -> str:
    return keys.pool_slug("tiny", "local", "s:train:0")


@pytest.fixture
def start(store, pool) -> Iterator[Callable[[str], SamplerEngine]]:
    """Start a sampler of the run's pool."""
    running = []

    def begin(name: str, settings: SamplerSettings = SETTINGS) -> SamplerEngine:
        engine = build("Tiny", name, store, settings, pool=pool)
        engine.start()
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.release_waiters()
        engine.stop()


@pytest.fixture
def ask(store, run, pool) -> Callable[..., str]:
    """Submit a sample of a version; its request id."""
    session = Registry(store).create_session("local")
    samplers: dict[str, object] = {}
    numbers = iter(range(10_000))

    def submit(directory: str, **fields) -> str:
        if directory not in samplers:
            samplers[directory] = Registry(store).create_sampler(
                "local", session_id=session.session_id, seq=len(samplers), base_model="Tiny", slug=pool,
                adapter_dir=directory, weights_digest=run.digests[directory], run_id="s:train:0",
            )  # fmt: skip
        said = {"prompt": tuple(b"hello"), "num_samples": 1, "max_tokens": 12, "stop_at_eos": False, "seed": 3}
        message = Sample(adapter_dir=directory, weights_digest=run.digests[directory], **(said | fields))
        return Journal(store).submit_sample("local", samplers[directory], next(numbers), message).request_id

    return submit


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(store, request_id: str):
    wait_for(lambda: Futures(store).get("local", request_id).state != "pending")
    return Futures(store).get("local", request_id)


def tokens(future) -> list[int]:
    assert future.state == "done", future.error
    return codec.sample_response_to_json(future.result)["sequences"][0]["tokens"]


def held(store, engine: SamplerEngine) -> set:
    return Journal(store).held_samples(engine.lease)


def test_two_samplers_of_one_pool_share_its_requests_and_each_fetches_the_versions_that_they_name(
    store, run, start, ask
):
    versions = run.steps(2)
    first = start("sampler-a")
    wanted = {version: tokens(ended(store, ask(version))) for version in versions}
    assert wanted[versions[0]] != wanted[versions[1]]
    second = start("sampler-b")
    served: dict[str, set] = {"a": set(), "b": set()}
    requests = [(versions[i % 2], ask(versions[i % 2])) for i in range(24)]
    wait_for(lambda: served["a"].update(held(store, first)) or served["b"].update(held(store, second)) or served["b"])
    assert all(tokens(ended(store, request_id)) == wanted[version] for version, request_id in requests)
    assert not held(store, first) | held(store, second)


def test_while_both_have_room_each_version_is_drawn_by_the_sampler_that_has_it_in_memory(store, run, start, ask):
    settings = replace(SETTINGS, poll_s=5.0)  # so long is a request left to the other
    versions = run.steps(2)
    one = start("sampler-a", settings)
    full = [ask(versions[0], max_tokens=480) for _ in range(settings.slots)]
    wait_for(lambda: len(held(store, one)) == len(full))
    other = start("sampler-b", settings)
    wanted = {versions[1]: tokens(ended(store, ask(versions[1])))}
    for request_id in full:
        Cancelling(store).cancel("local", request_id)
    wanted[versions[0]] = tokens(ended(store, ask(versions[0])))
    for number in range(6):
        version = versions[number // 2 % 2]
        assert tokens(ended(store, ask(version))) == wanted[version]
        assert [engine._runner.directory() for engine in (one, other)] == versions


def test_what_a_sampler_that_ends_had_in_hand_is_drawn_by_another_to_the_same_tokens(store, run, start, ask):
    [version] = run.steps(1)
    leaving = start("sampler-a")
    short = ask(version, max_tokens=4)
    ended(store, short)
    requests = [ask(version, max_tokens=300, seed=seed) for seed in range(2)]
    wait_for(lambda: held(store, leaving))
    start("sampler-b")
    leaving.stop()
    assert all(len(tokens(ended(store, request_id))) == 300 for request_id in requests)


def test_a_cancelled_sample_is_let_go_by_the_one_that_has_it(store, run, start, ask):
    [version] = run.steps(1)
    engines = [start("sampler-a"), start("sampler-b")]
    requests = [ask(version, max_tokens=500, num_samples=50) for _ in range(4)]
    wait_for(lambda: all(held(store, engine) for engine in engines))
    for request_id in requests:
        Cancelling(store).cancel("local", request_id)
    wait_for(lambda: not any(held(store, engine) for engine in engines))
    assert all(ended(store, request_id).state == "failed" for request_id in requests)
    assert tokens(ended(store, ask(version)))


def test_a_pool_of_another_base_is_refused(store, run, tmp_path: Path):
    with pytest.raises(InvalidRequest, match="no pool of 'Tiny'"):
        build("Tiny", "sampler-a", store, SETTINGS, pool=keys.pool_slug("other", "local", "s:train:0"))


def test_every_answer_says_which_version_drew_it(store, run, start, ask):
    versions = run.steps(2)
    start("sampler-a")
    for version in versions:
        answer = codec.sample_response_to_json(ended(store, ask(version)).result)
        assert answer["weights"] == f"s:train:0/sampler_weights/{Path(version).name}@{run.digests[version][:16]}"
