"""Published checkpoints: read by every tenant until they are unpublished, changed by their owner alone."""

from __future__ import annotations

import io
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from werkzeug.test import TestResponse

from openrl.tasks import keys
from openrl.tasks.messages import CreateModel, Sample, decode
from openrl.tasks.ownership import Lease
from openrl.tasks.store import Store
from openrl.workers.weights import layout
from tests.app.conftest import MODEL, Api, Worker

FILES = {"adapter_config.json": b'{"peft_type": "LORA"}', "adapter_model.safetensors": bytes(range(256)) * 700}

SAVES = {
    "weights": ("save_weights", "training"),
    "sampler_weights": ("save_weights_for_sampler", "sampler"),
    "external_weights": ("save_weights_external", "external"),
}
"""How each kind is saved, and what type it has then."""


@dataclass
class Shared:
    """Two tenants, and a run of the first with a checkpoint of each kind."""

    ada: Api
    bob: Api
    run: str
    worker: Worker

    def uri(self, kind: str) -> str:
        return f"tinker://{self.run}/{kind}/ck"

    def publish(self, kind: str, method: str = "POST", api: Api | None = None) -> TestResponse:
        return change(api or self.ada, method, f"/training_runs/{self.run}/checkpoints/{kind}/ck/publish")


def change(api: Api, method: str, path: str, **options: object) -> TestResponse:
    return api.client.open(f"/api/v1{path}", method=method, headers={"X-API-Key": api.key}, **options)


def saved(api: Api, worker: Worker, tenant: str, seq: int, kind: str, run: str, **changes: object) -> Path:
    """Save one checkpoint called `ck`, files included; return its directory."""
    route, type_ = SAVES[kind]
    api.ok(api.post(f"/{route}", {"model_id": run, "path": "ck", "seq_id": seq}))
    directory = layout.copy_dir(tenant, run, f"{kind}/ck", seq)
    worker.step({route: worker.save(tenant, run, "ck", type_, directory=directory, **changes)})
    path = layout.resolve(api.services.store.settings.data_dir, directory)
    path.mkdir(parents=True)
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    return path


@pytest.fixture
def shared(two: tuple[Api, Api], worker: Worker) -> Shared:
    ada, bob = two
    run = ada.ok(ada.create_model(ada.session(), user_metadata={"renderer_name": "role_colon"}))["model_id"]
    for seq, kind in enumerate(("weights", "sampler_weights", "external_weights"), start=1):
        saved(ada, worker, "ada", seq, kind, run)
    return Shared(ada, bob, run, worker)


def attempts(api: Api, run: str, kind: str) -> list[TestResponse]:
    """Everything that another tenant could do to read a checkpoint."""
    uri, where = f"tinker://{run}/{kind}/ck", f"/training_runs/{run}"
    found = [
        api.post("/weights_info", {"tinker_path": uri}),
        api.post("/copy_weights", {"source_path": uri, "destination_project_id": "p"}),
        api.get(f"{where}?access_scope=accessible"),
        api.get(f"{where}/checkpoints"),
        api.get(f"{where}/checkpoints/{kind}/ck/archive"),
    ]
    session = api.session()
    if kind == "weights":
        found.append(
            api.post("/load_weights", {"session_id": session, "model_seq_id": 0, "path": uri, "optimizer": True})
        )
    if kind == "sampler_weights":
        body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": uri}
        found.append(api.post("/create_sampling_session", body))
    if kind == "external_weights":
        found.append(api.get(f"{where}/checkpoints/external_weights/ck/external_weights_urls"))
    return found


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_a_checkpoint_is_read_by_all_while_it_is_published_and_before_and_after_it_is_as_if_it_never_was(
    shared: Shared, kind: str
) -> None:
    unknown = f"s-{'0' * 32}:train:0"

    def hidden() -> None:
        for there, nowhere in zip(
            attempts(shared.bob, shared.run, kind), attempts(shared.bob, unknown, kind), strict=True
        ):
            assert there.status_code == nowhere.status_code == 404
            said, expected = (answer.get_json()["detail"] for answer in (there, nowhere))
            assert said.replace(shared.run, unknown) == expected

    hidden()
    assert shared.publish(kind).status_code == 200
    answers = attempts(shared.bob, shared.run, kind)
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 302, 200][: len(answers)]
    assert shared.publish(kind, "DELETE").status_code == 200
    hidden()


