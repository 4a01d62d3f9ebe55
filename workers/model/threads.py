"""How many threads of a CPU a piece of work is worth.

Small work is done before a second thread has woken up, and a thread that waits for it spins on the core that the
API and the store need. What is chosen depends on the size of the work alone: the same work is cut the same way and
gives the same bits, whatever else runs.
"""

import torch

SMALL_FLOPS = 2e9
"""Work under this takes one thread: some 30 ms of it."""


class Threads:
    """The threads of this process; belongs to the one thread that computes."""

    def __init__(self, most: int | None = None) -> None:
        """Take at most `most`; None means as many as torch has now."""
        self.most = most or torch.get_num_threads()

    def fit(self, flops: float) -> None:
        """Let what follows run on as many threads as this much work is worth."""
        wanted = self.most if flops >= SMALL_FLOPS else 1
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
