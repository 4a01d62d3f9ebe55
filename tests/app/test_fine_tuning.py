"""A run of full fine-tuning: how it is asked for, what is refused, and that every answer says what it is."""

from __future__ import annotations

from typing import Any

import pytest

from openrl.tasks import keys
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from tests.app.conftest import MODEL, Api, Worker
from tests.app.test_refusals import refused

FULL = {"openrl.fine_tuning_type": "full"}
LORA = {"openrl.fine_tuning_type": "lora"}
DIGEST = "ab" * 32


def opened(api: Api, **changes: Any) -> str:
    return str(api.ok(api.post("/create_session", {"tags": [], "sdk_version": "0.38.0", **changes}))["session_id"])


@pytest.fixture
def run(api: Api, worker: Worker) -> str:
    """A full run that was created."""
    found = str(api.ok(api.create_model(api.session(), user_metadata=FULL))["model_id"])
    worker.step(pool=keys.pool_slug(MODEL.slug, "local", found))
    return found


@pytest.mark.parametrize(
    ("session", "changes"),
    [
        ({}, {"lora_config": None}),
        ({}, {"user_metadata": FULL}),
        ({"tags": ["x", "openrl.fine_tuning_type=full"]}, {}),
        ({"user_metadata": FULL}, {}),
        ({"tags": ["openrl.fine_tuning_type=full"]}, {"lora_config": None, "user_metadata": FULL}),
    ],
    ids=["no lora_config", "metadata", "tag", "metadata of the session", "all"],
)
def test_a_full_run_waits_in_a_pool_of_its_own_however_it_was_asked_for(
    api: Api, worker: Worker, session: dict[str, Any], changes: dict[str, Any]
) -> None:
    run = str(api.ok(api.create_model(opened(api, **session), **changes))["model_id"])
    assert worker.step() == []
    pool = keys.pool_slug(MODEL.slug, "local", run)
    assert [operation.kind for operation in worker.step(pool=pool)] == ["create_model"]
    api.ok(api.forward_backward(run, 1))
    assert [operation.kind for operation in worker.step(pool=pool)] == ["forward_backward"]


def test_the_same_run_is_the_same_promise_however_often_it_is_asked_for(api: Api) -> None:
    session = api.session()
    answers = [api.ok(api.create_model(session, user_metadata=FULL)) for _ in range(2)]
    assert answers[0] == answers[1]
    refused(api.create_model(session), 422, "different operation")


@pytest.mark.parametrize(
    ("session", "changes", "words"),
    [
        ({"tags": ["openrl.fine_tuning_type=full"]}, {"user_metadata": LORA}, ["is lora", "session asks for full"]),
        ({"user_metadata": LORA}, {"user_metadata": FULL}, ["is full", "session asks for lora"]),
        ({"tags": ["openrl.fine_tuning_type=lora"]}, {"lora_config": None}, ["lora_config is absent"]),
    ],
)
def test_what_contradicts_itself_is_refused_and_uses_nothing_up(
    api: Api, session: dict[str, Any], changes: dict[str, Any], words: list[str]
) -> None:
    opened_session = opened(api, **session)
    refused(api.create_model(opened_session, **changes), 422, *words)
    assert api.ok(api.get("/training_runs"))["training_runs"] == []


@pytest.mark.parametrize(
    ("session", "words"),
    [
        ({"tags": ["openrl.fine_tuning_typ=full"]}, ["tags", "openrl.fine_tuning_typ=full", "openrl.fine_tuning_type"]),
        ({"tags": ["openrl.fine_tuning_type=most"]}, ["tags", "'most'", "lora, full"]),
        ({"tags": ["openrl.fine_tuning_type=full", "openrl.fine_tuning_type=lora"]}, ["asks for both"]),
        ({"user_metadata": {"openrl.x": 1}}, ["openrl.x", "openrl.fine_tuning_type"]),
    ],
)
def test_a_session_that_asks_for_what_there_is_not_is_refused(
    api: Api, session: dict[str, Any], words: list[str]
) -> None:
    refused(api.post("/create_session", {"tags": [], "sdk_version": "0.38.0", **session}), 422, *words)


