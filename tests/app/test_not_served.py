"""A start without a base model that has runs: nothing is accepted for them, nothing used up, and all goes on later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from tests.app.conftest import MODEL, PROTOBUF, Api, Worker, forward_backward


def test_a_run_of_a_model_that_is_not_served_waits_unharmed_until_it_is_again(
    api: Api, worker: Worker, store: Store
) -> None:
    run = api.run()
    session = run.partition(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL.name}
    sampler_id = api.ok(api.post("/create_sampling_session", sampler))["sampling_session_id"]
    worker.step()
    Registry(store).remove_models()
    sample = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
    }
    for refused in (
        api.send("/forward_backward", forward_backward(run, 1), headers=PROTOBUF),
        api.optim_step(run, 1),
        api.post("/save_weights", {"model_id": run, "seq_id": 1, "path": "x"}),
        api.post("/save_weights_for_sampler", {"model_id": run, "seq_id": 1, "path": "x"}),
        api.post("/save_weights_external", {"model_id": run, "seq_id": 1, "path": "x"}),
        api.post("/asample", sample),
        api.post("/get_info", {"model_id": run}),
    ):
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (503, "not_served"), refused.text
        assert refused.headers["Retry-After"]
        assert MODEL.name in refused.get_json()["detail"] and "--model" in refused.get_json()["detail"]
    assert worker.step() == []
    Registry(store).add_model(MODEL)
    api.ok(api.forward_backward(run, 1))
    api.ok(api.optim_step(run, 2))
    api.ok(api.post("/asample", sample))
    assert [(done.kind, done.seq_id) for done in worker.step()] == [("forward_backward", 1), ("optim_step", 2)]


def test_a_poll_for_a_model_that_is_not_served_says_so(api: Api, store: Store) -> None:
    run = api.run()
    Registry(store).remove_models()
    pending = api.poll(f"{run}:0")
    assert (pending.status_code, pending.get_json()["queue_state"]) == (408, "paused_capacity")
    assert "is not served" in pending.get_json()["queue_state_reason"]


def test_on_other_weights_under_the_same_name_nothing_is_accepted_until_the_old_ones_are_back(
    api: Api, worker: Worker, store: Store
) -> None:
    registry = Registry(store)
    registry.add_model(replace(MODEL, digest="old"))
    run = api.run()
    session = run.partition(":")[0]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL.name}
    sampler_id = api.ok(api.post("/create_sampling_session", sampler))["sampling_session_id"]
    worker.step()
    assert registry.made_on() == {MODEL.name: "old"}
    registry.add_model(replace(MODEL, digest="new"))
    sample = {
        "sampling_session_id": sampler_id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
    }
    for refused in (api.optim_step(run, 1), api.forward_backward(run, 1), api.post("/asample", sample)):
        assert refused.status_code == 503, refused.text
        assert "other weights" in refused.get_json()["detail"]
    registry.add_model(replace(MODEL, digest="old"))
    api.ok(api.optim_step(run, 1))
    api.ok(api.post("/asample", sample))


@pytest.mark.parametrize(("made_on", "status"), [("old", 422), ("new", 200), ("", 200)])
def test_a_checkpoint_that_was_made_on_other_weights_is_not_loaded(
    api: Api, worker: Worker, store: Store, made_on: str, status: int
) -> None:
    Registry(store).add_model(replace(MODEL, digest="new"))
    run = api.run()
    session = run.partition(":")[0]
    for seq, (kind, route) in enumerate(
        [("training", "save_weights"), ("sampler", "save_weights_for_sampler")], start=1
    ):
        api.ok(api.post(f"/{route}", {"model_id": run, "seq_id": seq, "path": "x"}))
        worker.step({route: worker.save("local", run, "x", kind, base_digest=made_on)})
    training = {"path": f"tinker://{run}/weights/x", "optimizer": True}
    for answer in (
        api.post("/load_weights", {**training, "model_id": run, "seq_id": 3}),
        api.post("/load_weights", {**training, "session_id": session, "model_seq_id": 1}),
        api.post(
            "/create_sampling_session",
            {
                "session_id": session,
                "sampling_session_seq_id": 1,
                "model_path": f"tinker://{run}/sampler_weights/x",
            },
        ),
    ):
        assert answer.status_code == status, answer.text
        assert status == 200 or "other weights" in answer.get_json()["detail"]
