"""Many polls at once on an API of two processes; `make bench` holds 4,096 of them and looks at the time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from openrl.app.settings import FILES_BESIDE, AppSettings
from tests.stack import wire
from tests.stack.conftest import MODEL, Service

pytestmark = pytest.mark.timeout(120)

LOAD = Path(__file__).parents[2] / "benchmarks" / "load.py"
POLLS = 256


@pytest.fixture
def two_processes(own_service: Service) -> Service:
    own_service.options = ("--api-workers", "2")
    own_service.env = {"OPENRL_POLL_MIN_S": "1", "OPENRL_POLL_MAX_S": "2"}
    return own_service.start()


def test_every_poll_of_a_crowd_is_held_asked_again_and_answered(two_processes: Service) -> None:
    http = two_processes.http()
    run = wire.new_run(http, model=MODEL)
    for seq in range(2, POLLS + 2):
        wire.optim_step(http, run, seq).raise_for_status()
    asked = {"host": "127.0.0.1", "port": two_processes.port, "run_id": run, "first": 2, "num": POLLS}
    with subprocess.Popen(
        [sys.executable, LOAD, "hold", json.dumps(asked)], stdout=subprocess.PIPE, text=True
    ) as crowd:
        try:
            assert said(crowd) == {"open": POLLS}
            while sum(held := connections(two_processes)) < POLLS:
                time.sleep(0.1)
            assert len(held) == 2 and min(held) > POLLS // 10, held
            assert http.get("/healthz").status_code == 200
            wire.poll(http, wire.forward_backward(http, run, 1, list(b"at last")).json()["request_id"])
            ended = said(crowd)
        finally:
            crowd.kill()
    assert ended["answered"] == POLLS and ended["wrong"] == []


def test_a_service_whose_connections_need_too_many_open_files_says_how_many_and_does_not_start(tmp_path: Path) -> None:
    needed = AppSettings().worker_connections + FILES_BESIDE
    code = (
        f"import resource as r, runpy; r.setrlimit(r.RLIMIT_NOFILE, (256, {needed - 1}))\n"
        "runpy.run_module('openrl.tasks.cli', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "up", "--port", "0", "--data-dir", tmp_path / "data", "--model", "m"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2, done.stderr
    assert f"needs {needed} open files" in done.stderr and f"the hard limit is {needed - 1}" in done.stderr
    assert not (tmp_path / "data").exists()


def said(crowd: subprocess.Popen[str]) -> Any:
    assert crowd.stdout is not None
    return json.loads(crowd.stdout.readline())


def connections(service: Service) -> list[int]:
    """How many connections each process of the API has with its clients."""
    assert service.process is not None
    api = [each for each in psutil.Process(service.process.pid).children() if "openrl.app" in each.cmdline()]
    [master] = api
    return [
        sum(one.status == psutil.CONN_ESTABLISHED for one in worker.net_connections(kind="tcp"))
        for worker in master.children()
    ]
