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
CONTEXT, AGENT, AGENT_JOB = "OPENRL_ACCELERATOR_CONTEXT", "OPENRL_SNAPSHOT_AGENT", "OPENRL_SNAPSHOT_JOB"
STAYS, CHECKPOINT, BY_AGENT = "stays", "cuda-checkpoint", "snapshot-agent"
KUBERNETES = "KUBERNETES_SERVICE_HOST"
"""In the environment of every container of a pod; processes are counted anew in each."""
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

    context: str = STAYS
    """OPENRL_ACCELERATOR_CONTEXT: what becomes of the rest of this process's CUDA state (context, graphs, workspaces)
    between turns. It stays; or goes to host memory too, by NVIDIA's cuda-checkpoint or through llm-d's snapshot-agent.
    Slower by seconds, for a GPU that the rest of everybody doesn't fit on. Neither was run on a GPU yet."""

    agent: str = ""
    """OPENRL_SNAPSHOT_AGENT: host:port of this node's snapshot agent."""

    agent_job: str = ""
    """OPENRL_SNAPSHOT_JOB: the job under which the agent finds this pod's processes (label timeslice.io/job-id). Empty:
    it is told their pids, which it must count as this process does; so in a pod it must be given."""

    def __post_init__(self) -> None:
        if self.name:
            try:
                keys.check("accelerator", self.name)
            except ValueError as nonsense:
                raise ValueError(f"{VARIABLE}: {nonsense}") from None
        if self.size_bytes < 0:
            raise ValueError(f"{BYTES} is {self.size_bytes}; it must be 0 (half of the memory) or more")
        if self.context not in (STAYS, CHECKPOINT, BY_AGENT):
            raise ValueError(f"{CONTEXT} is {self.context!r}; it must be {STAYS}, {CHECKPOINT} or {BY_AGENT}")
        if (self.context == BY_AGENT) != bool(self.agent) or (self.agent_job and not self.agent):
            raise ValueError(f"{AGENT} and {AGENT_JOB} belong to {CONTEXT}={BY_AGENT}, which needs the first of them")
        if self.agent and not self.agent.rpartition(":")[2].isdecimal():
            raise ValueError(f"{AGENT} is {self.agent!r}; it must be host:port")

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        """Read the settings. Raises ValueError naming the variable that makes no sense."""
        text = environ.get(BYTES, "")
        if text and not text.isdecimal():
            raise ValueError(f"{BYTES}={text!r} is not a whole number of bytes")
        settings = cls(
            name=environ.get(VARIABLE, ""),
            size_bytes=int(text or 0),
            context=environ.get(CONTEXT) or STAYS,
            agent=environ.get(AGENT, ""),
            agent_job=environ.get(AGENT_JOB, ""),
        )
        if settings.agent and not settings.agent_job and environ.get(KUBERNETES):
            raise ValueError(f"{CONTEXT}={BY_AGENT} needs {AGENT_JOB} in a pod: its pids mean nothing to the agent")
        return settings


def half_of_memory() -> int:
    """Return half of the machine's memory in bytes: the other half holds what is parked."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def book_path(data_dir: Path, name: str) -> Path:
    """Return the file with the book of an accelerator that is simulated on a CPU."""
    return data_dir / BOOKS / f"{quote(name, safe='')}.json"
