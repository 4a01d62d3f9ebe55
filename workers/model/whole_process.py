"""The whole CUDA state of the process that holds the device: put aside after its tensors, brought back before them.

What parking of tensors leaves there (the context, graphs, workspaces: some hundred MB) goes too. One process alone,
without NCCL. Which of the two ways there are, the settings say.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial

from openrl.timeslice.park import Parkable
from openrl.workers.model import cuda_checkpoint
from openrl.workers.model.settings import CHECKPOINT, STAYS, AcceleratorSettings


class WholeProcess:
    """One process; `make` returns what parks it, given its pid."""

    def __init__(self, make: Callable[[int], Parkable], *, by_pid: bool = True) -> None:
        """With `by_pid` False what `make` returns finds the processes itself, however many."""
        self._make = make
        self._by_pid = by_pid
        self._pid = os.getpid()
        self._parkable: Parkable | None = None

    @classmethod
    def of(cls, settings: AcceleratorSettings, *, owner: str, tool: str = cuda_checkpoint.TOOL) -> WholeProcess | None:
        """Return what the settings ask for; `tool` is the driver's.

        Raises:
            ValueError: it can't be had here; the text names the setting.
        """
        if settings.context == STAYS:
            return None
        if settings.context == CHECKPOINT:
            if shutil.which(tool) is None:
                raise ValueError(f"OPENRL_ACCELERATOR_CONTEXT={CHECKPOINT}: there is no {tool} here")
            return cls(partial(cuda_checkpoint.CudaCheckpoint, tool=tool))
        return cls(_by_agent(settings, owner), by_pid=not settings.agent_job)

    def is_of(self, pids: tuple[int, ...]) -> None:
        """Hear that not this process holds the device but another.

        Raises:
            ValueError: they are several, and they go by their pids.
        """
        if not self._by_pid:
            return
        if len(pids) != 1:
            raise ValueError(f"OPENRL_ACCELERATOR_CONTEXT: the processes {pids} hold the device; it must be one")
        [self._pid] = pids

    def park(self) -> None:
        """Take all of it off the device; raises what the way raises."""
        if self._parkable is None:
            self._parkable = self._make(self._pid)
        self._parkable.park()

    def restore(self) -> None:
        """Bring it back, if it was put aside; raises what the way raises."""
        if self._parkable is not None:
            self._parkable.restore()


def _by_agent(settings: AcceleratorSettings, owner: str) -> Callable[[int], Parkable]:
    try:
        from openrl.workers.model.snapshot_agent import AgentFailed, SnapshotAgent
    except ImportError as failure:
        extra = "install the extra snapshot-agent (grpcio)"
        raise ValueError(f"OPENRL_ACCELERATOR_CONTEXT={settings.context}: {failure}; {extra}") from failure

    def make(pid: int) -> SnapshotAgent:
        if settings.agent_job:
            return SnapshotAgent(settings.agent, settings.agent_job, pid=None)
        # A new name for each process: an agent that once failed with a job refuses it for ever.
        return SnapshotAgent(settings.agent, f"{owner}.{pid}", pid=pid)

    agent = make(os.getpid())
    try:
        agent.check()
    except AgentFailed as failure:
        raise ValueError(f"OPENRL_SNAPSHOT_AGENT: {failure}") from failure
    finally:
        agent.close()
    return make
