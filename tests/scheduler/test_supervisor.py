"""The supervisor, with small real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from openrl.scheduler.supervisor import BACKOFF_S, PROCESSES, ROTATE_BYTES, Program, Supervisor
from openrl.tasks import datadir

SLEEPER = "import time; time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(600)"
WITH_CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); print('up'); time.sleep(600)"


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def program(name: str, code: str) -> Program:
    return Program(name=name, argv=[sys.executable, "-c", code])


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(tmp_path, said):
    supervisor = Supervisor(tmp_path, say=said.append)
    yield supervisor
    supervisor.shutdown([(set(), 0.0)])


def until(supervisor: Supervisor, condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        supervisor.poll()
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def says(supervisor: Supervisor, name: str, text: str) -> bool:
    path = supervisor.log_path(name)
    return path.exists() and text in path.read_text()


def test_what_a_program_prints_is_in_its_log(supervisor):
    supervisor.start(program("a", "import sys, time; print('out'); print('err', file=sys.stderr); time.sleep(600)"))
    until(supervisor, lambda: says(supervisor, "a", "out") and says(supervisor, "a", "err"))


def test_a_crash_is_said_once_with_the_log_and_backs_off(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    supervisor.start(program("a", "raise SystemExit(3)"))
    for number, wait_s in enumerate((*BACKOFF_S, BACKOFF_S[-1]), start=1):
        until(supervisor, lambda number=number: len(said) == number)
        assert said[-1] == f"a exited with status 3; starting it again in {wait_s:.0f} s; see {tmp_path}/logs/a.log"
        clock.now += wait_s - 0.01
        supervisor.poll()
        assert supervisor.pid("a") is None
        clock.now += 0.02
        supervisor.poll()
        assert supervisor.pid("a") is not None
    supervisor.shutdown([(set(), 0.0)])


def test_a_crash_after_a_long_healthy_time_counts_as_the_first(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    supervisor.start(program("a", SLEEPER))
    for _ in range(3):
        clock.now += 61
        os.kill(supervisor.pid("a"), signal.SIGKILL)
        until(supervisor, lambda: supervisor.pid("a") is None)
        assert supervisor.crashes("a") == 1
        clock.now += 1.01
        supervisor.poll()
    assert said[0].startswith("a was killed by SIGKILL")
    supervisor.shutdown([(set(), 0.0)])


def test_a_program_that_ends_by_itself_is_started_again_without_a_word(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    supervisor.start(program("a", "pass"))
    until(supervisor, lambda: supervisor.pid("a") is None)
    clock.now += 1.01
    supervisor.poll()
    assert supervisor.pid("a") is not None
    assert said == []
    supervisor.shutdown([(set(), 0.0)])


def test_a_program_that_is_stopped_stays_stopped(supervisor, said):
    supervisor.start(program("a", SLEEPER))
    pid = supervisor.pid("a")
    supervisor.stop("a", grace_s=10)
    assert supervisor.names() == set()
    until(supervisor, lambda: supervisor.pid("a") is None)
    assert is_gone(pid)
    assert said == []


def test_a_program_wanted_again_while_it_leaves_starts_when_the_last_one_is_gone(supervisor):
    supervisor.start(program("a", STUBBORN))
    until(supervisor, lambda: says(supervisor, "a", "up"))
    first = supervisor.pid("a")
    supervisor.stop("a", grace_s=600)
    supervisor.start(program("a", SLEEPER))
    assert supervisor.pid("a") == first
    os.kill(first, signal.SIGKILL)
    until(supervisor, lambda: supervisor.pid("a") is None)
    supervisor.start(program("a", SLEEPER))
    assert supervisor.pid("a") not in (None, first)


def test_shutdown_ends_stage_after_stage(tmp_path):
    ended = []
    supervisor = Supervisor(
        tmp_path, say=ended.append, detail=lambda text: ended.append(text) if text.endswith(": stopped") else None
    )
    for name in ("store", "api", "worker"):
        supervisor.start(program(name, SLEEPER))
    supervisor.shutdown([({"api"}, 5), ({"worker"}, 10), ({"store"}, 12)])
    assert ended == ["api: stopped", "worker: stopped", "store: stopped"]
    assert not (tmp_path / PROCESSES).exists()


def test_a_program_that_ignores_sigterm_is_killed_at_the_bound(supervisor, said):
    supervisor.start(program("stubborn", STUBBORN))
    supervisor.start(program("store", SLEEPER))
    until(supervisor, lambda: says(supervisor, "stubborn", "up"))
    pids = [supervisor.pid("stubborn"), supervisor.pid("store")]
    supervisor.shutdown([({"stubborn"}, 0.3), ({"store"}, 10.0)])
    assert all(map(is_gone, pids))
    assert said == [f"stubborn (pid {pids[0]}) did not stop in time; killed"]


def test_a_second_request_shortens_the_wait(supervisor):
    supervisor.start(program("stubborn", STUBBORN))
    until(supervisor, lambda: says(supervisor, "stubborn", "up"))
    pid = supervisor.pid("stubborn")
    supervisor.shutdown([({"stubborn"}, 600.0)], hurry=lambda: True)
    assert is_gone(pid)


def test_what_a_program_started_does_not_outlive_it(supervisor):
    supervisor.start(program("a", WITH_CHILD))
    until(supervisor, lambda: says(supervisor, "a", "up"))
    [grandchild] = psutil.Process(supervisor.pid("a")).children()
    os.kill(supervisor.pid("a"), signal.SIGKILL)
    until(supervisor, lambda: supervisor.pid("a") is None)
    grandchild.wait(timeout=60)


def test_what_a_killed_supervisor_left_behind_is_ended_by_the_next(tmp_path, said):
    orphan = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    row = {"pid": orphan.pid, "start_time": psutil.Process(orphan.pid).create_time(), "name": "old"}
    (tmp_path / PROCESSES).write_text(json.dumps([row]))
    Supervisor(tmp_path, say=said.append).end_leftovers()
    orphan.wait(timeout=60)
    assert said == [f"ending old (pid {orphan.pid}), left over from an earlier run"]


def test_a_process_that_merely_has_a_leftovers_number_is_left_alone(tmp_path, said):
    stranger = subprocess.Popen([sys.executable, "-c", SLEEPER])
    row = {"pid": stranger.pid, "start_time": psutil.Process(stranger.pid).create_time() - 100, "name": "old"}
    (tmp_path / PROCESSES).write_text(json.dumps([row]))
    Supervisor(tmp_path, say=said.append).end_leftovers()
    assert stranger.poll() is None
    assert said == []
    stranger.kill()
    stranger.wait()


def test_the_ledger_names_what_runs_and_is_private(supervisor, tmp_path):
    supervisor.start(program("a", SLEEPER))
    [row] = json.loads((tmp_path / PROCESSES).read_text())
    assert (row["name"], row["pid"]) == ("a", supervisor.pid("a"))
    assert (tmp_path / PROCESSES).stat().st_mode & 0o777 == 0o600


def test_a_log_that_grew_while_its_process_runs_is_put_aside_whole_and_goes_on(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    writer = "import time\nfor n in range(10**9): print(n, flush=True); time.sleep(0.05)"
    supervisor.start(program("a", writer))
    path = supervisor.log_path("a")
    until(supervisor, lambda: says(supervisor, "a", "0\n"))
    os.truncate(path, ROTATE_BYTES)
    clock.now += 6
    supervisor.poll()
    aside = path.with_name("a.log.1")
    assert aside.stat().st_size >= ROTATE_BYTES and aside.read_bytes().startswith(b"0\n")
    until(supervisor, lambda: 0 < path.stat().st_size < 10_000)
    assert b"\0" not in path.read_bytes()
    assert said == []
    supervisor.shutdown([(set(), 0.0)])


def test_a_full_disk_is_said_once_and_the_processes_live_on(tmp_path, said, monkeypatch):
    supervisor = Supervisor(tmp_path, say=said.append)
    write = datadir.write_private

    def no_space(path, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(datadir, "write_private", no_space)
    supervisor.start(program("a", SLEEPER))
    for _ in range(5):
        supervisor.poll()
    assert said == [f"cannot write {tmp_path / PROCESSES} (No space left on device); trying again"]
    monkeypatch.setattr(datadir, "write_private", write)
    supervisor.poll()
    [row] = json.loads((tmp_path / PROCESSES).read_text())
    assert row["pid"] == supervisor.pid("a")
    supervisor.shutdown([(set(), 0.0)])


def test_a_program_that_cannot_be_started_is_said_and_tried_again(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    supervisor.log_path("a").mkdir()
    supervisor.start(program("a", SLEEPER))
    assert said == ["a can't be started (Is a directory); trying again in 1 s"]
    assert supervisor.crashes("a") == 1
    supervisor.log_path("a").rmdir()
    clock.now += 1.01
    supervisor.poll()
    assert supervisor.pid("a") is not None
    supervisor.shutdown([(set(), 0.0)])


def test_a_large_log_is_put_aside_at_the_start(supervisor):
    path: Path = supervisor.log_path("a")
    with path.open("wb") as file:
        file.truncate(ROTATE_BYTES)
    supervisor.start(program("a", SLEEPER))
    assert path.stat().st_size < ROTATE_BYTES
    assert path.with_name("a.log.1").stat().st_size == ROTATE_BYTES


def test_a_program_that_refuses_its_settings_is_not_started_again(tmp_path, said):
    clock = Clock()
    supervisor = Supervisor(tmp_path, say=said.append, clock=clock)
    supervisor.start(program("a", "import sys; print('it makes no sense'); sys.exit(2)"))
    until(supervisor, supervisor.refused)
    clock.now += 10_000
    supervisor.poll()
    assert supervisor.pid("a") is None and supervisor.refused() == ["a"] and said == []
    supervisor.shutdown([(set(), 0.0)])
