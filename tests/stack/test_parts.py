"""The parts as Kubernetes starts them: each by itself, told everything by its environment, on a store with a password.

No `openrl up` is their parent. A short form of it is in tests/scheduler/test_prepare.py.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import redis

from openrl.tasks import embedded
from tests.stack import wire
from tests.stack.conftest import MODEL, free_port

pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

PASSWORD = "correct-horse-battery-staple"
TOKENS = list(b"how vexingly quick daft zebras jump")


class Parts:
    """The processes of one service, and the environment that all of them get."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store_port, self.port, self.flower_port = free_port(), free_port(), free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._plain = {name: value for name, value in os.environ.items() if not name.startswith("OPENRL_")}
        self.environment = {
            "OPENRL_REDIS_URL": f"redis://:{PASSWORD}@127.0.0.1:{self.store_port}/0",
            "OPENRL_DATA_DIR": str(directory / "data"),
            "OPENRL_TORCH_THREADS": "1",
        }

    @contextmanager
    def running(self, name: str, *argv: str, **env: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a part for the body of the `with`; it must leave by itself within its grace."""
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(argv, env=self._plain | self.environment | env, stdout=log, stderr=log)
            try:
                yield process
                assert process.poll() is None, self.logs()
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) in (0, -signal.SIGTERM), self.logs()
            finally:
                process.kill()
                process.wait(10)

    def module(self, name: str, module: str, *args: str, **env: str):  # type: ignore[no-untyped-def]
        return self.running(name, sys.executable, "-m", module, *args, **env)

    def openrl(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "openrl.tasks.cli", *args]
        return subprocess.run(command, env=self._plain | self.environment, capture_output=True, text=True, timeout=60)

    def store(self):  # type: ignore[no-untyped-def]
        (self.directory / "store").mkdir()
        options = {"port": str(self.store_port), "bind": "127.0.0.1", "requirepass": PASSWORD, "appendonly": "yes",
                   "appendfsync": "always", "maxmemory-policy": "noeviction",
                   "dir": str(self.directory / "store")}  # fmt: skip
        return self.running("store", embedded.binary(), *(w for k, v in options.items() for w in (f"--{k}", v)))

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in self.directory.glob("*.log"))


def wait_until(ready: Callable[[], bool], parts: Parts, *, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if ready():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline, parts.logs()
        time.sleep(0.1)


def test_the_parts_serve_without_a_parent_on_a_store_with_a_password(tmp_path: Path, model_dir: Path) -> None:
    parts = Parts(tmp_path)
    with ExitStack() as running:
        running.enter_context(parts.store())
        prepared = parts.openrl("prepare", "--model", f"{MODEL}={model_dir}")
        assert (prepared.returncode, prepared.stderr) == (0, f"serving {MODEL}; epoch 1 begins\n")
        assert parts.openrl("prepare", "--model", f"{MODEL}={model_dir}").stderr == f"serving {MODEL}\n"
        running.enter_context(
            parts.module(
                "api", "openrl.app", OPENRL_HOST="0.0.0.0", OPENRL_PORT=str(parts.port), OPENRL_API_WORKERS="1"
            )
        )
        wait_until(lambda: httpx.get(f"{parts.base_url}/api/v1/healthz").status_code == 200, parts)
        # Whoever can be reached from elsewhere serves nobody without a key, not even before there is one.
        assert httpx.get(f"{parts.base_url}/api/v1/get_server_capabilities").status_code == 401
        key = parts.openrl("keys", "create", "--tenant", "alice").stdout.strip()
        running.enter_context(parts.module("scheduler", "openrl.scheduler", OPENRL_BEAT_DIR=str(tmp_path / "beat")))
        for kind in ("trainer", "sampler"):
            running.enter_context(
                parts.module(kind, f"openrl.workers.{kind}", "--base", MODEL, "--name", f"{kind}-by-hand")
            )
        running.enter_context(
            parts.module(
                "flower",
                "celery",
                "-A",
                "openrl.tasks",
                "flower",
                "--address=127.0.0.1",
                f"--port={parts.flower_port}",
                FLOWER_BASIC_AUTH=f"openrl:{PASSWORD}",
            )
        )
        with httpx.Client(base_url=f"{parts.base_url}/api/v1", timeout=60, headers={"X-API-Key": key}) as http:
            train_and_sample(http)
        for command in documented():
            done = parts.openrl(*command)
            # Of an id that doesn't exist it says so; nothing else may be wrong with a command that we name.
            named = {"KEY_ID", "TENANT"} & set(command)
            assert done.returncode == 0 or (named and "no API key 'KEY_ID'" in done.stderr), (command, done.stderr)
        flower = f"http://127.0.0.1:{parts.flower_port}"
        wait_until(lambda: httpx.get(f"{flower}/healthcheck").status_code == 200, parts)
        assert httpx.get(f"{flower}/workers").status_code == 401
        assert "trainer-by-hand" in httpx.get(f"{flower}/workers", auth=("openrl", PASSWORD)).text
        assert (tmp_path / "beat").is_dir() and not (tmp_path / "data" / "scheduler").exists()
    assert PASSWORD not in parts.logs() and key not in parts.logs()


def documented() -> list[list[str]]:
    """Return the commands of docs/install.md that an operator gives in an API pod."""
    text = (Path(__file__).parents[2] / "docs" / "install.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.partition(" #")[0] for block in blocks for line in block.splitlines()]
    found = [shlex.split(line)[1:] for line in lines if line.startswith("openrl ")]
    assert len(found) > 6
    return [words for words in found if words[0] != "prepare"]


def train_and_sample(http: httpx.Client) -> None:
    """Take one step, publish it, draw from it."""
    run = wire.new_run(http, model=MODEL)
    asked = [wire.forward_backward(http, run, 1, TOKENS), wire.optim_step(http, run, 2, learning_rate=1e-3)]
    for answer in asked:
        result = wire.poll(http, answer.json()["request_id"]).json()
        assert "error" not in result, result
    saved = http.post(
        "/save_weights_for_sampler",
        json={"model_id": run, "seq_id": 3, "path": "v1", "type": "save_weights_for_sampler"},
    ).json()
    path = wire.poll(http, saved["request_id"]).json()["path"]
    session = wire.new_session(http)
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path, "base_model": MODEL}
    sampler = http.post("/create_sampling_session", json=body).json()["sampling_session_id"]
    drawn = wire.poll(http, wire.asample(http, sampler, 0, TOKENS, max_tokens=4, stop=[]).json()["request_id"]).json()
    assert len(drawn["sequences"][0]["tokens"]) == 4


def test_a_wrong_password_is_said_and_shown_to_nobody(tmp_path: Path, model_dir: Path) -> None:
    parts = Parts(tmp_path)
    with parts.store():
        wait_until(lambda: _listens(parts), parts)
        parts.environment["OPENRL_REDIS_URL"] = f"redis://:wrong-{PASSWORD}@127.0.0.1:{parts.store_port}/0"
        refused = parts.openrl("prepare", "--patience", "1")
        assert refused.returncode == 2
        assert "did not answer" in refused.stderr and "password" in refused.stderr
        assert PASSWORD not in refused.stderr
    assert not (tmp_path / "data").exists()


def _listens(parts: Parts) -> bool:
    with redis.Redis(port=parts.store_port, password=PASSWORD) as client:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            return False