def test_every_answer_says_that_it_is_no_adapter(api: Api, worker: Worker, run: str) -> None:
    info = api.ok(api.post("/get_info", {"model_id": run}))
    assert info["is_lora"] is False and "lora_rank" not in info
    pool = keys.pool_slug(MODEL.slug, "local", run)
    api.ok(api.post("/save_weights", {"model_id": run, "seq_id": 1, "path": "a"}))
    worker.step({"save_weights": worker.save("local", run, "a", rank=0, fine_tuning="full")}, pool=pool)
    listed = api.ok(api.get(f"/training_runs/{run}"))
    assert listed["is_lora"] is False and "lora_rank" not in listed
    assert listed["last_checkpoint"]["checkpoint_type"] == "training"
    weights = api.ok(api.post("/weights_info", {"tinker_path": f"tinker://{run}/weights/a"}))
    assert weights["is_lora"] is False and "lora_rank" not in weights
    assert weights["train_attn"] and weights["train_mlp"] and weights["train_unembed"]


def test_a_checkpoint_goes_into_a_run_of_its_own_kind_alone(api: Api, worker: Worker, run: str) -> None:
    adapter = api.run()
    worker.step()
    for each, changes in ((run, {"rank": 0, "fine_tuning": "full"}), (adapter, {})):
        pool = keys.pool_slug(MODEL.slug, "local", run) if each == run else MODEL.slug
        api.ok(api.post("/save_weights", {"model_id": each, "seq_id": 1, "path": "a"}))
        worker.step({"save_weights": worker.save("local", each, "a", **changes)}, pool=pool)

    def load(onto: str, of: str) -> Any:
        body = {"model_id": onto, "seq_id": 2, "path": f"tinker://{of}/weights/a", "optimizer": True}
        return api.post("/load_weights", body)

    refused(load(run, adapter), 422, "the checkpoint is of lora fine-tuning, the run of full")
    refused(load(adapter, run), 422, "the checkpoint is of full fine-tuning, the run of lora")
    into = {"session_id": api.session(), "model_seq_id": 0, "path": f"tinker://{run}/weights/a", "optimizer": True}
    refused(api.post("/load_weights", {**into, "user_metadata": LORA}), 422, "checkpoint is of full fine-tuning")
    made = str(api.ok(api.post("/load_weights", into))["model_id"])
    assert [one.kind for one in worker.step(pool=keys.pool_slug(MODEL.slug, "local", made))] == ["create_model"]


def test_a_version_is_sampled_in_its_runs_pool_and_a_delta_is_neither_copied_nor_exported(
    api: Api, worker: Worker, run: str, store: Store
) -> None:
    pool = keys.pool_slug(MODEL.slug, "local", run)
    api.ok(api.post("/save_weights_for_sampler", {"model_id": run, "seq_id": 1, "path": "a"}))
    changes = {"rank": 0, "fine_tuning": "full", "weights_digest": DIGEST}
    worker.step({"save_weights_for_sampler": worker.save("local", run, "a", "sampler", **changes)}, pool=pool)
    uri, session = f"tinker://{run}/sampler_weights/a", api.session()
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": uri}
    made = api.ok(api.post("/create_sampling_session", body))["sampling_session_id"]
    sampler = Registry(store).sampler("local", made)
    assert (sampler.slug, sampler.weights_digest) == (pool, DIGEST)
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    asked = {"sampling_session_id": made, "seq_id": 0, "prompt": prompt, "num_samples": 1, "sampling_params": {}}
    api.ok(api.post("/asample", asked))
    [job] = worker.journal.take_samples(pool, worker.lease, limit=5)
    assert job.message.weights_digest == DIGEST and job.message.adapter_dir == sampler.adapter_dir
    refused(
        api.post("/copy_weights", {"source_path": uri, "session_id": session, "model_seq_id": 5}),
        422,
        "version of a full run",
    )
    archive = api.get(f"/training_runs/{run}/checkpoints/sampler_weights/a/archive")
    refused(archive, 422, "save_weights_external")
