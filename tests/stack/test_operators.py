"""What an operator sees and may do: operations by name, queues that don't pile up, a second worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import httpx
import pytest
import redis

from tests.stack import wire
from tests.stack.conftest import MODEL, Service, free_port

pytestmark = pytest.mark.timeout(180)

TOKENS = list(b"how vexingly quick daft zebras jump")


def start(service: Service, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "openrl.tasks.cli", words[0], "--data-dir", str(service.data_dir), *words[1:]]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def test_an_operation_in_the_works_shows_by_name_in_the_celery_cli_and_in_flower(service: Service) -> None:
    http = service.http()
    session = wire.new_session(http)
    sampler = http.post(
        "/create_sampling_session", json={"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    ).json()["sampling_session_id"]
    wire.poll(http, wire.asample(http, sampler, 0, TOKENS, max_tokens=1).json()["request_id"])
    port = free_port()
    flower = start(service, "flower", "--port", str(port))
    try:
        page = wait_for_page(f"http://127.0.0.1:{port}/workers")
        assert "sampler-" in page
        asking = start(service, "celery", "inspect", "active", "--json")
        endless = []
        while asking.poll() is None and len(endless) < 400:
            endless.append(wire.asample(http, sampler, len(endless) + 1, TOKENS, max_tokens=470, stop=[]).json())
            time.sleep(0.05)  # one ends in half a second: there is always another
        active = json.loads(asking.communicate(timeout=30)[0])
        names = {task["name"] for tasks in active.values() for task in tasks}
        assert "sampler.sample" in names
        assert {task["id"] for tasks in active.values() for task in tasks} & {one["request_id"] for one in endless}
        for one in endless:
            assert len(wire.poll(http, one["request_id"]).json()["sequences"][0]["tokens"]) == 470
        seen = httpx.get(f"http://127.0.0.1:{port}/task/{endless[0]['request_id']}", timeout=20)
        assert seen.status_code == 200 and "sampler.sample" in seen.text and "SUCCESS" in seen.text
    finally:
        flower.terminate()
        flower.communicate(timeout=60)


def wait_for_page(url: str) -> str:
    deadline = time.monotonic() + 60
    while True:
        try:
            answer = httpx.get(url, timeout=5)
            if answer.status_code == 200 and "sampler-" in answer.text:
                return answer.text
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, url
        time.sleep(0.5)


def test_five_hundred_runs_leave_no_key_of_a_queue_behind(service: Service) -> None:
    http = service.http()
    session = wire.new_session(http)
    wire.new_run(http, model=MODEL, session=session)
    with redis.Redis.from_url(service.redis_url()) as store:
        before = broker_keys(store)
        promises = []
        for number in range(1, 501):
            body = {
                "session_id": session, "model_seq_id": number, "base_model": MODEL,
                "lora_config": {"rank": 1, "seed": number, "train_unembed": False, "train_mlp": False},
            }  # fmt: skip
            promises.append(http.post("/create_model", json=body).json()["request_id"])
        for promise in promises:
            assert "model_id" in wire.poll(http, promise).json()
        assert broker_keys(store) <= before


def broker_keys(store: redis.Redis) -> set[bytes]:
    """Keys of Celery, but for what comes and goes with messages: a queue's own list, the book of those in hand."""
    keys = (key for key in store.scan_iter("*celery*") if not key.rpartition(b":")[2].startswith(b"unacked"))
    return {key for key in keys if store.type(key) != b"list"}


def test_a_second_trainer_never_touches_a_run_that_the_first_one_owns(service: Service) -> None:
    http = service.http()
    owned = wire.new_run(http, model=MODEL)
    redis_url = service.redis_url()
    own = {"OPENRL_REDIS_URL": redis_url, "OPENRL_DATA_DIR": str(service.data_dir), "OPENRL_TORCH_THREADS": "1"}
    log = service.data_dir / "logs" / "second.log"
    with log.open("w") as sink:
        second = subprocess.Popen(
            [sys.executable, "-m", "openrl.workers.trainer", "--base", MODEL, "--name", "second"],
            env={**os.environ, **own}, stdout=sink, stderr=sink,
        )  # fmt: skip
    try:
        with redis.Redis.from_url(redis_url) as store:
            deadline = time.monotonic() + 60
            while store.hget("openrl:worker:second", "state") not in (b"ready", b"busy"):
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.2)
            for seq in range(1, 41):
                submit = wire.optim_step if seq % 2 == 0 else lambda *to: wire.forward_backward(*to, TOKENS)
                submit(http, owned, seq).raise_for_status()
            assert wire.poll(http, f"{owned}:40").json()["metrics"]["step"] == 20
            row = f"openrl:t:local:run:{owned}"
            assert store.hget(row, "owner") not in (None, b"", b"second")
        assert "pass:" not in log.read_text()
    finally:
        second.terminate()
        assert second.wait(60) == 0
