"""Work on many blocks at once, with a bounded number of them in memory; results come in order.

Threads are enough where blocks are large: comparing, copying, digesting and compressing all let go of the interpreter's
lock. Where they are small, threads would wait for it more than they work.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

THREADS = min(8, len(os.sched_getaffinity(0)))
"""As many as there are cores for this process; over 8 the memory's speed is what counts."""


def fitting(most: int, jobs: Sized) -> int:
    """Return how many threads are of use for so many jobs."""
    return max(1, min(most, len(jobs)))


def in_order(
    work: Callable[[Job], Result], jobs: Iterable[Job], *, threads: int = THREADS
) -> Generator[Result, None, None]:
    """Yield `work(job)` for each job. At most two jobs a thread are begun or finished and not yet taken.

    What a job raises is raised here, when its turn comes; then, and once the generator is closed, no other job runs.
    """
    if threads == 1:
        yield from map(work, jobs)
        return
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="weights") as pool:
        try:
            for job in jobs:
                waiting.append(pool.submit(work, job))
                if len(waiting) >= 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
