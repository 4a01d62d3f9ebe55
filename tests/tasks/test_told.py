"""What the owner of a run is told of an operation that was taken in: what it would be given if it asked."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.futures import Completions
from openrl.tasks.futures import told as how_it_ended
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import CreateModel, Datum, ForwardBackward, OptimStep, SaveWeights
from openrl.tasks.quotas import Quotas
from openrl.tasks.settings import StoreSettings

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


@pytest.fixture
def store_settings(store_settings: StoreSettings) -> StoreSettings:
    """Bodies and results of this size lie in the store."""
    return replace(store_settings, inline_bytes=1 << 16)


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


def test_what_is_not_next_only_rings_and_so_does_what_closes_a_gap(journal, created, told):
    """More than it can be carried out then, and the journal gives all of it."""
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 2, OptimStep())
    journal.submit(TENANT, run_id, 1, OptimStep())
    journal.refuse(TENANT, run_id, 3, "optim_step", b"x", "nonsense")
    assert [told() for _ in range(3)] == [b""] * 3
    assert [operation.seq_id for operation in journal.take(SLUG, lease)[0].operations] == [1, 2, 3]


@pytest.mark.parametrize(("size", "comes_along"), [(12_000, True), (20_000, False)])
def test_a_long_body_only_rings(store, journal, created, told, size, comes_along):
    """Though it lies in the store, not in a file."""
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a", user_metadata={"x": "y" * size}))
    assert store.redis.hget(keys.bodies(TENANT, run_id), "1").startswith(b"=")
    assert bool(told()) is comes_along


@pytest.mark.parametrize(("size", "comes_along"), [(8_000, True), (9_000, False)])
def test_of_a_long_result_is_told_only_that_it_is_there(store, journal, created, futures, size, comes_along):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    operation = _taken(journal, lease)
    completions = Completions(store)
    with completions.watch(TENANT, operation.request_id) as event:
        assert event.wait(60)
        journal.commit(lease, operation, Outcome(result=b"x" * size), token=token)
        assert event.wait(60)
        assert (how_it_ended(TENANT, operation.request_id, event.said) is not None) is comes_along
    completions.close()
    assert len(futures.get(TENANT, operation.request_id).result) == size


def test_what_is_to_be_cancelled_and_what_killed_a_worker_only_ring(journal, created, store, told):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert told()
    Cancelling(store).cancel(TENANT, f"{run_id}:1")
    assert told() == b""
    journal.commit(lease, _taken(journal, lease), Outcome(error="no"), token=token)
    for suspect in ({"suspect": "2", "crashes": "1"}, {"suspect": "", "crashes": "", "cancels": "1"}):
        store.redis.hset(keys.run(TENANT, run_id), mapping=suspect)
        seq = 2 if "cancels" not in suspect else 3
        journal.submit(TENANT, run_id, seq, OptimStep())
        assert told() == b""
        store.redis.hdel(keys.run(TENANT, run_id), "suspect", "crashes")
        if seq == 2:
            journal.commit(lease, _taken(journal, lease), Outcome(error="no"), token=token)


@pytest.mark.parametrize(
    "said", [b"hello", b"", b"\n", b"1 2\nx", b"5 6 {}\n", b"5 5 1 1 1 1 2 2\nlocals-0:t:0xxxx{}{}", b"\xff\n"]
)
def test_what_another_version_tells_is_left_to_the_journal(journal, created, said):
    _, lease, _ = created
    assert journal.heard(lease, said) is None


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


def test_of_a_run_that_nobody_owns_nobody_is_told(journal, session_id, created, store, told):
    run_id, _, _ = created
    orphan = journal.create(TENANT, session_id, 7, CreateModel(base_model=BASE, rank=8, seed=1), slug=SLUG).run_id
    with store.redis.pubsub() as all_wakes:
        all_wakes.psubscribe(keys.wake("*"))
        journal.submit(TENANT, orphan, 1, OptimStep())
        journal.submit(TENANT, run_id, 1, OptimStep())
        heard = []
        while len(heard) < 2:
            heard += [message] if (message := all_wakes.get_message(timeout=60)) else []
    assert run_id.encode() in heard[1]["data"] and run_id.encode() in told()


def _taken(journal, lease):
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    return operation


@pytest.fixture
def gradient():
    """An operation that sends ten tokens through the model."""
    return ForwardBackward(data=(Datum(tokens=np.zeros(10, np.int32), inputs={}),), loss_fn="ppo")
