"""The beat ends the turns of the dead, and of nobody else."""

from __future__ import annotations

import subprocess

from openrl.scheduler.reconcile import SCHEDULE, Reconciler
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks.celery import celery
from openrl.tasks.store import Store
from openrl.timeslice.holder import Holder
from openrl.timeslice.standing import standing
from openrl.timeslice.turn import Turns


def test_the_beat_ends_the_turn_of_a_dead_holder_and_of_no_living_one(store: Store) -> None:
    turns, reconciler = Turns(store.redis), Reconciler(store, SchedulerSettings())
    processes = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
    try:
        for number, process in enumerate(processes):
            assert turns.ask(f"gpu-{number}", "a", f"seat {number}", Holder.of(process.pid)) is not None
        reconciler.sweep_turns()
        assert all(standing(turns, f"gpu-{number}").present for number in range(2))
        processes[0].kill()
        processes[0].wait()
        reconciler.sweep_turns()
        assert standing(turns, "gpu-0").present is None and standing(turns, "gpu-1").present is not None
        assert standing(turns, "gpu-0").switches[0]["how"] == "died"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_the_sweep_of_turns_is_on_the_beat_by_its_name() -> None:
    assert {row["task"] for row in SCHEDULE.values()} <= set(celery.tasks)
    assert SCHEDULE["sweep-turns"]["task"] == "timeslice.sweep"
