"""vLLM's CPU build whose workers remember whether they were told to sleep: only a GPU's memory is missing.

For tests alone. What is left beside the weights once they sleep is what the file named in OPENRL_TEST_RESIDUE says.
"""

import os
from pathlib import Path

from vllm.v1.worker.cpu_worker import CPUWorker

from openrl.workers.sampler.vllm_worker import Extension

WEIGHTS, RESIDUE = 1000, "OPENRL_TEST_RESIDUE"


def _sleep(self: CPUWorker, level: int = 1) -> None:
    assert level == 1 and self.openrl_awake
    self.openrl_awake = False


def _wake_up(self: CPUWorker, tags: list[str] | None = None) -> None:
    assert tags is None
    self.openrl_awake = True


CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


class Asleep(Extension):
    """What the workers of these tests get."""

    openrl_awake = True

    def openrl_memory(self) -> tuple[int, int]:
        """Say what a GPU would have."""
        return (WEIGHTS, 0) if self.openrl_awake else (0, int(Path(os.environ[RESIDUE]).read_text()))
