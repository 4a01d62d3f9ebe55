"""What a process has accepted is waited for without a look into the store, and answered as the store tells of it."""

from __future__ import annotations

import threading

import pytest

from openrl.app.expected import KEPT_S, MOST, Expected
from openrl.tasks.futures import Completions
from openrl.tasks.journal import Outcome
from openrl.tasks.operations import Promise
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker


def reads(store: Store) -> int:
    """How often a hash was read as a whole, as a promise is."""
    return int(store.redis.info("commandstats").get("cmdstat_hgetall", {"calls": 0})["calls"])


def test_a_result_that_is_told_is_answered_without_a_look_into_the_store(
    api: Api, worker: Worker, store: Store
) -> None:
    run = api.run()
    api.poll(f"{run}:0")  # the subscription is there
    api.ok(api.optim_step(run, 1))
    waiting = threading.Thread(target=worker.step, args=({"optim_step": Outcome(result=b'{"metrics": {}}')},))
    before = reads(store)
    waiting.start()
    waiting.join()
    told = api.services.expected._watches["local", f"{run}:1"][1]
    assert threading.Event.wait(told, 60)
    assert api.ok(api.poll(f"{run}:1")) == {"metrics": {}}
    assert reads(store) == before
    assert api.ok(api.poll(f"{run}:1")) == {"metrics": {}}
    assert reads(store) == before + 1


def test_a_failure_that_is_told_is_answered_as_one_without_a_look(api: Api, worker: Worker, store: Store) -> None:
    run = api.run()
    api.poll(f"{run}:0")
    api.ok(api.optim_step(run, 1))
    told = api.services.expected._watches["local", f"{run}:1"][1]
    worker.step({"optim_step": Outcome(error="no gradient", category="user")})
    assert threading.Event.wait(told, 60)
    before = reads(store)
    assert api.ok(api.poll(f"{run}:1")) == {"error": "no gradient", "category": "user"}
    assert reads(store) == before


def test_what_was_accepted_before_is_looked_for(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.optim_step(run, 1))
    worker.step({"optim_step": Outcome(result=b'{"metrics": {}}')})
    api.ok(api.poll(f"{run}:1"))
    api.ok(api.optim_step(run, 1))  # sent again: it has ended long ago, and nobody tells of it any more
    assert api.services.expected.take("local", f"{run}:1") is None
    assert api.ok(api.poll(f"{run}:1")) == {"metrics": {}}


def test_a_promise_of_one_tenant_is_nobody_elses(two: tuple[Api, Api]) -> None:
    ada, bob = two
    run = ada.run()
    ada.ok(ada.optim_step(run, 1))
    assert bob.poll(f"{run}:1").status_code == 404
    assert ada.services.expected.take("ada", f"{run}:1") is not None


def test_whoever_waits_looks_when_the_subscription_was_broken(api: Api, worker: Worker, store: Store) -> None:
    run = api.run()
    api.poll(f"{run}:0")
    api.ok(api.optim_step(run, 1))
    watch = api.services.expected._watches["local", f"{run}:1"][1]
    store.redis.client_kill_filter(_type="pubsub")
    assert threading.Event.wait(watch, 60), "the new subscription wakes all who wait"
    watch.clear()
    worker.step({"optim_step": Outcome(result=b'{"metrics": {}}')})
    assert threading.Event.wait(watch, 60)
    assert api.poll(f"{run}:1").status_code == 200


def test_a_refused_submission_is_not_expected(completions: Completions) -> None:
    def refuse() -> Promise:
        raise ValueError

    waiting = Expected(completions)
    with pytest.raises(ValueError):
        waiting.submit("t", "r", refuse)
    assert waiting.take("t", "r") is None and completions._waiting == {}


def test_only_so_many_are_watched_and_none_for_long(completions: Completions) -> None:
    now = [0.0]
    waiting = Expected(completions, clock=lambda: now[0])
    for number in range(MOST + 1):
        waiting.submit("t", f"r{number}", lambda: Promise(request_id="", is_new=True))
    assert len(completions._waiting) == MOST and waiting.take("t", "r0") is None
    now[0] = KEPT_S
    waiting.submit("t", "another", lambda: Promise(request_id="", is_new=True))
    assert list(completions._waiting) == [b"t another"]
