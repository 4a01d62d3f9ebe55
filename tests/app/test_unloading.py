"""Unloading, as old SDKs ask for it: a promise that is kept once nobody has the run in memory."""

from __future__ import annotations

from openrl.tasks import keys
from openrl.tasks.store import Store
from tests.app.conftest import MODEL, Api, Worker


def test_a_run_that_nobody_has_in_memory_is_unloaded_at_once(api: Api) -> None:
    run = api.run()
    promise = api.ok(api.post("/unload_model", {"model_id": run, "type": "unload_model"}))
    assert promise["model_id"] == run
    assert api.ok(api.poll(promise["request_id"])) == {"type": "unload_model", "model_id": run}


def test_a_run_that_a_worker_has_is_unloaded_when_it_says_so(api: Api, worker: Worker) -> None:
    run = api.run()
    worker.step()
    promises = [api.ok(api.post("/unload_model", {"model_id": run}))["request_id"] for _ in range(2)]
    assert api.poll(promises[0]).status_code == 408
    asked = worker.journal.unloads(MODEL.slug)
    assert {each.request_id for each in asked} == set(promises)
    assert worker.journal.unloaded(MODEL.slug) == 0, "its owner lives and has it"
    assert worker.journal.unloaded(MODEL.slug, worker.lease, asked) == 2
    for promise in promises:
        assert api.ok(api.poll(promise))["type"] == "unload_model"
    assert worker.journal.unloads(MODEL.slug) == []
    api.ok(api.optim_step(run, 1))
    assert [operation.kind for operation in worker.step()] == ["optim_step"]


def test_a_promise_to_unload_is_kept_when_the_owner_dies(api: Api, worker: Worker, store: Store) -> None:
    run = api.run()
    worker.step()
    promise = api.ok(api.post("/unload_model", {"model_id": run}))["request_id"]
    store.redis.delete(keys.worker(worker.lease.worker_id))
    assert worker.journal.unloaded(MODEL.slug) == 1
    assert api.ok(api.poll(promise))["model_id"] == run


def test_a_run_of_nobody_or_of_somebody_else_is_unknown(two: tuple[Api, Api]) -> None:
    ada, bob = two
    run = ada.run()
    for other in (run, f"s-{'0' * 32}:train:0", "x"):
        assert bob.post("/unload_model", {"model_id": other}).status_code == 404
    assert bob.post("/unload_model", {"model_id": run, "seq_id": 1}).status_code == 422
