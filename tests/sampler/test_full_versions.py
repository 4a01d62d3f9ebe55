"""A full run's versions on the torch engine: each request is drawn from its own, whoever else asks for which."""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from openrl.tasks.errors import InvalidRequest, OpenRLError
from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.model import coordinates
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.sampler.full_weights import FullWeights, Version
from openrl.workers.sampler.requests import Finished, Limits, Request, read
from openrl.workers.sampler.rotation import Rotation
from openrl.workers.sampler.switching import Switching
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from openrl.workers.weights.publish import Publisher
from tests.model_families.zoo import make_model
from tests.sampler.full_run import HOME, Run
from tests.tiny import make_tiny_model

torch.set_num_threads(1)

PROMPT = tuple(b"the quick brown fox")


class Clock:
    """A second passes each time it is looked at."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.05
        return self.now


def stock(run: Run, tmp_path: Path, directory: str) -> TorchEngine:
    """The version as a checkpoint of its own, loaded the stock way."""
    path = shutil.copytree(run.model, tmp_path / f"alone-{Path(directory).name}", dirs_exist_ok=True)
    save_file(run.saved[directory], path / "model.safetensors", metadata={"format": "pt"})
    return engine(load(path, device="cpu"))


def engine(loaded: LoadedModel, **options) -> TorchEngine:
    sizes = {"num_slots": 8, "kv_tokens": 4096, "prefill_tokens": 64} | options
    return TorchEngine(loaded, Versions(lambda name: None, max_idle=1), str, **sizes)


def sampler(run: Run, *, drain_s: float = 1e6, in_place: bool | None = None, **options) -> Switching:
    loaded = load(run.model, device="cpu")
    weights = FullWeights(loaded, run.data_dir, threads=1, in_place=in_place)
    rotation = Rotation(turn_s=1.0, drain_s=drain_s)
    return Switching(engine(loaded, **options), weights, rotation, Version, clock=Clock())


def request(directory: str, name: str = "r", tenant: str = "local", digest: str = "", **fields) -> Request:
    message = Sample(
        **(
            {
                "adapter_dir": directory, "weights_digest": digest, "prompt": PROMPT, "num_samples": 1, "max_tokens": 8,
                "seed": 1, "temperature": 0.0, "stop_at_eos": False,
            }
            | fields
        )
    )  # fmt: skip
    limits = Limits(vocab_size=260, max_context=512, cache_tokens=4096, eos_token_ids=(258,))
    return read(SampleJob(tenant=tenant, request_id=name, message=message, submitted=0.0), limits)


def drain(running, *requests: Request, steps: int = 3000) -> dict[str, Finished]:
    for one in requests:
        running.add(one)
    ended: dict[str, Finished] = {}
    while running.requests:
        steps -= 1
        assert steps, "the sampler doesn't end"
        ended |= {one.request.job.request_id: one for one in running.step()}
    return ended


def drawn(ended: Finished) -> tuple[list[int], list[float]]:
    assert ended.result is not None, ended.error
    [one] = ended.result.sequences
    return one.tokens, one.logprobs


def alone(run: Run, tmp_path: Path, directory: str, **fields) -> tuple[list[int], list[float]]:
    return drawn(drain(stock(run, tmp_path, directory), request("", **fields))["r"])


def is_of(run: Run, tmp_path: Path, ended: Finished, directory: str, **fields) -> bool:
    """Tell whether a request gave what its version gives alone; versions here differ in every answer."""
    tokens, logprobs = alone(run, tmp_path, directory, **fields)
    found, scores = drawn(ended)
    return found == tokens and scores == pytest.approx(logprobs, abs=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture
def run(tmp_path, model) -> Run:
    return Run(tmp_path / "data", model)


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma2", "smollm2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_family_is_patched_in_place_to_the_very_weights(tmp_path, name, dtype):
    run = Run(tmp_path / "data", make_model(tmp_path / name, name), dtype)
    first, second = run.steps(2)
    loaded = load(run.model, device="cpu")
    weights = FullWeights(loaded, run.data_dir, threads=1)
    for directory in (first, second, first):
        weights.apply(weights.prepare(Version(directory, run.digests[directory])))
        found = coordinates.views(loaded.model)
        assert all(torch.equal(found[each], tensor.float()) for each, tensor in run.saved[directory].items())


def test_requests_of_three_versions_are_each_drawn_from_their_own(run, tmp_path):
    versions = run.steps(3)
    requests = [request(versions[i % 3], f"r{i}", seed=i, digest=run.digests[versions[i % 3]]) for i in range(9)]
    ended = drain(sampler(run), *requests)
    for number, one in enumerate(requests):
        assert is_of(run, tmp_path, ended[one.job.request_id], versions[number % 3], seed=number)
    answers = {tuple(alone(run, tmp_path, version)[1]) for version in versions}
    assert len(answers) == 3, "the versions can't be told apart"


def test_of_two_clients_on_two_versions_neither_starves(run, tmp_path):
    """Each always has four requests; the one that came first never takes more than a turn from the other."""
    versions = run.steps(2)
    running = sampler(run, drain_s=2.0)
    ended: dict[str, list[int]] = {version: [] for version in versions}
    asked: dict[Request, str] = {}

    def ask(version: str) -> None:
        running.add(request(version, f"r{len(asked)}", max_tokens=12))
        asked[running.requests[-1]] = version

    for version in versions * 4:
        ask(version)
    for number in range(600):
        for one in running.step():
            assert one.result is not None, one.error
            ended[asked[one.request]].append(number)
            ask(asked[one.request])
    fewer, more = sorted(map(len, ended.values()))
    assert fewer > 20
    assert more < 2 * fewer
    assert max(later - one for steps in ended.values() for one, later in pairwise(steps)) < 150


def test_what_runs_too_long_is_laid_aside_and_goes_on_on_its_own_weights(run, tmp_path):
    long, short = run.steps(2)
    running = sampler(run, drain_s=1.0)
    running.add(request(long, "long", max_tokens=200, num_samples=1))
    while not running.version or running.version.directory != long:
        running.step()
    ended = drain(running, *(request(short, f"s{i}", max_tokens=8, seed=i) for i in range(3)))
    assert list(ended)[-1] == "long"
    assert is_of(run, tmp_path, ended["long"], long, max_tokens=200)
    assert all(is_of(run, tmp_path, ended[f"s{i}"], short, seed=i) for i in range(3))


def test_a_running_request_never_goes_on_on_other_weights(run, tmp_path):
    """Without a bound on how long it may take it ends first, however long the other waits."""
    long, short = run.steps(2)
    running = sampler(run)
    running.add(request(long, "long", max_tokens=60))
    running.step()
    ended = drain(running, request(short, "short"))
    assert list(ended) == ["long", "short"]
    assert is_of(run, tmp_path, ended["long"], long, max_tokens=60)
    assert is_of(run, tmp_path, ended["short"], short)


def test_cancelled_requests_leave_wherever_they_are(run):
    first, second = run.steps(2)
    running = sampler(run, drain_s=0.5)
    laid_aside, inside, waiting = (
        request(version, name, max_tokens=400) for version, name in ((first, "a"), (second, "b"), (first, "c"))
    )
    running.add(laid_aside)
    while not running.version or running.version.directory != first:
        running.step()
    for _ in range(5):
        running.step()
    running.add(inside)
    while running.version.directory != second:
        running.step()
    running.step()
    running.add(waiting)
    had = running.drop(list(running.requests))
    assert had[0] > 0
    assert had[2] == 0
    assert running.requests == []
    assert drain(running, request(first, "d"))["d"].result is not None


def test_two_steps_in_one_version_a_skipped_one_and_the_way_back(run, tmp_path):
    [first] = run.steps(1)
    run.train(100)
    run.train(101)
    both = run.publish("both.1")
    skipped, last = run.steps(2)
    running = sampler(run)
    for directory in (first, both, last, first, last):
        ended = drain(running, request(directory, digest=run.digests[directory]))
        assert is_of(run, tmp_path, ended["r"], directory)
    assert is_of(run, tmp_path, drain(sampler(run), request(skipped))["r"], skipped)  # one that was started anew


def test_a_torn_file_is_refused_and_others_are_served_on_the_right_weights(run, tmp_path):
    first, torn, last = run.steps(3)
    delta = run.data_dir / torn / "delta.bin"
    delta.write_bytes(delta.read_bytes()[:-7])
    running = sampler(run)
    requests = [request(version, version) for version in (first, torn, last)]
    ended = drain(running, *requests)
    assert "can't be loaded" in ended[torn].error
    assert ended[torn].category == "server"
    assert "can't be loaded" in ended[last].error  # its only way leads by the torn one
    assert is_of(run, tmp_path, ended[first], first)
    assert is_of(run, tmp_path, drain(running, request(first, seed=3))["r"], first, seed=3)


def test_a_version_that_is_gone_or_another_under_its_name_is_refused(run, tmp_path):
    first, second = run.steps(2)
    running = sampler(run)
    shutil.rmtree(run.data_dir / second)
    ended = drain(running, request(first, "first"), request(second, "gone"), request(first, "other", digest="0" * 64))
    assert (ended["gone"].category, "no longer on disk" in ended["gone"].error) == ("user", True)
    assert ended["other"].result is None
    assert is_of(run, tmp_path, ended["first"], first)


def test_a_version_for_another_base_or_model_is_refused(run, tmp_path):
    run.train(1)
    other_base = run.publish("base.1", extra={"base_digest": "of another base"})
    wide = Run(tmp_path / "data", make_model(tmp_path / "wide", "llama3"))
    wide.publisher = Publisher(run.data_dir / HOME, threads=1)
    ended = drain(sampler(run), request(other_base, "base"), request(wide.publish("wide.1"), "model"))
    assert all(one.result is None for one in ended.values())
    weights = FullWeights(load(run.model, device="cpu"), run.data_dir)
    with pytest.raises(InvalidRequest, match="another base"):
        weights.prepare(Version(other_base))
    with pytest.raises(InvalidRequest, match="this model needs"):
        weights.prepare(Version(f"{HOME}/wide.1"))


def test_weights_that_something_else_changed_are_never_served(run, tmp_path):
    first, second = run.steps(2)
    loaded = load(run.model, device="cpu")
    weights = FullWeights(loaded, run.data_dir, threads=1)
    weights.apply(weights.prepare(Version(first)))
    prepared = weights.prepare(Version(second))
    coordinates.views(loaded.model)["model.norm.weight"].add_(1)
    with pytest.raises(InvalidRequest):
        weights.apply(prepared)
    weights.apply(weights.prepare(Version(second)))  # from the anchor
    found = coordinates.views(loaded.model)
    assert all(torch.equal(found[each], tensor) for each, tensor in run.saved[second].items())


def test_a_version_that_is_foreseen_is_fetched_before_anybody_asks(run, tmp_path):
    first, second, third = run.steps(3)
    running = sampler(run)
    drain(running, request(first))
    for directory in (second, third):
        running.foresee(directory)
        ended = drain(running, request(directory, digest=run.digests[directory]))
        assert is_of(run, tmp_path, ended["r"], directory)
    running.foresee(f"{HOME}/nothing.1")
    running.tidy()
    assert is_of(run, tmp_path, drain(running, request(second))["r"], second)


def test_weights_beside_the_model_serve_a_model_that_others_move(run, tmp_path):
    first, second = run.steps(2)
    running = sampler(run, in_place=False)
    ended = drain(running, request(first, "1"), request(second, "2"))
    assert is_of(run, tmp_path, ended["1"], first)
    assert is_of(run, tmp_path, ended["2"], second)


def test_a_request_without_a_version_is_refused(run):
    with pytest.raises(OpenRLError, match="base model"):
        sampler(run).add(request(""))
