"""The API's process at its start."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

import pytest

from openrl.app.settings import FILES_BESIDE, AppSettings


def started(*, most_files: int, connections: int) -> subprocess.CompletedProcess[str]:
    """Start the API under a hard limit of open files, where no store answers."""
    code = (
        f"import resource as r, runpy; r.setrlimit(r.RLIMIT_NOFILE, (64, {most_files}))\n"
        "runpy.run_module('openrl.app', run_name='__main__')"
    )
    env = {
        **os.environ,
        "OPENRL_REDIS_URL": "unix:///nowhere/store.sock",
        "OPENRL_DATA_DIR": "/nowhere",
        "OPENRL_WORKER_CONNECTIONS": str(connections),
    }
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)


def test_connections_that_fit_the_open_files_are_accepted() -> None:
    AppSettings(worker_connections=1000).check_open_files(1000 + FILES_BESIDE)


def test_a_limit_of_open_files_that_is_too_low_refuses_the_start_and_names_the_number() -> None:
    refused = started(most_files=1024, connections=4096)
    assert refused.returncode == 2, refused.stderr
    [line] = refused.stderr.splitlines()
    assert f"needs {4096 + FILES_BESIDE} open files" in line and "the hard limit is 1024" in line
    assert f"OPENRL_WORKER_CONNECTIONS={1024 - FILES_BESIDE} or less" in line


def test_a_limit_that_leaves_no_room_at_all_is_refused_without_a_smaller_number_of_connections() -> None:
    with pytest.raises(ValueError, match=f"raise it to {1 + FILES_BESIDE}") as refused:
        AppSettings(worker_connections=1).check_open_files(FILES_BESIDE)
    assert "or less" not in str(refused.value)


def test_the_soft_limit_is_raised_to_the_hard_one_for_the_process_and_its_children() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2000)
    code = (
        f"import resource as r, subprocess; r.setrlimit(r.RLIMIT_NOFILE, (64, {hard}))\n"
        "from openrl.tasks.process import raise_open_files\n"
        "print(raise_open_files(), subprocess.check_output(['sh', '-c', 'ulimit -Sn'], text=True))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(hard), str(hard)]
