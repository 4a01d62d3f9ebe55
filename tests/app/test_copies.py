"""Copies: made once, on disk before they are answered, of what one may read, and living on their own."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.scheduler.sweep import sweep_dropped
from openrl.tasks import audit, keys
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.messages import CreateModel, decode
from openrl.tasks.tenants import SAMPLE, Tenants
from openrl.workers.weights import layout
from tests.app.conftest import Api
from tests.app.test_publishing import FILES, Shared, change, saved, shared  # noqa: F401

EXTERNAL = "external_weights/ck"


def copy(api: Api, source: str, **options: object) -> dict:
    headers = options.pop("headers", {})
    body = {"source_path": source, "destination_project_id": "archive"} | options
    return api.ok(api.post("/copy_weights", body, headers=headers))


def where(api: Api, uri: str, tenant: str) -> Path:
    run_id, checkpoint_id = api.services.registry.parts(uri)
    found = api.services.registry.checkpoint(tenant, run_id, checkpoint_id)
    return layout.existing(api.services.store.settings.data_dir, found.directory)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_copy_has_the_same_files_in_a_run_of_its_own_in_the_project(shared: Shared, kind: str) -> None:  # noqa: F811
    ada = shared.ada
    uri = copy(ada, shared.uri(kind), ttl_seconds=7200)["tinker_path"]
    assert uri.endswith(f"/{kind}/ck") and shared.run not in uri
    run_id, _ = ada.services.registry.parts(uri)
    [listed] = ada.ok(ada.get(f"/training_runs/{run_id}/checkpoints"))["checkpoints"]
    assert listed["tinker_path"] == uri and listed["expires_at"] is not None and listed["public"] is False
    session = ada.services.registry.session("ada", run_id.partition(":")[0])
    assert session.project_id == "archive" and session.finished
    source, copied = where(ada, shared.uri(kind), "ada"), where(ada, uri, "ada")
    for name, content in FILES.items():
        assert (copied / name).read_bytes() == content
        assert os.stat(copied / name).st_ino == os.stat(source / name).st_ino, "no byte is stored twice"


def test_a_copy_of_a_full_runs_checkpoint_is_filed_under_the_base_model_not_under_anothers_pool(
    shared: Shared,  # noqa: F811
) -> None:
    ada, run = shared.ada, shared.run
    registry, redis = ada.services.registry, ada.services.store.redis
    base = registry.run("ada", run).slug
    row, pool = json.loads(redis.hget(keys.run("ada", run), "record")), keys.pool_slug(base, "ada", run)
    fields = {"record": json.dumps(row | {"slug": pool, "fine_tuning": "full"}), "slug": pool}
    redis.hset(keys.run("ada", run), mapping=fields)
    copied, _ = registry.parts(copy(ada, shared.uri("weights"))["tinker_path"])
    assert registry.run("ada", run).slug == pool
    assert (registry.run("ada", copied).slug, redis.hget(keys.run("ada", copied), "slug")) == (base, base.encode())


def test_a_copy_stays_when_its_source_is_deleted(shared: Shared) -> None:  # noqa: F811
    uri = copy(shared.ada, shared.uri("external_weights"))["tinker_path"]
    source = where(shared.ada, shared.uri("external_weights"), "ada")
    change(shared.ada, "DELETE", f"/training_runs/{shared.run}/checkpoints/external_weights/ck")
    assert not source.exists()
    copied = where(shared.ada, uri, "ada")
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == FILES


def test_a_copy_can_be_loaded_and_its_run_not_be_trained(shared: Shared) -> None:  # noqa: F811
    ada = shared.ada
    uri = copy(ada, shared.uri("weights"))["tinker_path"]
    run_id, _ = ada.services.registry.parts(uri)
    for answer in (ada.forward_backward(run_id, 1), ada.optim_step(run_id, 1)):
        assert answer.status_code == 422 and uri.partition("/weights")[0].removeprefix("tinker://") in answer.text
    assert ada.post("/save_weights", {"model_id": run_id, "path": "x", "seq_id": 1}).status_code == 422
    load = {"session_id": ada.session(), "model_seq_id": 0, "path": uri, "optimizer": True}
    ada.ok(ada.post("/load_weights", load))
    *refused, operation = shared.worker.step()
    assert {each.kind for each in refused} == {"refused"}
    message = decode(operation.kind, operation.body)
    assert isinstance(message, CreateModel)
    assert layout.existing(ada.services.store.settings.data_dir, message.checkpoint_dir) == where(ada, uri, "ada")


def test_the_same_key_gives_the_same_copy_and_another_key_or_content_does_not(shared: Shared) -> None:  # noqa: F811
    ada, source = shared.ada, shared.uri("weights")
    first = copy(ada, source, headers={"X-Idempotency-Key": "k1"})
    assert copy(ada, source, headers={"X-Idempotency-Key": "k1"}) == first
    assert copy(ada, source, headers={"X-Idempotency-Key": "k2"}) != first
    assert copy(ada, source) != copy(ada, source)
    body = {"source_path": source, "destination_project_id": "other"}
    assert ada.post("/copy_weights", body, headers={"X-Idempotency-Key": "k1"}).status_code == 422
    change(ada, "DELETE", f"/training_runs/{shared.run}/checkpoints/weights/ck")
    assert copy(ada, source, headers={"X-Idempotency-Key": "k1"}) == first, "also when the source is gone by now"
    homes = list(layout.resolve(ada.services.store.settings.data_dir, "tenants/ada/runs").iterdir())
    assert len(homes) == 5, "the run, and one for each of four copies"


def test_a_copy_may_be_a_sessions_next_run_and_that_number_is_used_up(shared: Shared) -> None:  # noqa: F811
    ada, session = shared.ada, shared.ada.session()
    place = {"session_id": session, "model_seq_id": 3, "destination_project_id": None}
    first = copy(ada, shared.uri("weights"), **place)
    assert first == {"tinker_path": f"tinker://{session}:train:3/weights/ck"}
    assert copy(ada, shared.uri("weights"), **place) == first
    assert ada.create_model(session, 3).status_code == 422
    assert ada.post("/copy_weights", {"source_path": shared.uri("sampler_weights"), **place}).status_code == 422
    busy = {"session_id": shared.run.partition(":")[0], "model_seq_id": 0}
    assert ada.post("/copy_weights", {"source_path": shared.uri("weights"), **busy}).status_code == 422
    [version] = where(ada, first["tinker_path"], "ada").parent.iterdir()
    assert version.is_dir()


def test_a_bad_copy_is_refused_by_name_and_leaves_nothing(shared: Shared) -> None:  # noqa: F811
    ada, body = shared.ada, {"source_path": shared.uri("weights"), "destination_project_id": "p"}
    before = sorted(ada.services.store.settings.data_dir.rglob("*"))
    for changes, status, word in (
        ({"destination_project_id": None}, 422, "destination_project_id"),
        ({"session_id": "s-x"}, 422, "model_seq_id"),
        ({"destination_project_id": None, "session_id": "s-x", "model_seq_id": 0}, 404, "s-x"),
        ({"destination_project_id": None, "model_seq_id": 0}, 422, "session_id"),
        ({"source_path": "weights/ck"}, 422, "weights/ck"),
        ({"ttl_seconds": 60}, 422, "ttl_seconds"),
        ({"name": "x"}, 422, "name"),
    ):
        answer = ada.post("/copy_weights", body | changes)
        assert (answer.status_code, word in answer.get_json()["detail"]) == (status, True), answer.text
    assert sorted(ada.services.store.settings.data_dir.rglob("*")) == before
    assert len(ada.ok(ada.get("/training_runs"))["training_runs"]) == 1


def test_the_key_of_the_owner_lets_another_tenant_copy_and_load(shared: Shared) -> None:  # noqa: F811
    bob, token = shared.bob, shared.ada.key
    uri = copy(bob, shared.uri("weights"), headers={"X-Tinker-Weights-Access-Token": token})["tinker_path"]
    assert where(bob, uri, "bob").is_dir()
    copy(bob, shared.uri("sampler_weights"), weights_access_token=token)
    body = {"session_id": bob.session(), "model_seq_id": 0, "path": shared.uri("weights"), "optimizer": False}
    assert bob.post("/load_weights", body).status_code == 404
    bob.ok(bob.post("/load_weights", body | {"weights_access_token": token}))
    [operation] = shared.worker.step()
    assert (operation.kind, operation.tenant) == ("create_model", "bob")
    assert token.encode() not in operation.body
    assert shared.bob.post("/weights_info", {"tinker_path": shared.uri("weights")}).status_code == 404


def test_a_key_that_is_unknown_revoked_or_may_not_read_opens_nothing(shared: Shared) -> None:  # noqa: F811
    bob, tenants = shared.bob, Tenants(shared.ada.services.store)
    only_samples = tenants.create_key("ada", scopes=(SAMPLE,))
    body = {"source_path": shared.uri("weights"), "destination_project_id": "p"}
    for token in ("tml-no", only_samples, bob.key + "x"):
        answer = bob.post("/copy_weights", body, headers={"X-Tinker-Weights-Access-Token": token})
        assert answer.status_code == 403 and token not in answer.text
    own = bob.post("/copy_weights", body, headers={"X-Tinker-Weights-Access-Token": bob.key})
    assert own.status_code == 404
    both = bob.post(
        "/copy_weights", body | {"weights_access_token": "a"}, headers={"X-Tinker-Weights-Access-Token": "b"}
    )
    assert both.status_code == 422


def test_the_sdk_copies_publishes_and_reads_through_its_types(shared: Shared) -> None:  # noqa: F811
    from tinker.types import CopyWeightsResponse, TrainingRunsResponse

    read = CopyWeightsResponse.model_validate(copy(shared.ada, shared.uri("weights")))
    assert read.tinker_path.startswith("tinker://s-")
    shared.publish("weights")
    runs = TrainingRunsResponse.model_validate(shared.bob.ok(shared.bob.get("/training_runs?access_scope=accessible")))
    assert [run.training_run_id for run in runs.training_runs] == [shared.run]


def test_a_copy_that_is_cut_off_before_its_row_is_swept_and_one_with_its_row_is_not(shared: Shared) -> None:  # noqa: F811
    store, registry = shared.ada.services.store, shared.ada.services.registry
    kept = where(shared.ada, copy(shared.ada, shared.uri("weights"))["tinker_path"], "ada")
    lost = layout.copy_dir("ada", f"s-{'1' * 32}:train:0", "weights/ck", 5)
    registry.announce_copy(lost)
    layout.link(where(shared.ada, shared.uri("weights"), "ada"), layout.resolve(store.settings.data_dir, lost))
    assert sweep_dropped(store) == 0
    assert sweep_dropped(store, grace_s=-1) == 1
    assert not layout.resolve(store.settings.data_dir, lost).exists()
    assert kept.is_dir() and where(shared.ada, shared.uri("weights"), "ada").is_dir()


def test_a_copy_that_was_registered_before_the_store_went_away_keeps_its_files(
    shared: Shared,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ada, store = shared.ada, shared.ada.services.store
    script, source, key = store.script("copy"), shared.uri("weights"), {"X-Idempotency-Key": "k"}

    def away_with_the_answer(*args: object) -> object:
        answer = script(*args)
        if answer[0] == b"NEW":
            raise StoreUnavailable("the store does not answer")
        return answer

    with monkeypatch.context() as patched:
        patched.setitem(store._scripts, "copy", away_with_the_answer)
        body = {"source_path": source, "destination_project_id": "archive"}
        assert ada.post("/copy_weights", body, headers=key).status_code == 503
    copied = where(ada, copy(ada, source, headers=key)["tinker_path"], "ada")
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == FILES


def test_of_two_copies_under_one_key_at_once_one_is_made_and_noted(
    shared: Shared,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ada, store, first = shared.ada, shared.ada.services.store, []
    script, source, key = store.script("copy"), shared.uri("weights"), {"X-Idempotency-Key": "k"}

    def overtaken(*args: str) -> object:
        row = args[7]
        if row and not first:
            first.append("begun")
            first.append(copy(replace(ada, client=ada.client.application.test_client()), source, headers=key))
        return script(*args)

    monkeypatch.setitem(store._scripts, "copy", overtaken)
    assert copy(ada, source, headers=key) == first[1]
    noted = [entry for entry in audit.entries(store, "ada", since=0, before=2e9) if entry.event == "checkpoint_copied"]
    assert [entry.details["tinker_path"] for entry in noted] == [first[1]["tinker_path"]]
    assert where(ada, first[1]["tinker_path"], "ada").is_dir()
    assert len(list(layout.resolve(store.settings.data_dir, "tenants/ada/runs").glob("*/weights/ck.*"))) == 2


def test_a_copy_of_what_is_deleted_meanwhile_is_whole_or_not_there(shared: Shared) -> None:  # noqa: F811
    ada, data_dir, answers = shared.ada, shared.ada.services.store.settings.data_dir, []
    body = {"source_path": shared.uri("external_weights"), "destination_project_id": "p"}
    pauses = iter(number / 500 for number in range(20))

    def delete(api: Api) -> None:
        time.sleep(next(pauses))
        answers.append(change(api, "DELETE", f"/training_runs/{shared.run}/checkpoints/{EXTERNAL}").status_code)

    def take(api: Api) -> None:
        answers.append(api.post("/copy_weights", body).status_code)

    for seq in range(4, 24):
        directory = saved(ada, shared.worker, "ada", seq, "external_weights", shared.run)
        threads = [
            threading.Thread(target=deed, args=(replace(ada, client=ada.client.application.test_client()),))
            for deed in random.Random(seq).sample([delete, take], 2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not directory.exists()
    assert len(answers) == 40 and set(answers) <= {200, 404}
    copies = [one for one in ada.ok(ada.get("/checkpoints"))["checkpoints"] if one["checkpoint_id"] == EXTERNAL]
    assert len(copies) == answers.count(200) - 20
    for one in copies:
        found = where(ada, one["tinker_path"], "ada")
        assert {path.name: path.read_bytes() for path in found.iterdir()} == FILES
    assert len(list(data_dir.glob("tenants/ada/runs/*/external_weights/ck.*"))) == len(copies) + 1, "and the first one"