def test_only_what_is_published_of_a_run_is_seen_and_nobody_learns_whose_it_is(shared: Shared) -> None:
    shared.publish("sampler_weights")
    run = shared.bob.ok(shared.bob.get(f"/training_runs/{shared.run}?access_scope=accessible"))
    assert run["user_metadata"] == {"renderer_name": "role_colon"} and run["model_owner"] == ""
    assert run["last_checkpoint"] is None and run["last_sampler_checkpoint"]["checkpoint_id"] == "sampler_weights/ck"
    [listed] = shared.bob.ok(shared.bob.get(f"/training_runs/{shared.run}/checkpoints"))["checkpoints"]
    assert listed["checkpoint_id"] == "sampler_weights/ck" and listed["public"] is True
    mine = shared.ada.ok(shared.ada.get(f"/training_runs/{shared.run}/checkpoints"))["checkpoints"]
    assert {one["checkpoint_id"]: one["public"] for one in mine} == {
        "weights/ck": False, "sampler_weights/ck": True, "external_weights/ck": False,
    }  # fmt: skip
    assert shared.bob.ok(shared.bob.get("/checkpoints"))["checkpoints"] == []
    for kind in ("weights", "external_weights"):
        answer = shared.bob.post("/weights_info", {"tinker_path": shared.uri(kind)})
        assert answer.status_code == 404
    assert shared.bob.post("/get_info", {"model_id": shared.run}).status_code == 404
    assert shared.bob.forward_backward(shared.run, 9).status_code == 404


def test_runs_with_published_checkpoints_are_listed_behind_ones_own_where_that_is_asked_for(
    shared: Shared, worker: Worker
) -> None:
    own = [shared.bob.run() for _ in range(3)]
    shared.publish("weights")

    def runs(query: str) -> tuple[list[str], int]:
        answer = shared.bob.ok(shared.bob.get(f"/training_runs?{query}"))
        return [run["training_run_id"] for run in answer["training_runs"]], answer["cursor"]["total_count"]

    assert runs("access_scope=owned") == (own[::-1], 3)
    assert runs("access_scope=accessible") == ([*own[::-1], shared.run], 4)
    assert runs("access_scope=accessible&limit=2&offset=2") == ([own[0], shared.run], 4)
    assert runs("access_scope=accessible&limit=2&offset=3") == ([shared.run], 4)
    assert runs("access_scope=accessible&offset=4") == ([], 4)
    mine = shared.ada.ok(shared.ada.get("/training_runs?access_scope=accessible"))
    assert [run["training_run_id"] for run in mine["training_runs"]] == [shared.run]


def test_nobody_but_the_owner_changes_a_published_checkpoint(shared: Shared) -> None:
    shared.publish("weights")
    where = f"/training_runs/{shared.run}/checkpoints/weights/ck"
    for answer in (
        shared.publish("weights", api=shared.bob),
        shared.publish("weights", "DELETE", api=shared.bob),
        change(shared.bob, "DELETE", where),
        change(shared.bob, "PUT", f"{where}/ttl", json={"ttl_seconds": 3600}),
        shared.bob.post("/save_weights", {"model_id": shared.run, "path": "ck", "seq_id": 9, "overwrite": True}),
    ):
        assert answer.status_code == 404, answer.text
    [listed] = shared.bob.ok(shared.bob.get(f"/training_runs/{shared.run}/checkpoints"))["checkpoints"]
    assert listed["public"] is True and listed["expires_at"] is None


