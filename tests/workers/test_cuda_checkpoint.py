"""The driver's own checkpoint, behind the protocol of what can be parked; the tool is stood in for by a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.workers.model.cuda_checkpoint import CheckpointFailed, CudaCheckpoint

SCRIPT = """#!/bin/sh
cd {home}
[ "$1" = --get-state ] && exec cat state
[ "$2" = "$(cat fails 2>/dev/null)" ] && echo "no device memory" >&2 && exit 1
echo "$2" >> asked
case "$2" in
  lock | restore) echo locked;;
  checkpoint) echo checkpointed;;
  unlock) echo running;;
esac > state
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "state").write_text("running\n")
    (tmp_path / "asked").touch()
    (tmp_path / "tool").write_text(SCRIPT.format(home=tmp_path))
    (tmp_path / "tool").chmod(0o700)
    return tmp_path


def test_a_process_is_locked_before_its_state_is_taken_and_unlocked_after_it_is_back(home: Path):
    parkable = CudaCheckpoint(7, tool=str(home / "tool"))
    assert parkable.resident_bytes > 0
    parkable.park()
    parkable.park()
    assert parkable.resident_bytes == 0
    parkable.restore()
    parkable.restore()
    assert (home / "asked").read_text().split() == ["lock", "checkpoint", "restore", "unlock"]
    assert parkable.resident_bytes > 0


@pytest.mark.parametrize("step", ["lock", "checkpoint"])
def test_a_step_that_fails_is_told_and_nothing_counts_as_parked(home: Path, step: str):
    (home / "fails").write_text(step)
    parkable = CudaCheckpoint(7, tool=str(home / "tool"))
    with pytest.raises(CheckpointFailed, match="no device memory"):
        parkable.park()
    assert parkable.resident_bytes > 0


def test_a_machine_without_the_tool_says_so(tmp_path: Path):
    with pytest.raises(CheckpointFailed, match="nowhere"):
        CudaCheckpoint(7, tool=str(tmp_path / "nowhere")).park()
