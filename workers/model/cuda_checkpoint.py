"""Another process's CUDA state, put aside by the driver itself: for engines that can't park their own memory.

Drives NVIDIA's `cuda-checkpoint` (driver 570 or newer, one GPU, no NCCL): the process is locked, its device memory
copied to host memory of the driver's, its context released; restoring goes the other way. Nothing in the process has to
know. Slower than parking tensors, and it takes host memory that nobody accounts for: for what has no other way.
Has not been run on a GPU yet. github.com/NVIDIA/cuda-checkpoint has the tool and its states.
"""

from __future__ import annotations

import subprocess

TOOL = "cuda-checkpoint"
TIMEOUT_S = 300.0
RUNNING, CHECKPOINTED = "running", "checkpointed"


class CheckpointFailed(Exception):
    """The driver didn't do it: whoever has something on the accelerator must leave it by ending."""


class CudaCheckpoint:
    """The CUDA state of one process; satisfies `openrl.timeslice.park.Parkable`."""

    def __init__(self, pid: int, *, tool: str = TOOL, timeout_s: float = TIMEOUT_S) -> None:
        """Park the process `pid`, which must be one that this user may trace."""
        self._pid = pid
        self._tool = tool
        self._timeout_s = timeout_s

    @property
    def resident_bytes(self) -> int:
        """0 once it is off the device; else 1: the driver doesn't say how much it is."""
        return 0 if self._state() == CHECKPOINTED else 1

    def park(self) -> None:
        """Lock the process, then take its state off the device.

        Raises:
            CheckpointFailed: it may still have something there.
        """
        if self._state() == CHECKPOINTED:
            return
        # A process whose CUDA calls don't end within the time is not locked, and goes on.
        self._run("--action", "lock", "--timeout", str(int(1e3 * self._timeout_s)))
        self._run("--action", "checkpoint")
        self._require(CHECKPOINTED)

    def restore(self) -> None:
        """Bring the state back, and let the process go on.

        Raises:
            CheckpointFailed: it may be there in part.
        """
        if self._state() == RUNNING:
            return
        self._run("--action", "restore")
        self._run("--action", "unlock")
        self._require(RUNNING)

    def _state(self) -> str:
        return self._run("--get-state").strip()

    def _require(self, state: str) -> None:
        if (found := self._state()) != state:
            raise CheckpointFailed(f"process {self._pid} is {found!r} and should be {state!r}")

    def _run(self, *words: str) -> str:
        command = [self._tool, *words, "--pid", str(self._pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=2 * self._timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as failure:
            raise CheckpointFailed(f"{' '.join(command)}: {failure}") from failure
        if done.returncode:
            raise CheckpointFailed(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout
