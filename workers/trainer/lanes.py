"""Micro-batches of a pass side by side: each in a thread of its own, with its share of the CPU's threads.

Two threads within each product wait for each other a thousand times a pass, and a product with a narrow side, as an
adapter's is, is hardly shared at all; two micro-batches share nothing but the weights that they read. How a pass is
cut, and on how many threads a part is computed, depends on its size alone: the same work gives the same bits. On a GPU
there is one lane, the caller's own thread. Knows neither runs nor models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from openrl.workers.model.threads import SMALL_FLOPS

LANE_TOKENS = 64
"""Fewer are not worth a lane: each reads all weights."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lanes:
    """The threads of one device; belongs to the thread that computes."""

    def __init__(
        self,
        device: torch.device,
        most: int | None = None,
        *,
        lane_tokens: int = LANE_TOKENS,
        least_flops: float = SMALL_FLOPS / 2,
    ) -> None:
        """Make `most` lanes; None: as many as torch has threads now on a CPU, and one elsewhere.

        Each has `lane_tokens` at least; work under `least_flops` is not divided.
        """
        self._most = most or (torch.get_num_threads() if device.type == "cpu" else 1)
        self._lane_tokens, self._least_flops = lane_tokens, least_flops
        self._pool = ThreadPoolExecutor(self._most, thread_name_prefix="lane") if self._most > 1 else None

    def number(self, num_tokens: int, flops_per_token: float) -> int:
        """Return how many lanes so many tokens are worth; what one thread does in no time takes one."""
        if num_tokens * flops_per_token < self._least_flops:
            return 1
        return max(1, min(self._most, num_tokens // self._lane_tokens))

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return what `work` makes of each item, in their order; where one raises, all have ended before it is heard.

        A single item is worked on in the caller's thread.
        """
        todo = list(items)
        if self._pool is None or len(todo) < 2:
            return [work(item) for item in todo]
        before, threads = torch.get_num_threads(), max(1, self._most // len(todo))

        def one(item: Item) -> Result:
            torch.set_num_threads(threads)  # of this thread; and of those that have not computed yet
            return work(item)

        futures = [self._pool.submit(one, item) for item in todo]
        wait(futures)
        torch.set_num_threads(before)
        return [future.result() for future in futures]
