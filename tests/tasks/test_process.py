"""A process that can't do its work any more leaves, so that another one may."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openrl.app.settings import AppSettings
from openrl.tasks.process import MOST_FAILURES, Streak, api_processes


def test_too_many_failures_of_one_kind_in_a_row_end_the_process() -> None:
    left: list[int] = []
    streak = Streak(left.append)
    for _ in range(MOST_FAILURES - 1):
        streak.add(TypeError("x"))
    assert left == []
    streak.add(TypeError("another text"))
    assert left == [1]


def test_a_success_or_a_failure_of_another_kind_begins_a_new_streak() -> None:
    left: list[int] = []
    streak = Streak(left.append)
    for number in range(10 * MOST_FAILURES):
        if number % 7 == 0:
            streak.end()
        streak.add(TypeError("x"))
    for number in range(10 * MOST_FAILURES):
        streak.add(TypeError("x") if number % 7 else KeyError("x"))
    assert left == []


def test_trouble_of_the_machine_ends_nothing() -> None:
    left: list[int] = []
    streak = Streak(left.append)
    for _ in range(10 * MOST_FAILURES):
        streak.add(OSError(28, "No space left on device"))
    assert left == []


def test_the_process_leaves_from_any_thread_with_a_status_that_is_not_zero() -> None:
    code = (
        "import threading, time\n"
        "from openrl.tasks.process import MOST_FAILURES, Streak\n"
        "streak = Streak()\n"
        "fail = lambda: [streak.add(TypeError()) for _ in range(MOST_FAILURES)]\n"
        "threading.Thread(target=fail, daemon=True).start()\n"
        "time.sleep(60)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert result.returncode == 1
    assert f"TypeError failed {MOST_FAILURES} times in a row; leaving" in result.stderr


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_the_api_gets_a_process_for_each_two_cores_within_bounds(
    monkeypatch: pytest.MonkeyPatch, cores: int, processes: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cores)))
    assert api_processes() == processes
    assert AppSettings().api_workers == processes
