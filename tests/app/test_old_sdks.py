"""What older SDKs send and can read: JSON with nulls and without `type`, lists without what they never heard of."""

from __future__ import annotations

from typing import Any

import pytest

from openrl.tasks import keys
from openrl.tasks.messages import Forward, ForwardBackward, LoadWeights, decode
from openrl.tasks.operations import Outcome
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker

OLD = {"X-Stainless-Package-Version": "0.6.3"}


def batch(name: str, run: str, seq: int) -> dict[str, Any]:
    """A call as SDK 0.6.3 writes it: nulls are said, defaults and `type` are not."""
    weights = {"data": [0.0, 1.0, 1.0], "dtype": "float32", "shape": [3]}
    targets = {"data": [2, 3, 4], "dtype": "int64", "shape": None}
    inputs = {"target_tokens": targets, "weights": weights}
    datum = {"model_input": {"chunks": [{"tokens": [1, 2, 3]}]}, "loss_fn_inputs": inputs}
    return {name: {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None}, "model_id": run, "seq_id": seq}


@pytest.mark.parametrize(
    ("route", "name", "message"),
    [("forward_backward", "forward_backward_input", ForwardBackward), ("forward", "forward_input", Forward)],
)
def test_a_batch_with_nulls_is_answered_in_json(
    api: Api, worker: Worker, training_result: bytes, route: str, name: str, message: type
) -> None:
    run = api.run()
    promise = api.ok(api.post(f"/{route}", batch(name, run, 1)))
    done = worker.step({route: Outcome(result=training_result, content_type="application/x-protobuf")})
    assert isinstance(decode(done[-1].kind, done[-1].body), message)
    found = api.ok(api.post("/retrieve_future", {"request_id": promise["request_id"]}))
    assert found["loss_fn_outputs"] == [{"logprobs": {"data": [-1.0] * 4, "dtype": "float32", "shape": [4]}}]
    assert found["metrics"] == {"loss:sum": 3.0}


def test_a_step_without_the_newer_settings_has_their_defaults(api: Api, worker: Worker) -> None:
    run = api.run()
    adam = {"learning_rate": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}
    api.ok(api.post("/optim_step", {"adam_params": adam, "model_id": run, "seq_id": 1}))
    step = decode(*[(each.kind, each.body) for each in worker.step()][-1])
    assert (step.learning_rate, step.weight_decay, step.grad_clip_norm) == (0.1, 0.0, 0.0)


def test_a_run_created_from_a_checkpoint_takes_on_its_modules(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.post("/save_weights", {"model_id": run, "path": "narrow", "seq_id": 1}))
    worker.step({"save_weights": worker.save("local", run, "narrow", train_mlp=False, train_unembed=False)})
    path = f"tinker://{run}/weights/narrow"
    assert api.ok(api.post("/weights_info", {"tinker_path": path}))["lora_rank"] == 8
    other = api.ok(api.create_model(run.partition(":")[0], 1))["model_id"]
    load = {"model_id": other, "path": path, "optimizer": True}
    api.ok(api.post("/load_weights", load | {"seq_id": 1}))
    assert [decode(each.kind, each.body) for each in worker.step()][-1] == LoadWeights(
        checkpoint_path=path, checkpoint_dir="tenants/local/weights/narrow", with_optimizer=True
    )
    assert api.post("/load_weights", load | {"seq_id": 2}).status_code == 422


@pytest.mark.parametrize("version", ["0.6.3", "0.18.2", "0.24.1", "0.27.2"])
def test_an_sdk_that_knows_no_exports_is_not_shown_any(api: Api, worker: Worker, version: str) -> None:
    run = api.run()
    for seq, (route, kind) in enumerate((("save_weights", "training"), ("save_weights_external", "external")), start=1):
        api.ok(api.post(f"/{route}", {"model_id": run, "path": "a", "seq_id": seq}))
        worker.step({route: worker.save("local", run, "a", kind)})
    for path in (f"/training_runs/{run}/checkpoints", "/checkpoints"):
        listed = {
            sdk: [each["checkpoint_id"] for each in api.ok(api.get(path, headers=headers))["checkpoints"]]
            for sdk, headers in (("old", {"X-Stainless-Package-Version": version}), ("new", {}))
        }
        assert listed == {"old": ["weights/a"], "new": ["external_weights/a", "weights/a"]}, path
    assert api.ok(api.get("/checkpoints", headers=OLD))["cursor"]["total_count"] == 1


@pytest.mark.parametrize("version", ["0.28.0", "0.38.0", "1.0.0", "", "0", "0.6", "x", "9" * 5000, "0.99999999.1"])
def test_whoever_says_nothing_that_means_an_old_sdk_is_shown_all(api: Api, worker: Worker, version: str) -> None:
    run = api.run()
    api.ok(api.post("/save_weights_external", {"model_id": run, "path": "a", "seq_id": 1}))
    worker.step({"save_weights_external": worker.save("local", run, "a", "external")})
    headers = {"X-Stainless-Package-Version": version}
    listed = api.ok(api.get("/checkpoints", headers=headers))["checkpoints"]
    assert [each["checkpoint_type"] for each in listed] == ["external"]


def test_what_a_newer_version_has_written_is_told_once_and_for_all(api: Api, store: Store) -> None:
    run = api.run()
    future = keys.future("local", f"{run}:0")
    store.redis.hset(future, "schema", 9)
    polled = api.poll(f"{run}:0")
    row = store.redis.hget(keys.run("local", run), "record").decode()
    store.redis.hset(keys.run("local", run), "record", row.replace('"schema": 2', '"schema": 9'))
    for answer, noun in ((polled, "promise"), (api.post("/get_info", {"model_id": run}), "run")):
        assert answer.status_code == 422 and answer.get_json()["error"]["code"] == "other_version"
        assert f"a {noun} has schema" in answer.text and "an operator starts the version that wrote it" in answer.text
