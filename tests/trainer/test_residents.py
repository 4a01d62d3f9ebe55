"""Who is resident, who is due for a snapshot, who goes first when memory is short."""

import torch

from openrl.workers.trainer.residents import Residents
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def residents(names: str, **settings: float) -> tuple[Residents, Clock, dict[str, Run]]:
    clock = Clock()
    made = Residents(TrainerSettings(**settings), clock=clock)
    runs = {}
    for name in names:
        runs[name] = Run(tenant="t", run_id=name, token=1, gradient=[torch.zeros(25)])
        made.add(runs[name])
        clock.now += 1
    return made, clock, runs


def test_a_snapshot_is_due_by_operations_bytes_or_work_and_never_without_operations():
    made, clock, runs = residents("a", snapshot_operations=3, snapshot_bytes=100, snapshot_s=60)
    clock.now += 1000
    assert not made.snapshot_due(runs["a"])
    made.note(runs["a"], 40, 0)
    assert not made.snapshot_due(runs["a"])
    made.note(runs["a"], 60, 0)
    assert made.snapshot_due(runs["a"])
    made.note_saved(runs["a"])
    made.note(runs["a"], 0, 59.5)
    assert not made.snapshot_due(runs["a"])
    made.note(runs["a"], 0, 0.5)
    assert made.snapshot_due(runs["a"])
    made.note_saved(runs["a"])
    for _ in range(3):
        assert not made.snapshot_due(runs["a"])
        made.note(runs["a"], 0, 0)
    assert made.snapshot_due(runs["a"])


def test_whatever_is_due_snapshots_take_no_more_than_their_share_of_the_time():
    made, _, runs = residents("a", snapshot_operations=1, snapshot_share=0.04)
    runs["a"].snapshot_s = 2.0
    made.note(runs["a"], 0, 49)
    assert not made.snapshot_due(runs["a"])
    made.note(runs["a"], 0, 1)
    assert made.snapshot_due(runs["a"])


def test_what_it_took_to_rebuild_a_run_counts_until_the_next_snapshot():
    made, _, runs = residents("a", snapshot_s=5)
    made.add(runs["a"], worked=4)
    made.note(runs["a"], 0, 1)
    assert made.snapshot_due(runs["a"])


def test_idle_runs_go_after_their_time_unless_something_waits_for_them():
    made, clock, runs = residents("abc", idle_s=100)
    assert made.surplus(set()) == []
    clock.now += 99
    assert made.surplus({("t", "a")}) == [runs["b"], runs["c"]][: len(made.surplus({("t", "a")}))]
    clock.now += 100
    assert made.surplus({("t", "a")}) == [runs["b"], runs["c"]]


def test_the_longest_idle_runs_go_until_memory_suffices():
    made, _, runs = residents("abc", resident_bytes=200)
    assert made.surplus(set()) == [runs["a"]]
    made.note(runs["a"], 0, 0)
    assert made.surplus(set()) == [runs["b"]]
    assert made.surplus({("t", "b"), ("t", "c"), ("t", "a")}) == []


def test_a_run_that_was_rebuilt_is_another_one():
    made, _, runs = residents("a")
    assert made.holds(runs["a"])
    again = Run(tenant="t", run_id="a", token=1)
    assert not made.holds(again)
    made.drop(again.key)
    assert not made.holds(runs["a"]) and made.get(runs["a"].key) is None and len(made) == 0
