from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

import pytest

from openrl.tasks import keys
from openrl.tasks.errors import StaleOwner
from openrl.tasks.journal import Journal, Outcome
from openrl.tasks.messages import OptimStep
from openrl.tasks.ownership import Lease, new_epoch, owner
from openrl.tasks.store import Store

TENANT, SLUG = "local", keys.slug("tiny/base")


def test_a_run_of_a_living_worker_is_never_handed_to_another(journal, created, new_lease, store):
    run_id, lease, token = created
    other = new_lease("w2")
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert journal.take(SLUG, other) == []
    (piece,) = journal.take(SLUG, lease)
    assert (piece.token, piece.newly_owned) == (token, False)
    assert owner(store, TENANT, run_id) == "w1"


def test_a_dead_workers_run_is_claimed_under_a_larger_token_and_its_commits_are_refused(
    journal, created, new_lease, kill, registry
):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    kill(lease)
    (piece,) = journal.take(SLUG, new_lease("w2"))
    assert piece.token > token
    assert piece.newly_owned
    with pytest.raises(StaleOwner):
        journal.commit(lease, operation, Outcome(), token=token)
    assert registry.run(TENANT, run_id).applied == 0
    assert journal.take(SLUG, lease) == []
    assert lease.lost


def test_a_new_process_under_the_old_name_gets_a_new_token(journal, created, new_lease):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    successor = new_lease("w1")
    (piece,) = journal.take(SLUG, successor)
    assert piece.token > token
    assert piece.newly_owned
    assert journal.take(SLUG, lease) == []
    assert lease.lost
    assert not successor.lost


def test_a_released_run_is_anybodys_and_its_old_token_is_void(journal, created, new_lease, store):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    journal.release(lease, TENANT, run_id, token + 1)
    assert owner(store, TENANT, run_id) == "w1"
    journal.release(lease, TENANT, run_id, token)
    assert owner(store, TENANT, run_id) == ""
    with pytest.raises(StaleOwner):
        journal.commit(lease, operation, Outcome(), token=token)
    (piece,) = journal.take(SLUG, new_lease("w2"))
    assert piece.token > token


def test_a_worker_without_room_takes_only_its_own_runs(journal, created, new_run):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    new_run(1), new_run(2)
    assert [piece.run_id for piece in journal.take(SLUG, lease, max_claims=0)] == [run_id]
    assert len(journal.take(SLUG, lease, max_claims=1)) == 2


def test_a_lost_answer_of_a_claim_does_not_hide_that_the_run_is_new(journal, new_run, new_lease, store):
    new_run()
    lease = new_lease("w1")
    store.script("take")(SLUG, lease.worker_id, lease.generation, 9, 9, 9, 9)
    (piece,) = journal.take(SLUG, lease)
    assert piece.newly_owned


def test_tokens_grow_over_epochs(journal, new_run, new_lease, store):
    assert new_epoch(store) == 1
    new_run(0)
    (first,) = journal.take(SLUG, new_lease("w1"))
    assert first.token == 2**32 + 1
    assert new_epoch(store, floor=7) == 7
    store.redis.delete("openrl:tokens")
    new_run(1)
    (second,) = journal.take(SLUG, new_lease("w2"))
    assert second.token == 7 * 2**32 + 1
    assert new_epoch(store, floor=3) == 8


def test_the_lease_tells_what_the_worker_does_and_ends_with_it(store):
    lease = Lease(store, "w1", "sampler", SLUG)
    lease.touch_busy()
    lease.set_state("ready")
    row = store.redis.hgetall(keys.worker("w1"))
    assert (row[b"kind"], row[b"slug"], row[b"state"]) == (b"sampler", SLUG.encode(), b"ready")
    assert float(row[b"last_busy"]) > 0
    assert 0 < store.redis.pttl(keys.worker("w1")) <= 30_000
    assert store.redis.smembers(keys.WORKERS) == {b"w1"}
    lease.close()
    lease.close()
    assert not lease.lost
    assert not store.redis.exists(keys.worker("w1"))
    assert store.redis.smembers(keys.WORKERS) == set()


def test_an_old_process_cannot_end_or_renew_its_successors_lease(store, new_lease):
    old, new = new_lease("w1"), new_lease("w1")
    old.set_state("busy")
    assert old.lost
    old.close()
    assert store.redis.hget(keys.worker("w1"), "state") == b"starting"
    assert not new.lost


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)


def test_the_renewing_thread_keeps_the_lease_and_notices_its_loss(store_settings, store, kill):
    quick = Store.connect(dataclasses.replace(store_settings, lease_s=8))
    lease = Lease(quick, "w1", "trainer", SLUG)
    store.redis.pexpire(keys.worker("w1"), 7000)
    until(lambda: store.redis.pttl(keys.worker("w1")) > 7000)
    assert not lease.lost
    kill(lease)
    until(lambda: lease.lost)
    lease.close()
    quick.close()


def test_a_worker_that_cannot_reach_the_store_stops_owning_when_its_lease_ends(store_settings, store):
    quick = Store.connect(dataclasses.replace(store_settings, lease_s=0.4))
    lease = Lease(quick, "w1", "trainer", SLUG)
    store.redis.client_pause(900, all=True)
    threading.Event().wait(0.6)
    assert lease.lost
    assert Journal(store).take(SLUG, lease) == []
    lease.close()
    assert lease.lost
    quick.close()
