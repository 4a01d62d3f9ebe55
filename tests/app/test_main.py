"""The API's process at its start."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from openrl.app.__main__ import FILES_BESIDE, within
from openrl.app.settings import AppSettings


def test_connections_that_fit_the_open_files_stay_as_they_are(capsys) -> None:
    settings = AppSettings(worker_connections=1000)
    assert within(settings, open_files=1000 + FILES_BESIDE) is settings
    assert capsys.readouterr().err == ""


def test_connections_beyond_the_open_files_are_lowered_and_said(capsys) -> None:
    lowered = within(AppSettings(), open_files=1024)
    assert lowered.worker_connections == 1024 - FILES_BESIDE
    [line] = capsys.readouterr().err.splitlines()
    assert "1024 open files" in line and "ulimit -Hn" in line and "OPENRL_WORKER_CONNECTIONS" in line


def test_a_limit_that_leaves_no_room_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        within(AppSettings(), open_files=FILES_BESIDE + 10)


def test_the_soft_limit_is_raised_to_the_hard_one_for_the_process_and_its_children() -> None:
    hard = min(resource.getrlimit(resource.RLIMIT_NOFILE)[1], 2000)
    code = (
        f"import resource as r, subprocess; r.setrlimit(r.RLIMIT_NOFILE, (64, {hard}))\n"
        "from openrl.tasks.process import raise_open_files\n"
        "print(raise_open_files(), subprocess.check_output(['sh', '-c', 'ulimit -Sn'], text=True))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert said == [str(hard), str(hard)]
