"""What a process of the API goes by for a moment: keys, runs, base models. Every other test of it asks each time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openrl.app.context import EXTENSION
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks import keys
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from tests.app.conftest import MODEL, Api, Worker


def opened(store: Store, **settings: Any) -> Iterator[Api]:
    Registry(store).add_model(MODEL)
    app = create_app(AppSettings(poll_min_s=0.05, poll_max_s=0.1, **settings), store=store)
    yield Api(app.test_client(), app.extensions[EXTENSION])
    app.extensions[EXTENSION].close()


@pytest.fixture
def api(store: Store) -> Iterator[Api]:
    """The API as it is by default."""
    yield from opened(store)


@pytest.fixture
def lasting(store: Store) -> Iterator[Api]:
    """One that remembers for longer than a test takes."""
    yield from opened(store, remember_s=10.0)


def eventually(true: Callable[[], bool]) -> bool:
    """Wait for it, for less than `lasting` remembers."""
    deadline = time.monotonic() + 8
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


def test_a_key_that_another_process_revokes_is_refused_within_the_time(api: Api, store: Store) -> None:
    mine = dataclasses.replace(api, key=Tenants(store).create_key("ada"))
    token = dataclasses.replace(api, key=mine.ok(mine.post("/auth/token"))["jwt"])
    for each in (mine, token):
        each.ok(each.get("/sessions"))
    Tenants(store).revoke_key(Tenants(store).list_keys()[0].key_id)
    for each in (mine, token):
        assert eventually(lambda each=each: each.get("/sessions").status_code == 401)


def test_whoever_was_served_without_a_key_is_refused_within_the_time_after_the_first_one(
    api: Api, store: Store
) -> None:
    api.ok(api.get("/sessions"))
    Tenants(store).create_key("ada")
    assert eventually(lambda: api.get("/sessions").status_code == 401)


def test_a_new_key_is_its_tenants_from_its_first_moment(lasting: Api, store: Store) -> None:
    session = lasting.session()
    ada = dataclasses.replace(lasting, key=Tenants(store).create_key("ada"))
    assert ada.ok(ada.get("/sessions"))["sessions"] == []
    assert ada.get(f"/sessions/{session}").status_code == 404


def test_a_key_that_revokes_itself_is_refused_at_once(lasting: Api, store: Store) -> None:
    mine = dataclasses.replace(lasting, key=Tenants(store).create_key("ada"))
    mine.ok(mine.get("/sessions"))
    assert mine.client.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": mine.key}).status_code == 200
    assert mine.get("/sessions").status_code == 401


def test_a_key_that_is_remembered_ends_when_it_expires(lasting: Api, store: Store) -> None:
    mine = dataclasses.replace(lasting, key=Tenants(store).create_key("ada", expires=time.time() + 1.5))
    assert mine.get("/sessions").status_code == 200
    assert eventually(lambda: mine.get("/sessions").status_code == 401)
    assert "expired" in mine.get("/sessions").get_json()["detail"]


def test_no_secret_is_remembered(lasting: Api, store: Store) -> None:
    mine = dataclasses.replace(lasting, key=Tenants(store).create_key("ada"))
    mine.ok(mine.get("/sessions"))
    assert lasting.services.known_keys._known
    assert mine.key not in repr(lasting.services.known_keys._known)


def test_a_run_that_one_tenant_has_just_used_is_nobody_elses(lasting: Api, store: Store) -> None:
    ada, bob = (dataclasses.replace(lasting, key=Tenants(store).create_key(name)) for name in ("ada", "bob"))
    run = ada.run()
    ada.ok(ada.optim_step(run, 1))
    for refused in (bob.optim_step(run, 1), bob.forward_backward(run, 1), bob.post("/get_info", {"model_id": run})):
        assert refused.status_code == 404
    ada.ok(ada.optim_step(run, 2))


def test_a_run_that_is_gone_takes_nothing_in_though_it_is_remembered(lasting: Api, store: Store) -> None:
    run = lasting.run()
    lasting.ok(lasting.optim_step(run, 1))
    store.redis.delete(keys.run("local", run))
    assert lasting.optim_step(run, 2).status_code == 404


def test_a_base_model_that_is_taken_away_is_refused_within_the_time(api: Api, store: Store, worker: Worker) -> None:
    run = api.run()
    api.ok(api.optim_step(run, 1))
    Registry(store).remove_models()
    assert eventually(lambda: api.post("/get_info", {"model_id": run}).status_code == 503)
    assert api.optim_step(run, 2).status_code == 503
    assert [done.seq_id for done in worker.step()] == [0, 1]


def test_a_hot_loop_asks_the_store_for_no_key_no_run_and_no_model(lasting: Api, store: Store) -> None:
    run = lasting.run()
    lasting.ok(lasting.optim_step(run, 1))

    def calls(command: str) -> int:
        return int(store.redis.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

    before = [calls(command) for command in ("exists", "evalsha")]
    for seq in range(2, 12):
        lasting.ok(lasting.optim_step(run, seq))
    asked, submitted = (calls(c) - b for c, b in zip(("exists", "evalsha"), before, strict=True))
    assert (asked, submitted) == (0, 10)
