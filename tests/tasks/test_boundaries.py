"""Boundaries between steps: inert, unless a test has armed one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openrl.tasks import boundaries

PASSES = (
    "from openrl.tasks.boundaries import reach\nfor count in range(5): reach('trainer.taken'); print(count, flush=True)"
)


def passed(directory: Path | None) -> tuple[int, list[str]]:
    """Pass one boundary five times in a process of its own; return its exit status and what it got to say."""
    env = {name: value for name, value in os.environ.items() if name != boundaries.VARIABLE}
    if directory is not None:
        env[boundaries.VARIABLE] = str(directory)
    done = subprocess.run([sys.executable, "-c", PASSES], env=env, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.returncode, done.stdout.split()


def test_a_process_is_killed_at_an_armed_boundary_after_so_many_passes_and_its_successor_is_not(tmp_path: Path) -> None:
    armed = boundaries.arm(tmp_path, "trainer.taken", passes=2)
    boundaries.arm(tmp_path, "trainer.committed")
    assert passed(tmp_path) == (-signal.SIGKILL, ["0", "1"])
    assert not armed.exists()
    assert passed(tmp_path) == (0, ["0", "1", "2", "3", "4"])


def test_without_the_variable_nothing_happens_at_a_boundary(tmp_path: Path) -> None:
    boundaries.arm(tmp_path, "trainer.taken")
    assert passed(None)[0] == 0


def test_every_boundary_that_can_be_armed_is_somewhere_in_the_code() -> None:
    package = Path(boundaries.__file__).parents[1]
    said = "".join(
        path.read_text() for folder in ("tasks", "scheduler", "workers") for path in (package / folder).rglob("*.py")
    )
    for name in boundaries.NAMES:
        assert said.count(f'reach("{name}")') == 1, name
    with pytest.raises(AssertionError):
        boundaries.arm(Path("/nowhere"), "trainer.unknown")
