"""How long results are kept, by settings short enough to see the end of."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from flask import Flask

from openrl.app.context import EXTENSION
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks import keys
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker


@pytest.fixture
def keeping(store: Store, app: Flask, worker: Worker) -> Iterator[Callable[..., tuple[Api, Worker]]]:
    """Make an API and a worker that keep results for so many seconds."""
    made: list[Api] = []

    def make(**seconds: float) -> tuple[Api, Worker]:
        other = Store(store.redis, replace(store.settings, **seconds))
        flask = create_app(AppSettings(poll_min_s=0.05, poll_max_s=0.1), store=other)
        made.append(Api(flask.test_client(), flask.extensions[EXTENSION]))
        return made[-1], Worker(other, worker.lease)

    yield make
    for each in made:
        each.services.close()


def until_gone(api: Api, request_id: str) -> None:
    while (answer := api.poll(request_id)).status_code == 200:
        time.sleep(0.02)
    assert answer.status_code == 410, answer.text


def test_a_delivered_result_is_gone_after_its_time_and_one_that_nobody_fetched_stays(
    keeping: Callable[..., tuple[Api, Worker]],
) -> None:
    api, worker = keeping(result_ttl_s=0.2)
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    worker.step()
    until_gone(api, f"{run}:0")
    api.ok(api.poll(f"{run}:1"))
    assert api.poll(f"{run}:2").status_code == 404


def test_a_result_that_nobody_fetched_is_gone_after_its_own_time(
    keeping: Callable[..., tuple[Api, Worker]], store: Store
) -> None:
    api, worker = keeping(undelivered_ttl_s=0.2)
    run = api.run()
    worker.step()
    while store.redis.exists(keys.future("local", f"{run}:0")):  # a poll would be a delivery
        time.sleep(0.02)
    assert api.poll(f"{run}:0").status_code == 410
