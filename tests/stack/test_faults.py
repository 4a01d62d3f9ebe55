"""Parts of the service that die or are away while a researcher's unmodified loop runs: the loop notices nothing.

One service for all: its broker is a second Valkey without a file, and a tenant may have one byte queued.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import tinker
from celery import Celery
from tinker import types

from openrl.tasks import embedded, keys
from openrl.tasks.celery import celery
from tests.stack import wire
from tests.stack.balancer import balanced
from tests.stack.conftest import MODEL, Service
from tests.stack.test_supervision import workers

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]

TEXT = b"jackdaws love my big sphinx of quartz"
ADAM = types.AdamParams(learning_rate=1e-2)
STEPS = 6


@dataclass
class Broker:
    """A Valkey without a file, which forgets everything when it ends."""

    socket: str
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis+socket://{self.socket}"

    def start(self) -> None:
        options = ("--port", "0", "--unixsocket", self.socket, "--save", "", "--appendonly", "no")
        self.process = subprocess.Popen([embedded.binary(), *options], stdout=subprocess.DEVNULL, cwd="/")
        until(lambda: Path(self.socket).exists() and bool(redis.Redis(unix_socket_path=self.socket).ping()))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)
        Path(self.socket).unlink(missing_ok=True)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with tempfile.TemporaryDirectory(prefix="openrl-broker-") as directory:
        made = Broker(f"{directory}/broker.sock")
        made.start()
        yield made
        made.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, broker: Broker) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("faults"), model_dir, options=("--broker-url", broker.url))
    made.env = {"OPENRL_TENANT_BYTES": "1", "OPENRL_LEASE_S": "15", "OPENRL_SESSION_GRACE_S": "3"}
    yield made.start()
    assert made.stop() == 0
    made.close()


@pytest.fixture
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def datum(text: bytes = TEXT) -> types.Datum:
    ids = list(text)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def train(api: tinker.ServiceClient, meanwhile: Callable[[int], None] = lambda step: None) -> list[float]:
    """Return what a loop of some steps reports. `meanwhile` is called while the operations of a step are under way."""
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=7).result()
    seen = []
    for step in range(STEPS):
        passed, stepped = training.forward_backward([datum()], "cross_entropy"), training.optim_step(ADAM)
        meanwhile(step)
        seen += [passed.result().metrics["loss:sum"], stepped.result().metrics["grad_norm"]]
    assert seen[-2] < seen[0]
    return seen


@pytest.fixture(scope="module")
def undisturbed(service: Service) -> list[float]:
    """What the loop reports when nothing happens."""
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        return train(client)


def pid_of(service: Service, name: str) -> int | None:
    """Return the process id of a part of the service; None while it doesn't run."""
    rows = json.loads((service.data_dir / "processes.json").read_text())
    return next((int(row["pid"]) for row in rows if row["name"] == name), None)


@pytest.mark.full
def test_a_call_of_five_chunks_completes_although_the_tenant_may_queue_one_byte(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=7).result()
    told = training.holder._client_config  # by the service; it doesn't say how long a chunk may be
    training.holder._client_config = told.model_copy(update={"fwdbwd_max_chunk_len": 1})
    parts = [TEXT[start : start + 12] for start in range(5)]
    chunked = training.forward_backward([datum(part) for part in parts], "cross_entropy").result()
    assert len(chunked.loss_fn_outputs) == 5
    whole = [training.forward([datum(part)], "cross_entropy").result().metrics["loss:sum"] for part in parts]
    assert chunked.metrics["loss:sum"] == pytest.approx(sum(whole), rel=1e-5)
    assert training.optim_step(ADAM).result().metrics["grad_norm"] > 0


def test_a_store_killed_in_mid_run_costs_nothing_that_was_acknowledged_and_nobody_is_restarted(
    service: Service, api: tinker.ServiceClient, undisturbed: list[float]
) -> None:
    def epoch_and_token() -> tuple[int, int]:
        with redis.Redis.from_url(service.redis_url()) as store:
            return int(store.get(keys.EPOCH) or 0), int(store.get("openrl:tokens") or 0)

    def kill_store(step: int) -> None:
        if step in (1, 3):
            pid = pid_of(service, "store")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            until(lambda: pid_of(service, "store") not in (None, pid))

    before, names = epoch_and_token(), ("api", "scheduler", "trainer-tiny-llama")
    pids = [pid_of(service, name) for name in names]
    assert all(pids)
    assert train(api, kill_store) == undisturbed
    until(lambda: epoch_and_token()[0] >= before[0] + 2)
    assert epoch_and_token()[1] >= before[1]
    assert [pid_of(service, name) for name in names] == pids


@pytest.mark.full
def test_training_goes_on_without_a_broker_and_shows_again_once_there_is_one(
    service: Service, broker: Broker, api: tinker.ServiceClient, undisturbed: list[float]
) -> None:
    broker.kill()
    try:
        assert train(api) == undisturbed
    finally:
        broker.start()

    asking = Celery(broker=broker.url)
    asking.conf.broker_transport_options = celery.conf.broker_transport_options

    def workers_that_answer() -> set[str]:
        return {name.partition("@")[0] for answer in asking.control.ping(timeout=0.5) for name in answer}

    until(lambda: workers_that_answer() >= {"scheduler", "trainer-tiny-llama"})
    asking.close()
    assert train(api) == undisturbed


@pytest.mark.full
def test_an_api_that_dies_in_mid_submit_and_another_in_mid_poll_are_not_noticed(
    service: Service, broker: Broker, undisturbed: list[float]
) -> None:
    env = {
        "OPENRL_REDIS_URL": service.redis_url(), "OPENRL_BROKER_URL": broker.url,
        "OPENRL_DATA_DIR": str(service.data_dir), **service.env,
    }  # fmt: skip
    [trainer] = [each for each in workers(service.data_dir) if "trainer" in " ".join(each.cmdline())]
    with balanced(env, 3) as balancer:

        def resume() -> None:
            balancer.killed.wait(30)
            trainer.resume()

        def meanwhile(step: int) -> None:
            if step == 0:
                balancer.kill_at("optim_step", "answered")
            elif step == 1:
                assert balancer.killed.wait(30)
                trainer.suspend()  # or the result would be there before anybody polls
                balancer.kill_at("retrieve_future", "asked")
                threading.Thread(target=resume).start()
            elif step == 2:
                assert balancer.killed.is_set()

        with tinker.ServiceClient(api_key="tml-local", base_url=balancer.url) as client:
            assert train(client, meanwhile) == undisturbed


def test_a_revoked_task_is_a_cancelled_operation(service: Service) -> None:
    http = service.http()
    run = wire.new_run(http, model=MODEL)
    wire.optim_step(http, run, 2).raise_for_status()  # waits for number 1
    command = [
        sys.executable, "-m", "openrl.tasks.cli", "celery", "--data-dir", str(service.data_dir),
        "control", "revoke", f"{run}:2", "s-1:train:0:9",
    ]  # fmt: skip
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=os.environ).stdout
    assert f"{run}:2 is cancelled" in said and "no run or sampler 's-1:train:0'" in said
    assert wire.poll(http, f"{run}:2").json() == {"error": "cancelled by an operator", "category": "user"}
    wire.forward_backward(http, run, 1, list(TEXT)).raise_for_status()
    assert wire.poll(http, f"{run}:1").json()["metrics"]["loss:sum"] > 0
    wire.optim_step(http, run, 3, learning_rate=0.01).raise_for_status()
    assert wire.poll(http, f"{run}:3").json()["metrics"]["grad_norm"] > 0
