"""Another tenant's things don't exist, on any route: same status, same text, same work, and nothing of them changes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

from openrl.app.context import EXTENSION
from openrl.app.scopes import SCOPES, name
from openrl.tasks.store import Store
from openrl.tasks.tenants import SCOPES as ALL_SCOPES
from tests.app import walk
from tests.app.conftest import Api

NOBODYS = {b"openrl:signing", b"openrl:key-ids"}
"""What an installation draws for itself when it is first needed; and all keys by their ids, without their tenants."""


def test_every_route_has_its_row(app: Flask) -> None:
    routes = {
        name(method, rule.rule) for rule in app.url_map.iter_rules() for method in (rule.methods or set()) - {"OPTIONS"}
    }
    assert routes == walk.ROWS.keys() == SCOPES.keys()


def held(store: Store, *, without: str) -> dict[bytes, Any]:
    """Return all that the store holds and when it ends, but what is of one tenant, also where it is among others'."""
    own, asks = f"openrl:t:{without}:".encode(), without.encode()
    found = {}
    for key in sorted(key for key in store.redis.scan_iter(count=1000) if not key.startswith(own)):
        parts = _READ[store.redis.type(key)](store.redis, key)
        found[key] = [part for part in parts if asks not in repr(part).encode()], store.redis.pexpiretime(key)
    return {key: row for key, row in found.items() if row[0]}


_READ: dict[bytes, Any] = {
    b"string": lambda redis, key: [redis.get(key)],
    b"hash": lambda redis, key: sorted(redis.hgetall(key).items()),
    b"set": lambda redis, key: sorted(redis.smembers(key)),
    b"zset": lambda redis, key: redis.zrange(key, 0, -1, withscores=True),
    b"list": lambda redis, key: redis.lrange(key, 0, -1),
    b"stream": lambda redis, key: redis.xrange(key),
}


def files(directory: Path) -> dict[Path, tuple[int, int]]:
    return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(directory.rglob("*"))}


def commands(store: Store) -> Counter[str]:
    """Return how often each command was carried out, those inside of scripts too."""
    asked = store.redis.info("commandstats")
    return Counter({name: row["calls"] for name, row in asked.items() if name not in ("cmdstat_info",)})


def told(answer: Any, its: walk.Things) -> tuple[int, str, dict[str, str]]:
    """Return status, text and headers, without what differs between any two answers: ids asked about, and its own."""
    text = answer.text.replace(its.session, "THE-SESSION")
    if answer.is_json:
        said = json.loads(text)
        for part in (said.get("error"), said):
            if isinstance(part, dict):
                part.pop("request_id", None)
        text = json.dumps(said)
    headers = {key: value for key, value in answer.headers.items() if key.lower() not in ("x-request-id", "date")}
    return answer.status_code, text, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Ada has one of each; Bob, who asks, has a session and a run. No worker writes to the store any more."""

    ada: Api
    bob: Api
    its: walk.Things
    mine: walk.Mine
    store: Store


@pytest.fixture(scope="module")
def world(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for all routes: none of them harms it, or the next one's test fails too."""
    with walk.serving(store_url, tmp_path_factory.mktemp("data")) as (app, store):
        services = app.extensions[EXTENSION]
        ada, bob = (
            Api(app.test_client(), services, services.tenants.create_key(tenant, scopes=ALL_SCOPES))
            for tenant in ("ada", "bob")
        )
        with walk.working(store) as worker:
            its = walk.furnished(ada, worker, "ada")
            run = bob.run()
            worker.step()
        yield World(ada=ada, bob=bob, its=its, mine=walk.Mine(session=run.partition(":")[0], run=run), store=store)


@pytest.mark.parametrize("route", [route for route, row in walk.ROWS.items() if row is not walk.nothing])
def test_a_foreign_id_is_answered_as_one_that_never_was(world: World, route: str) -> None:
    row, nobodys = walk.ROWS[route], walk.Things()
    for ask in row(nobodys, world.mine):  # what is looked up once a process, is
        walk.send(world.bob, route, ask)
    before, on_disk = held(world.store, without="bob"), files(world.store.settings.data_dir)
    for made_up, foreign in zip(row(nobodys, world.mine), row(world.its, world.mine), strict=True):
        answers, work = [], []
        for ask, things in ((made_up, nobodys), (foreign, world.its)):
            start = commands(world.store)
            answers.append(told(walk.send(world.bob, route, ask), things))
            work.append(commands(world.store) - start)
        assert answers[0] == answers[1]
        assert answers[1][0] == foreign.status, answers[1]
        assert work[0] == work[1]
    assert held(world.store, without="bob") == before
    assert files(world.store.settings.data_dir) == on_disk


@pytest.mark.parametrize("route", [route for route, row in walk.ROWS.items() if row is walk.nothing])
def test_a_route_that_names_nothing_shows_nothing_of_another_tenant(world: World, route: str) -> None:
    bob = replace(world.bob, key=world.bob.services.tenants.create_key("bob", scopes=ALL_SCOPES))
    before = held(world.store, without="bob")
    answer = walk.send(bob, route, walk.Ask(path=_path(route), json=None if route.startswith("GET") else {}))
    assert answer.status_code == 200, answer.text
    for word in (world.its.session, "of-ada", '"ada"'):
        assert word not in answer.text
    after = held(world.store, without="bob")
    assert {key for key in before | after if before.get(key) != after.get(key)} <= NOBODYS


def _path(route: str) -> str:
    hours = "?starting_on=2020-01-01T00:00:00Z&ending_before=2020-01-02T00:00:00Z"
    return route.partition(" ")[2] + (hours if route.endswith("/usage/events") else "")


def test_ada_goes_on_after_all_of_it(world: World) -> None:
    ada, its = world.ada, world.its
    for route, row in walk.ROWS.items():
        for ask in row(its, world.mine):
            walk.send(world.bob, route, ask)
    ada.ok(ada.post("/session_heartbeat", {"session_id": its.session}))
    assert ada.ok(ada.post("/weights_info", {"tinker_path": its.uri()}))["lora_rank"] == 8
    assert ada.poll(f"{its.run}:1").status_code == 200
    assert ada.poll(f"{its.sampler}:0").status_code == 408
    ada.ok(ada.forward_backward(its.run, 5))
