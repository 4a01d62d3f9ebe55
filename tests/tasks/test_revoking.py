"""What Celery is told to revoke is cancelled, in whichever process hears of it first."""

from __future__ import annotations

import pytest
from celery.worker.control import Panel

from openrl.tasks import revoking
from openrl.tasks.celery import celery
from openrl.tasks.messages import OptimStep, Sample
from tests.tasks.conftest import BASE, SLUG, TENANT


class State:
    """A Celery worker's state, as a command of remote control gets it."""

    app = celery


@pytest.mark.parametrize("options", [{}, {"terminate": True, "signal": "SIGKILL"}])
def test_a_revoked_operation_and_sample_are_cancelled_and_a_second_process_finds_it_done(
    store, journal, registry, session_id, created, futures, options
):
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 2, OptimStep())
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model=BASE, slug=SLUG)
    drawn = journal.submit_sample(TENANT, sampler, 7, Sample(adapter_dir="", prompt=(1,), num_samples=1, seed=1))
    ids = [f"{run_id}:2", drawn.request_id]
    revoking.listen(store)
    first = Panel.data["revoke"](State(), task_id=ids, **options)
    assert first == {"ok": f"{ids[0]} is cancelled; {ids[1]} is cancelled"}
    assert Panel.data["revoke"](State(), task_id=ids) == {"ok": f"{ids[0]} has ended; {ids[1]} has ended"}
    assert {futures.get(TENANT, each).error for each in ids} == {"cancelled by an operator"}


def test_what_is_no_operation_or_can_not_be_cancelled_is_said_and_harms_nothing(store, created, new_run):
    run_id, _, _ = created
    revoking.listen(store)
    for name, words in (
        ("5f2b9c1e-0000-4000-8000-000000000000", "no future"),
        ("s-1:train:0:4", "no run or sampler"),
        (f"{run_id}:9", "no future"),
        (f"{new_run(1)}:0", "creates a run"),
    ):
        assert words in Panel.data["revoke"](State(), task_id=name)["ok"]