def test_what_was_made_of_a_published_checkpoint_outlives_its_publication(shared: Shared, store: Store) -> None:
    for kind in ("weights", "sampler_weights"):
        shared.publish(kind)
    session = shared.bob.session()
    sampler = shared.bob.ok(
        shared.bob.post(
            "/create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "model_path": shared.uri("sampler_weights")},
        )
    )["sampling_session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": shared.uri("weights"), "optimizer": False}
    shared.bob.ok(shared.bob.post("/load_weights", load))
    for kind in ("weights", "sampler_weights"):
        shared.publish(kind, "DELETE")
    sample = {
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
        "sampling_session_id": sampler,
        "seq_id": 0,
    }
    shared.bob.ok(shared.bob.post("/asample", sample))
    with Lease(store, "s1", kind="sampler", slug=MODEL.slug) as lease:
        [job] = shared.worker.journal.take_samples(MODEL.slug, lease, limit=9)
    assert isinstance(job.message, Sample)
    assert job.message.adapter_dir == layout.copy_dir("ada", shared.run, "sampler_weights/ck", 2)
    [operation] = shared.worker.step()
    loaded = decode(operation.kind, operation.body)
    assert isinstance(loaded, CreateModel)
    assert loaded.checkpoint_dir == layout.copy_dir("ada", shared.run, "weights/ck", 1)
    assert shared.bob.ok(shared.bob.get(f"/samplers/{sampler}"))["model_path"] == shared.uri("sampler_weights")


def test_links_to_a_published_checkpoint_name_no_tenant_and_end_with_the_publication(shared: Shared) -> None:
    shared.publish("external_weights")
    where = f"/training_runs/{shared.run}/checkpoints/external_weights/ck"
    urls = shared.bob.ok(shared.bob.get(f"{where}/external_weights_urls"))["urls"]
    archive = shared.bob.get(f"{where}/archive").headers["Location"]

    def opened(url: str) -> TestResponse:
        parts = urlsplit(url)
        return shared.bob.client.get(f"{parts.path}?{parts.query}", buffered=True)

    for name, url in urls.items():
        assert urlsplit(url).path.split("/")[4] == "-" and "ada" not in urlsplit(url).path.split("/")
        assert opened(url).data == FILES[name]
        assert opened(url.replace("/exports/-/", "/exports/ada/")).status_code == 403
    with tarfile.open(fileobj=io.BytesIO(opened(archive).data), mode="r:gz") as packed:
        assert packed.extractfile("adapter_model.safetensors").read() == FILES["adapter_model.safetensors"]
    shared.publish("external_weights", "DELETE")
    for url in (*urls.values(), archive):
        assert opened(url).status_code == 404


def test_a_published_checkpoint_that_expires_is_overwritten_or_deleted_is_not_read_any_more(
    shared: Shared, store: Store
) -> None:
    def seen() -> bool:
        found = shared.bob.post("/weights_info", {"tinker_path": shared.uri("weights")}).status_code
        return {200: True, 404: False}[found]

    registry = shared.ada.services.registry
    shared.publish("weights")
    registry.set_expiry("ada", shared.run, "weights/ck", time.time() - 1)
    assert not seen()
    saved(shared.ada, shared.worker, "ada", 4, "weights", shared.run)
    shared.publish("weights")
    assert seen()
    saved(shared.ada, shared.worker, "ada", 5, "weights", shared.run)
    assert not seen(), "the new weights were never published"
    shared.publish("weights")
    assert seen()
    change(shared.ada, "DELETE", f"/training_runs/{shared.run}/checkpoints/weights/ck")
    assert not seen()
    assert store.redis.zcard(keys.PUBLISHED) == 0 and not store.redis.exists(keys.published(shared.run))


def test_publishing_twice_is_fine_and_unknown_checkpoints_are_unknown(shared: Shared) -> None:
    for method in ("POST", "POST", "DELETE", "DELETE"):
        assert shared.publish("weights", method).status_code == 200
        assert shared.publish("weights_of_no_kind", method).status_code == 404
