"""Scopes: every route has one, and a key without it is told which."""

from __future__ import annotations

import dataclasses
import time

import pytest
from flask import Flask

from openrl.app import scopes
from openrl.app.openapi import operations
from openrl.tasks import audit
from openrl.tasks.store import Store
from openrl.tasks.tenants import ADMIN, READ, SAMPLE, TRAIN, Tenants
from tests.app import contract
from tests.app.conftest import MODEL, Api, Worker

ALL = (READ, TRAIN, SAMPLE, ADMIN)


def routes(app: Flask) -> dict[str, tuple[str, str]]:
    """Every route by its name among the scopes: its method, and a path with ids filled in."""
    return {
        scopes.name(method, rule.rule): (method, rule.rule.replace("<", "").replace(">", "").replace("path:", ""))
        for rule in app.url_map.iter_rules()
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})
    }


def with_scopes(api: Api, store: Store, *wanted: str, **options: float) -> Api:
    return dataclasses.replace(api, key=Tenants(store).create_key("ada", scopes=wanted, **options))


def test_every_route_is_written_down_and_nothing_else_is(app: Flask) -> None:
    found = set(routes(app))
    assert found - set(scopes.SCOPES) == set(), "a new route: say in app/scopes.py what a key needs for it"
    assert set(scopes.SCOPES) - found == set(), "no such route: take it out of app/scopes.py"


def test_the_document_says_of_the_same_routes_that_they_need_no_key(app: Flask) -> None:
    opened = {
        (path, method) for path, method, operation in operations(contract.current()) if operation.get("security") == []
    }
    named = {
        (rule.rule.replace("<path:", "<").replace("<", "{").replace(">", "}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if scopes.needed(method, rule.rule) is scopes.OPEN
    }
    assert opened == named


def test_every_scope_that_is_asked_for_exists() -> None:
    assert {scope for needed in scopes.SCOPES.values() for scope in needed or ()} == set(ALL)


def test_a_route_that_is_not_written_down_is_closed_to_researchers() -> None:
    assert scopes.needed("POST", "/api/v1/something_new") == (ADMIN,)
    assert scopes.needed("HEAD", "/api/v1/training_runs/<run_id>") == (READ,)


@pytest.mark.parametrize("scope", ALL)
def test_a_key_reaches_the_routes_of_its_scope_and_is_told_what_the_others_need(
    app: Flask, api: Api, store: Store, scope: str
) -> None:
    mine = with_scopes(api, store, scope)
    for name, (method, path) in routes(app).items():
        needed = scopes.SCOPES[name]
        if name == "DELETE /auth/apikey/me" or needed is scopes.OPEN:
            continue
        answer = mine.client.open(path, method=method, headers={"X-API-Key": mine.key})
        refused = answer.status_code == 403
        assert refused == (bool(needed) and scope not in needed), (name, answer.text)
        if refused:
            assert answer.get_json()["error"]["code"] == "out_of_scope"
            assert all(scope in answer.text for scope in needed), answer.text


def test_a_key_for_training_alone_carries_a_whole_training_loop(api: Api, store: Store, worker: Worker) -> None:
    mine = with_scopes(api, store, TRAIN)
    run = mine.run()
    mine.ok(mine.post("/get_info", {"model_id": run}))
    mine.ok(mine.forward_backward(run, 1))
    mine.ok(mine.optim_step(run, 2))
    worker.step()
    mine.ok(mine.poll(f"{run}:2"))
    assert mine.get("/training_runs").status_code == 403


def test_a_key_for_sampling_alone_carries_a_whole_sampling_loop(api: Api, store: Store) -> None:
    mine = with_scopes(api, store, SAMPLE)
    body = {"session_id": mine.session(), "sampling_session_seq_id": 0, "base_model": MODEL.name}
    sampler = mine.ok(mine.post("/create_sampling_session", body))["sampling_session_id"]
    mine.ok(mine.get(f"/samplers/{sampler}"))
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    sample = {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
    mine.ok(mine.post("/asample", sample))
    assert mine.poll(f"{sampler}:0").status_code == 408
    assert mine.create_model(mine.session()).status_code == 403


def test_an_operation_out_of_scope_uses_nothing_up(api: Api, store: Store, worker: Worker) -> None:
    trains, samples = with_scopes(api, store, TRAIN), with_scopes(api, store, SAMPLE)
    run = trains.run()
    assert samples.optim_step(run, 1).status_code == 403
    trains.ok(trains.optim_step(run, 1))
    assert [done.seq_id for done in worker.step()] == [0, 1]


def test_a_key_for_sampling_alone_cancels_no_training(api: Api, store: Store, worker: Worker) -> None:
    trains, samples = with_scopes(api, store, TRAIN), with_scopes(api, store, SAMPLE)
    run = trains.run()
    worker.step()
    promised = {"request_id": trains.ok(trains.optim_step(run, 1))["request_id"]}
    answer = samples.post("/cancel_future", promised)
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (403, "out_of_scope") and "train" in answer.text
    assert [operation.kind for operation in worker.step()] == ["optim_step"]
    assert trains.ok(trains.post("/cancel_future", promised))["state"] == "finished"


def test_an_expired_key_is_told_so_and_a_made_up_one_is_not(api: Api, store: Store) -> None:
    mine = with_scopes(api, store, READ, expires=time.time() + 0.3)
    assert mine.get("/sessions").status_code == 200
    while mine.get("/sessions").status_code == 200:
        time.sleep(0.05)
    refused = mine.get("/sessions")
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (401, "unauthorized")
    assert "has expired" in refused.get_json()["detail"] and "openrl keys rotate" in refused.text
    unknown = dataclasses.replace(mine, key=mine.key[:-1]).get("/sessions")
    assert unknown.status_code == 401 and "expired" not in unknown.text
    entries = audit.entries(store, "ada", since=0, before=time.time() + 1)
    assert [entry.event for entry in entries] == ["key_created", "login_refused"]
    (stranger,) = audit.entries(store, "", since=0, before=time.time() + 1)
    assert stranger.details["reason"] == "unknown" and mine.key[4:-1] not in repr((entries, stranger))


def test_other_clients_may_send_the_key_as_a_bearer(api: Api, store: Store) -> None:
    key = Tenants(store).create_key("ada")
    assert api.get("/sessions", headers={"Authorization": f"Bearer {key}"}).status_code == 200
    for wrong in (f"Bearer {key}x", key, f"Basic {key}", "Bearer "):
        assert api.get("/sessions", headers={"Authorization": wrong}).status_code == 401
    both = {"Authorization": f"Bearer {key}", "X-API-Key": "tml-wrong"}
    assert api.get("/sessions", headers=both).status_code == 401
