"""Versions are synced to the disk; where there is a file system in memory, the tests don't wait for that."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty directory."""
    with tempfile.TemporaryDirectory(prefix="openrl-weights-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        yield Path(folder)
