"""The patience of a doorbell: it waits for what will happen here soon, and for nothing else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future as Running
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from openrl.tasks import keys
from openrl.tasks.celery import celery, queue_name
from openrl.tasks.doorbell import Doorbell, Waiter
from openrl.tasks.errors import OperationFailed
from openrl.tasks.messages import OptimStep, Sample, SaveWeightsForSampler
from openrl.tasks.operations import Outcome
from openrl.tasks.records import Sampler, sampler_row
from openrl.tasks.store import Store

TENANT = "local"
LONG_S = 30.0


@pytest.fixture
def waiter(store) -> Waiter:
    return Waiter(store, worker_id=lambda: "w1")


@pytest.fixture
def waiting(waiter: Waiter) -> Iterator[Callable[[str], Running]]:
    """Wait for a request in a thread of its own, as the Celery pool does."""
    with ThreadPoolExecutor() as pool:
        yield lambda request_id: pool.submit(waiter.wait_for, TENANT, request_id)
        waiter.release()


def test_it_returns_when_the_operation_has_taken_effect(journal, created, waiting):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    call = waiting(f"{run_id}:1")
    assert not call.done()
    (piece,) = journal.take(lease.slug, lease)
    journal.commit(lease, piece.operations[0], Outcome(), token=token)
    assert call.result(LONG_S) is None


def test_it_raises_what_the_operation_failed_of_so_that_flower_shows_a_failure(journal, created, waiting):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    call = waiting(f"{run_id}:1")
    (piece,) = journal.take(lease.slug, lease)
    journal.commit(lease, piece.operations[0], Outcome(error="no gradient", category="user"), token=token)
    with pytest.raises(OperationFailed, match="no gradient"):
        call.result(LONG_S)


@pytest.mark.parametrize("arrived", [(2,), (1, 3), (1, 2, 4)])
def test_behind_a_gap_it_gives_its_thread_back_at_once(journal, created, waiting, arrived):
    run_id, _, _ = created
    for seq in arrived:
        journal.submit(TENANT, run_id, seq, OptimStep(learning_rate=seq * 1e-3))
    assert waiting(f"{run_id}:{arrived[-1]}").result(LONG_S) is None


def test_an_operation_behind_others_that_are_there_is_waited_for(journal, created, waiting, waiter):
    run_id, _, _ = created
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, OptimStep(learning_rate=seq * 1e-3))
    call = waiting(f"{run_id}:3")
    with pytest.raises(TimeoutError):
        call.result(0.5)
    waiter.release()
    assert call.result(LONG_S) is None


def test_a_promise_that_is_not_there_is_not_waited_for(waiting):
    assert waiting("s-00000000000000000000000000000000:train:0:1").result(LONG_S) is None


def test_a_ring_at_the_wrong_worker_wakes_the_owner(journal, created, store, completions):
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    woken, other_woken = threading.Event(), threading.Event()
    # The subscription itself wakes whom it is for, since a ring may have passed before it.
    subscribe(completions, {"w1": woken, "w2": other_woken})
    stranger = Waiter(store, worker_id=lambda: "w2")
    stranger.release()
    stranger.wait_for(TENANT, f"{run_id}:1")
    assert woken.wait(LONG_S)
    assert not other_woken.is_set()


def test_what_is_appended_wakes_the_owner_of_the_run_without_any_doorbell(journal, created, completions):
    run_id, _, _ = created
    woken, other_woken = threading.Event(), threading.Event()
    subscribe(completions, {"w1": woken, "w2": other_woken})
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert woken.wait(LONG_S)
    assert not other_woken.is_set()


def test_a_task_that_the_journal_lays_into_its_queue_is_the_one_that_celery_would_send(journal, created, store):
    run_id, _, _ = created
    celery.conf.broker_url = store.settings.broker_url
    place = ("optim_step", "tiny", TENANT)
    bell = Doorbell(store)
    journal.submit(TENANT, run_id, 1, OptimStep(), letter=bell.letter(*place, f"{run_id}:1"))
    laid = read(queue_name("train", "tiny", TENANT))
    bell.ring(*place, f"{run_id}:1")
    sent = read(queue_name("train", "tiny", TENANT))
    assert laid.headers["task"] == "trainer.optim_step"
    assert laid.payload[0] == [TENANT, f"{run_id}:1"]
    assert laid.delivery_tag != sent.delivery_tag
    assert everything(laid) == everything(sent)


def test_a_sample_lays_its_task_into_the_queue_of_its_samplers_once(journal, registry, session_id, store):
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model="tiny", slug="tiny")
    message = Sample(adapter_dir="", prompt=(1,), num_samples=1)
    letter = Doorbell(store).letter("sample", "tiny", TENANT, "the id")
    for _ in range(2):
        journal.submit_sample(TENANT, sampler, 0, message, letter=letter)
    assert letter[0].endswith(queue_name("sample", "tiny", TENANT))
    assert store.redis.lrange(letter[0], 0, -1) == [letter[1].encode()]


def test_with_a_broker_of_its_own_celery_sends_the_task(store, tmp_path):
    settings = replace(store.settings, broker_url="redis://elsewhere:6379/0")
    assert Doorbell(Store(store.redis, settings)).letter("optim_step", "tiny", TENANT, "s-1:train:0:1") is None


def subscribe(completions, woken):
    """Let names set events, and return when it is sure that they will."""
    for name, event in woken.items():
        completions.call_on_wake(name, event.set)
    for event in woken.values():
        assert event.wait(LONG_S)
        event.clear()


def read(queue):
    """Take one message as a worker does."""
    with celery.connection_for_read() as connection, connection.SimpleQueue(queue) as box:
        message = box.get(timeout=LONG_S)
        message.ack()
        return message


def everything(message):
    properties = {name: value for name, value in message.properties.items() if name != "delivery_tag"}
    return message.headers, message.payload, properties, message.content_type, message.content_encoding


def test_samplers_are_told_of_each_new_version_of_their_base_model(journal, created, session_id, completions):
    run_id, lease, token = created
    told, other, woken = queue.SimpleQueue(), [], threading.Event()
    completions.call_with(keys.new_versions(lease.slug), told.put)
    completions.call_with(keys.new_versions("other"), other.append)
    subscribe(completions, {keys.new_versions(lease.slug): woken})
    sampler_id = f"{session_id}:sample:0"
    journal.submit(TENANT, run_id, 1, SaveWeightsForSampler(sampler_id=sampler_id))
    (piece,) = journal.take(lease.slug, lease)
    sampler = Sampler(
        sampler_id=sampler_id, session_id=session_id, base_model="tiny", slug=lease.slug, adapter_dir="t/r/@0.1"
    )
    journal.commit(lease, piece.operations[0], Outcome(rows=sampler_row(TENANT, sampler)), token=token)
    assert told.get(timeout=LONG_S) == b"t/r/@0.1"
    assert not other and not woken.is_set()


def test_a_sample_wakes_the_samplers_of_its_base_model(journal, registry, session_id, completions):
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model="tiny", slug="tiny")
    woken, other_woken = threading.Event(), threading.Event()
    subscribe(completions, {keys.samplers("tiny"): woken, keys.samplers("other"): other_woken})
    journal.submit_sample(TENANT, sampler, 0, Sample(adapter_dir="", prompt=(1,), num_samples=1))
    assert woken.wait(LONG_S)
    assert not other_woken.is_set()
