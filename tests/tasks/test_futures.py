from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from openrl.tasks import keys
from openrl.tasks.errors import Gone, NotFound
from openrl.tasks.futures import told
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import OptimStep, Sample

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


@pytest.fixture
def pending(journal, created):
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    return f"{run_id}:1"


@pytest.fixture
def finish(journal, created):
    def commit(result: bytes = b"{}") -> None:
        _, lease, token = created
        ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
        journal.commit(lease, operation, Outcome(result=result), token=token)

    return commit


def files(store) -> list:
    return [path for path in store.settings.data_dir.rglob("*") if path.is_file()]


def test_a_promise_stands_from_its_submission_and_never_expires_while_it_is_pending(futures, store, pending):
    future = futures.get(TENANT, pending)
    assert (future.state, future.kind, future.model_id) == ("pending", "optim_step", pending.rpartition(":")[0])
    futures.deliver(TENANT, pending)
    assert store.redis.ttl(keys.future(TENANT, pending)) == -1


def test_an_operation_that_was_refused_out_of_turn_is_gone_once_its_promise_expires(journal, futures, store, created):
    run_id, _, _ = created
    journal.refuse(TENANT, run_id, 3, "forward", b"x", "nonsense")
    request_id = f"{run_id}:3"
    assert futures.get(TENANT, request_id).state == "failed"
    store.redis.delete(keys.future(TENANT, request_id))
    with pytest.raises(Gone):
        futures.get(TENANT, request_id)
    with pytest.raises(NotFound):
        futures.get(TENANT, f"{run_id}:2")


def test_a_result_is_kept_a_week_and_once_delivered_an_hour(futures, store, pending, finish):
    finish()
    key = keys.future(TENANT, pending)
    assert 604_000 < store.redis.ttl(key) <= 604_800
    futures.deliver(TENANT, pending)
    assert 3_500 < store.redis.ttl(key) <= 3_600
    store.redis.expire(key, 50)
    futures.deliver(TENANT, pending)
    assert store.redis.ttl(key) <= 50
    assert futures.get(TENANT, pending).result == b"{}"


def test_results_that_are_delivered_together_are_each_kept_an_hour(futures, journal, created, store):
    run_id, lease, token = created
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, OptimStep())
    for operation in journal.take(lease.slug, lease)[0].operations[:2]:
        journal.commit(lease, operation, Outcome(result=b"x" * 2000), token=token)
    futures.deliver_all((TENANT, f"{run_id}:{seq}") for seq in (1, 3, 2, 9))
    lives = [store.redis.ttl(keys.future(TENANT, f"{run_id}:{seq}")) for seq in (1, 2, 3)]
    assert all(3_500 < life <= 3_600 for life in lives[:2])
    assert lives[2] == -1
    now = store.now()
    assert [round(until - now, -2) for _, until in store.redis.zrange(keys.FILES, 0, -1, withscores=True)] == [
        3600.0
    ] * 2


@pytest.mark.parametrize(
    "unknown", ["", "x", "x:1", "s-1:train:0:1", "s-1:sample:0:5", "s-1:train:0:1:2", "s-1:train:0:"]
)
def test_an_id_that_was_never_promised_is_not_found(futures, unknown):
    with pytest.raises(NotFound):
        futures.get(TENANT, unknown)


def test_another_tenants_promise_is_not_found_even_when_it_is_gone(futures, store, pending, finish):
    finish()
    for _ in range(2):
        with pytest.raises(NotFound):
            futures.get("other", pending)
        store.redis.delete(keys.future(TENANT, pending))


def test_an_own_result_that_is_no_longer_kept_is_gone_and_one_not_submitted_is_not_found(
    futures, store, pending, finish
):
    finish()
    store.redis.delete(keys.future(TENANT, pending))
    with pytest.raises(Gone):
        futures.get(TENANT, pending)
    with pytest.raises(NotFound):
        futures.get(TENANT, pending.removesuffix("1") + "2")


def test_an_own_sample_that_is_no_longer_kept_is_gone(futures, store, journal, registry, session_id):
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model=BASE, slug=SLUG)
    message = Sample(adapter_dir="", prompt=(1,), num_samples=1, seed=1)
    promise = journal.submit_sample(TENANT, sampler, 432543029000000001, message)
    store.redis.delete(keys.future(TENANT, promise.request_id))
    with pytest.raises(Gone):
        futures.get(TENANT, promise.request_id)
    with pytest.raises(NotFound):
        futures.get(TENANT, promise.request_id.removesuffix("1") + "2")
    with pytest.raises(NotFound):
        futures.get("other", promise.request_id)


@pytest.mark.parametrize("seq", [1, 2])
def test_a_poll_that_overtakes_its_submission_is_never_told_that_the_result_is_gone(
    futures, store, journal, created, monkeypatch, seq
):
    run_id, ask = created[0], store.together.ask

    def looked(*commands):
        found = ask(*commands)
        monkeypatch.undo()
        journal.submit(TENANT, run_id, seq, OptimStep())  # between the first look and what follows it
        return found

    monkeypatch.setattr(store.together, "ask", looked)
    assert futures.get(TENANT, f"{run_id}:{seq}").state == "pending"


