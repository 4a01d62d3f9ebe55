"""Trainers and samplers of several runs on one accelerator, as real processes: same curves, never together."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tinker
from redis import Redis

from openrl.timeslice.standing import standing
from openrl.timeslice.turn import Turns
from openrl.workers.model.arena import Arena
from openrl.workers.model.settings import book_path, half_of_memory
from tests.stack.conftest import Service
from tests.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
from placed import Placed, placed

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

GPU = "gpu-0"
ROOM = 1536 << 10
"""Bytes: the largest state fits, two don't."""
ADAM = tinker.AdamParams(learning_rate=1e-3)
SETTINGS = {"OPENRL_SAMPLER_KV_TOKENS": "512", "OPENRL_LEASE_S": "15"}
MODELS = {"tiny/a": "llama", "tiny/b": "qwen3"}

Curve = list[tuple[float, list[list[int]]]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Placed]:
    home = tmp_path_factory.mktemp("turns")
    models = {name: make_tiny_model(home / kind, model_type=kind) for name, kind in MODELS.items()}
    with placed(models, home / "data", accelerator_bytes=ROOM, settings=SETTINGS) as running:
        yield running


def learn(client: tinker.ServiceClient, model: str, seed: int, steps: int, metadata: dict | None = None) -> Curve:
    """Train a run on what its own sampler draws; return each step's loss and what was drawn."""
    run = client.create_lora_training_client(model, rank=4, seed=seed, user_metadata=metadata).result()
    curve: Curve = []
    for step in range(steps):
        sampler = run.save_weights_and_get_sampling_client().result()
        how = tinker.SamplingParams(max_tokens=12, temperature=1.0, seed=step)
        drawn = sampler.sample(tinker.ModelInput.from_ints([1, 2, 3]), 3, how).result().sequences
        data = []
        for one in drawn:
            tokens = [1, 2, 3, *one.tokens]
            inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
            data.append(tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
        passed, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(ADAM)
        curve.append((passed.result().metrics["loss:sum"], [list(one.tokens) for one in drawn]))
        stepped.result()
    return curve


def learn_all(service: Placed, steps: int) -> dict[str, Curve]:
    """Train a run of each model at the same time."""
    curves: dict[str, Curve] = {}

    def one(model: str, seed: int) -> None:
        with service.client() as client:
            curves[model] = learn(client, model, seed, steps)

    threads = [threading.Thread(target=one, args=(model, n), daemon=True) for n, model in enumerate(MODELS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return curves


@contextmanager
def workers(service: Placed, accelerator: str) -> Iterator[None]:
    """Run a trainer and a sampler for each model."""
    names = [service.start(kind, model, accelerator=accelerator) for model in MODELS for kind in ("trainer", "sampler")]
    try:
        yield
    finally:
        for name in names:
            service.stop(name)


@contextmanager
def beside(step: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Do something again and again in another thread."""
    over = threading.Event()

    def go_on() -> None:
        while not over.wait(pause_s):
            step()

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Watch:
    """Looks into the book of what lies on the accelerator."""

    def __init__(self, data_dir: Path, size_bytes: int) -> None:
        book_path(data_dir, GPU).parent.mkdir(mode=0o700, exist_ok=True)
        self._arena = Arena(book_path(data_dir, GPU), size_bytes=size_bytes)
        self.together: list[dict[int, int]] = []
        self.seen: set[int] = set()

    def look(self) -> None:
        found = self._arena.resident()
        self.seen |= found.keys()
        if len(found) > 1:
            self.together.append(found)


class Trouble:
    """Kills a worker, or stops one for a while; whoever was killed starts again under its name, as from `openrl up`."""

    def __init__(self, service: Placed, seed: int) -> None:
        self._service, self._draw = service, random.Random(seed)
        self.kills = self.stops = 0

    def strike(self) -> None:
        name = self._draw.choice(sorted(self._service.workers))
        process = self._service.workers[name]
        if self._draw.random() < 0.3 and self.kills < 3:
            process.kill()
            process.wait()
            self.kills += 1
            kind, _, slug = name.partition("-")
            self._service.start(kind, slug.replace("-", "/", 1), accelerator=GPU)
        else:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(self._draw.uniform(0.05, 0.4))
            os.kill(process.pid, signal.SIGCONT)
            self.stops += 1


@pytest.mark.full
def test_two_runs_and_their_samplers_in_turns_learn_what_they_learn_alone_whatever_is_killed(service: Placed):
    with workers(service, ""):
        alone = learn_all(service, 4)
    assert set(alone) == set(MODELS)
    watch, trouble = Watch(service.data_dir, ROOM), Trouble(service, seed=8)
    with workers(service, GPU), beside(watch.look, 0.002), beside(trouble.strike, 1.0):
        shared = learn_all(service, 4)
    assert shared == alone
    assert watch.together == [] and len(watch.seen) >= 4
    assert trouble.kills and trouble.stops
    found = standing(service.turns, GPU)
    assert found.turns >= 8 and {one.owner for one in found.owners} == {
        f"{kind}-tiny-{letter}" for kind in ("trainer", "sampler") for letter in "ab"
    }
    assert all("don't fit" not in service.log(one.owner) for one in found.owners)


def full_runs(service: Service) -> list[Curve]:
    """Train two full runs at the same time, each with a sampler of its own versions."""
    curves: dict[int, Curve] = {}

    def one(seed: int) -> None:
        with tinker.ServiceClient(base_url=service.base_url, api_key="tml-local") as client:
            curves[seed] = learn(client, service.model, seed, 3, {"openrl.fine_tuning_type": "full"})

    threads = [threading.Thread(target=one, args=(seed,), daemon=True) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [curves[seed] for seed in range(2)]


@pytest.mark.full
def test_two_full_runs_and_their_samplers_on_one_accelerator_learn_what_they_learn_without(
    own_service: Service, tmp_path: Path
):
    own_service.options = ("--accelerators", "1")
    own_service.start()
    watch = Watch(own_service.data_dir, half_of_memory())
    with beside(watch.look, 0.002):
        shared = full_runs(own_service)
    assert watch.together == [] and len(watch.seen) >= 4
    with Redis.from_url(own_service.redis_url()) as client:
        found = standing(Turns(client), GPU)
    assert len(found.owners) == 4 and found.turns >= 8
    own_service.stop()
    alone = Service(tmp_path / "alone", own_service.model_dir).start()
    try:
        assert full_runs(alone) == shared
    finally:
        alone.stop()
        alone.close()
