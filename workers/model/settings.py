"""Where a worker does its device work: read from the environment by its `__main__`, set by whoever places it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import quote

from openrl.timeslice import keys

VARIABLE, BYTES = "OPENRL_ACCELERATOR", "OPENRL_ACCELERATOR_BYTES"
BOOKS = "accelerators"
"""Folder of the data directory with a book for each accelerator that is simulated on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceleratorSettings:
    """A worker's accelerator."""

    name: str = ""
    """OPENRL_ACCELERATOR: the claim at which it takes turns. Empty: the device is its own, no turns."""

    size_bytes: int = 0
    """OPENRL_ACCELERATOR_BYTES: how much an accelerator that is simulated on a CPU holds; all that share it say the
    same. 0: half of the machine's memory. A GPU's size is its own, and this has no effect there."""

    def __post_init__(self) -> None:
        if self.name:
            try:
                keys.check("accelerator", self.name)
            except ValueError as nonsense:
                raise ValueError(f"{VARIABLE}: {nonsense}") from None
        if self.size_bytes < 0:
            raise ValueError(f"{BYTES} is {self.size_bytes}; it must be 0 (half of the memory) or more")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings. Raises ValueError naming the variable that makes no sense."""
        text = environ.get(BYTES, "")
        if text and not text.isdecimal():
            raise ValueError(f"{BYTES}={text!r} is not a whole number of bytes")
        return cls(name=environ.get(VARIABLE, ""), size_bytes=int(text or 0))


def half_of_memory() -> int:
    """Return half of the machine's memory in bytes: the other half holds what is parked."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def book_path(data_dir: Path, name: str) -> Path:
    """Return the file with the book of an accelerator that is simulated on a CPU."""
    return data_dir / BOOKS / f"{quote(name, safe='')}.json"
