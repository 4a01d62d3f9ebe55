"""What the owner of a run is told of an operation that was taken in: what it would be given if it asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.futures import Completions
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import CreateModel, Datum, ForwardBackward, OptimStep, SaveWeights
from openrl.tasks.quotas import Quotas

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


@pytest.fixture
def told(store, created) -> Iterator[Callable[[], bytes]]:
    """Return the next thing that the run's owner is told."""
    _, lease, _ = created
    subscribed, said = threading.Event(), queue.SimpleQueue()
    completions = Completions(store)
    completions.call_on_wake(lease.worker_id, subscribed.set)
    completions.call_with(lease.worker_id, said.put)
    assert subscribed.wait(60)
    yield lambda: said.get(timeout=60)
    completions.close()


def test_the_owner_is_told_of_what_is_next_as_it_would_be_given_it(journal, created, told):
    run_id, lease, token = created
    for seq in (1, 2):
        journal.submit(TENANT, run_id, seq, OptimStep(learning_rate=seq * 1e-3))
        (taken,) = journal.take(SLUG, lease)
        assert journal.heard(lease, told()) == taken
        assert journal.bodies(taken.operations) == [OptimStep(learning_rate=seq * 1e-3).to_bytes()]
        journal.commit(lease, taken.operations[0], Outcome(result=b"{}"), token=token)


def test_what_is_not_next_or_long_only_rings(journal, created, told):
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 2, OptimStep())
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a", user_metadata={"x": "y" * 20_000}))
    journal.submit(TENANT, run_id, 3, OptimStep())
    journal.refuse(TENANT, run_id, 4, "optim_step", b"x", "nonsense")
    assert [told() for _ in range(4)] == [b""] * 4


def test_what_is_to_be_cancelled_and_what_killed_a_worker_only_ring(journal, created, store, told):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert told()
    Cancelling(store).cancel(TENANT, f"{run_id}:1")
    assert told() == b""
    journal.commit(lease, _taken(journal, lease), Outcome(error="no"), token=token)
    store.redis.hset(keys.run(TENANT, run_id), mapping={"suspect": "2", "crashes": "1"})
    journal.submit(TENANT, run_id, 2, OptimStep())
    assert told() == b""


def test_a_tenant_without_tokens_left_is_not_told_of_what_reads_some(journal, created, store, told, gradient):
    run_id, lease, token = created
    Quotas(store).set(TENANT, {"tokens_per_minute": 5})
    journal.submit(TENANT, run_id, 1, gradient)
    assert told()
    journal.commit(lease, _taken(journal, lease), Outcome(result=b"{}"), token=token)
    journal.submit(TENANT, run_id, 2, gradient)
    assert told() == b""
    assert journal.take(SLUG, lease) == []


def test_an_owner_of_before_hears_nothing_of_it(journal, created, new_lease, kill, told):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    said = told()
    kill(lease)
    heir = new_lease("w2")
    assert journal.heard(heir, said) is None
    journal.take(SLUG, heir)
    assert journal.heard(heir, said) is None
    lease.mark_lost()
    assert journal.heard(lease, said) is None


def test_a_run_that_nobody_owns_is_nobodys_to_hear_of(journal, session_id, created, told):
    run_id, _, _ = created
    journal.create(TENANT, session_id, 7, CreateModel(base_model=BASE, rank=8, seed=1), slug=SLUG)
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert told().find(run_id.encode()) > 0


def _taken(journal, lease):
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    return operation


@pytest.fixture
def gradient():
    """An operation that sends ten tokens through the model."""
    return ForwardBackward(data=(Datum(tokens=np.zeros(10, np.int32), inputs={}),), loss_fn="ppo")
