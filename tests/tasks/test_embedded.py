"""The embedded store, with the real server."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import redis

from openrl.tasks import datadir, embedded
from openrl.tasks.process import PARENT_PID

PARENT = """
import os, pathlib, subprocess, sys, time
from openrl.tasks import embedded
data_dir = pathlib.Path(sys.argv[1])
argv = embedded.command(data_dir)
child = subprocess.Popen(argv, env={**os.environ, "OPENRL_PARENT_PID": str(os.getpid())}, start_new_session=True)
while not embedded.answers(data_dir):
    time.sleep(0.02)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def data_dir(tmp_path):
    yield tmp_path
    embedded.end_leftover(tmp_path)
    embedded.tidy(tmp_path)


def client(data_dir: Path) -> redis.Redis:
    return redis.Redis(unix_socket_path=str(embedded.socket_path(data_dir)))


def launch(data_dir: Path) -> subprocess.Popen[bytes]:
    server = subprocess.Popen(
        embedded.command(data_dir), stdout=subprocess.DEVNULL, env={**os.environ, PARENT_PID: str(os.getpid())}
    )
    deadline = time.monotonic() + 60
    while not embedded.answers(data_dir):
        assert server.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    return server


def test_what_was_acknowledged_survives_a_kill(data_dir):
    server = launch(data_dir)
    with client(data_dir) as store:
        for number in range(200):
            store.rpush("list", number)
    server.kill()
    server.wait()
    assert not embedded.answers(data_dir)
    server = launch(data_dir)
    with client(data_dir) as store:
        assert store.llen("list") == 200
    server.terminate()
    assert server.wait(timeout=10) == 0


def test_every_write_is_on_disk_and_nothing_is_evicted_or_open_to_the_network(data_dir):
    server = launch(data_dir)
    with client(data_dir) as store:
        wanted = {
            "appendonly": "yes",
            "appendfsync": "always",
            "maxmemory-policy": "noeviction",
            "port": "0",
            "save": "",
        }
        assert {name: store.config_get(name)[name] for name in wanted} == wanted
        assert int(store.config_get("maxmemory")["maxmemory"]) == embedded.max_memory() > 0
    server.terminate()
    server.wait(timeout=10)


def test_the_store_fills_half_of_the_memory_that_there_is_for_it(tmp_path):
    (tmp_path / "small").write_text("1000000\n")
    (tmp_path / "none").write_text("max\n")
    assert embedded.max_memory(tmp_path / "small") == 500_000
    assert embedded.max_memory(tmp_path / "none") == embedded.max_memory(tmp_path / "missing") > 500_000


def test_the_socket_is_short_and_private_however_long_the_directory(tmp_path):
    data_dir = tmp_path / ("d" * 200)
    path = embedded.socket_path(data_dir)
    assert len(str(path)) <= embedded.MAX_SOCKET_PATH
    assert path.parent.stat().st_mode & 0o777 == 0o700
    embedded.tidy(data_dir)
    assert not path.parent.exists()


def test_two_directories_have_two_sockets(tmp_path):
    assert embedded.socket_path(tmp_path / "a") != embedded.socket_path(tmp_path / "b")
    embedded.tidy(tmp_path / "a")
    embedded.tidy(tmp_path / "b")


def test_the_server_ends_with_the_process_that_started_it(data_dir):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(data_dir)], stdout=subprocess.PIPE, text=True)
    lines = (line for line in parent.stdout if line.strip().isdigit())
    server = psutil.Process(int(next(lines)))
    assert server.is_running()
    parent.kill()
    parent.wait()
    server.wait(timeout=10)
    parent.stdout.close()


def test_a_leftover_server_is_ended_before_the_next_start(data_dir):
    server = launch(data_dir)
    embedded.end_leftover(data_dir)
    assert server.wait(timeout=10) == 0


def test_a_command_without_a_service_gets_a_store_of_its_own_for_a_while(data_dir):
    with embedded.running(data_dir) as url:
        assert datadir.held(data_dir)
        with redis.Redis.from_url(url) as store:
            store.set("kept", "yes")
    assert not datadir.held(data_dir)
    assert not embedded.answers(data_dir)
    with embedded.running(data_dir) as url, redis.Redis.from_url(url) as store:
        assert store.get("kept") == b"yes"


def test_a_command_beside_a_running_service_uses_that_services_store(tmp_path):
    with datadir.hold(tmp_path):
        service = datadir.Service(pid=1, redis_url="redis://elsewhere", broker_url="", base_url="", started=0.0)
        datadir.publish(tmp_path, service)
        with embedded.running(tmp_path) as url:
            assert url == "redis://elsewhere"
