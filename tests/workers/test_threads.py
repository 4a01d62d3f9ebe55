"""Threads follow the size of the work, and nothing else."""

from collections.abc import Iterator

import pytest
import torch

from openrl.workers.model.threads import SMALL_FLOPS, Threads


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_small_work_takes_one_thread_and_large_work_all():
    threads = Threads(2)
    for flops, expected in [(SMALL_FLOPS, 2), (SMALL_FLOPS / 2, 1), (0, 1), (1e15, 2)]:
        threads.fit(flops)
        assert torch.get_num_threads() == expected


def test_no_more_threads_are_taken_than_the_process_was_given():
    torch.set_num_threads(1)
    threads = Threads()
    threads.fit(1e15)
    assert torch.get_num_threads() == 1