def test_a_large_result_lives_in_a_file_that_leaves_with_it(futures, store, pending, finish):
    finish(b"r" * 5000)
    assert futures.get(TENANT, pending).result == b"r" * 5000
    futures.deliver(TENANT, pending)
    assert futures.sweep() == 0
    (member,) = store.redis.zrange(keys.FILES, 0, -1)
    store.redis.zadd(keys.FILES, {member: store.now() - 120})
    assert futures.sweep() == 1
    assert files(store) == []
    with pytest.raises(Gone):
        futures.get(TENANT, pending)


def test_who_watches_is_woken_by_the_commit(completions, futures, pending, finish):
    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)  # the subscription itself wakes everybody once
        assert futures.get(TENANT, pending).state == "pending"
        finish()
        assert event.wait(60)
        assert futures.get(TENANT, pending).state == "done"
        assert not event.wait(0.05)


def test_a_commit_between_watching_and_reading_is_not_missed(completions, futures, pending, finish):
    with completions.watch(TENANT, pending) as event:
        finish()
        assert event.wait(60)
        assert futures.get(TENANT, pending).state == "done"


def test_only_the_watchers_of_that_promise_are_woken(completions, pending, finish):
    with completions.watch(TENANT, pending) as mine, completions.watch("other", pending) as other:
        assert mine.wait(60)  # by the subscription, which may have come before the other
        other.wait(0.05)
        finish()
        assert mine.wait(60)
        assert not other.wait(0.05)


def test_waiting_ends_when_nothing_happens(completions, pending):
    completions.wait(TENANT, pending, 60)
    assert completions.wait(TENANT, pending, 0.05) is False


def test_a_broken_subscription_is_renewed_and_its_watchers_look_again(completions, store, pending, finish):
    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)
        store.redis.client_kill_filter(_type="pubsub")
        assert event.wait(60)
        finish()
        assert event.wait(60)


def test_a_wake_up_that_breaks_keeps_nobody_from_being_woken(completions, pending, finish):
    broken = threading.Event()

    def wake() -> None:
        if not broken.is_set():
            broken.set()
            raise RuntimeError("not a fault of the store")

    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)
        completions.call_on_wake("w1", wake)
        completions._redis.publish(keys.wake("w1"), b"")
        assert broken.wait(60)
        event.wait(60)  # the renewed subscription
        finish()
        assert event.wait(60)
        assert completions._thread.is_alive()


def test_a_subscription_whose_thread_has_died_is_started_anew(completions, pending, finish):
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    completions._thread, completions._pid = dead, os.getpid()
    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)
        finish()
        assert event.wait(60)


def test_hundreds_of_watchers_share_one_subscription(completions, store, pending, finish):
    woken = threading.Barrier(201, timeout=60)
    before = store.redis.pubsub_numsub(keys.DONE)[0][1]  # one of an earlier test may be about to end

    def watch() -> None:
        with completions.watch(TENANT, pending) as event:
            woken.wait()
            assert event.wait(60)
            woken.wait()

    threads = [threading.Thread(target=watch) for _ in range(200)]
    for thread in threads:
        thread.start()
    woken.wait()
    assert store.redis.pubsub_numsub(keys.DONE)[0][1] <= before + 1
    finish()
    woken.wait()
    for thread in threads:
        thread.join()
    assert completions._waiting == {}


@pytest.mark.parametrize("result", [b"{}", b"", bytes(range(256)), b"\n\n"])
def test_who_waits_is_told_of_the_end_as_it_is_kept(completions, futures, pending, finish, result):
    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)
        assert told(TENANT, pending, event.said) is None
        finish(result)
        assert event.wait(60)
        assert told(TENANT, pending, event.said) == futures.get(TENANT, pending)


def test_a_long_result_is_read_from_where_it_is_kept(completions, futures, pending, finish):
    with completions.watch(TENANT, pending) as event:
        assert event.wait(60)
        finish(b"x" * 9000)
        assert event.wait(60)
        assert told(TENANT, pending, event.said) is None
        assert len(futures.get(TENANT, pending).result) == 9000


def test_what_another_version_tells_of_an_end_is_left_to_the_store(pending):
    head = '{"schema": %s, "state": "done", "kind": "optim_step"}\n{}'
    assert told(TENANT, pending, (head % 1).encode()).result == b"{}"
    for said in (head % 99, head % '"x"', "{}", "[]", "", "\xff\n"):
        assert told(TENANT, pending, said.encode("latin-1")) is None


GEVENT = """
from gevent import monkey; monkey.patch_all()
import sys, gevent
from pathlib import Path
from openrl.tasks.futures import Completions, told
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
store = Store.connect(StoreSettings(redis_url=sys.argv[1], data_dir=Path(sys.argv[2])))
completions = Completions(store)
def watch():
    with completions.watch("t", "r") as event:
        event.wait(60)
        started.append(1)
        return event.wait(60)
started = []
watchers = [gevent.spawn(watch) for _ in range(100)]
while len(started) < 100:
    gevent.sleep(0.01)
store.redis.publish("openrl:done", "t r")
assert all(watcher.get() for watcher in watchers)
completions.close()
store.close()
"""


def test_it_works_under_gevent(store):
    command = [sys.executable, "-W", "error", "-c", GEVENT, store.settings.redis_url, str(store.settings.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
