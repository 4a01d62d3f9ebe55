import pytest
import zstandard

from openrl.tasks.messages import CreateModel, ForwardBackward, OptimStep, decode
from openrl.tasks.operations import Outcome
from tests.app.conftest import PROTOBUF, Api, Worker, forward_backward

OLD_JSON = {
    "data": [
        {
            "model_input": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64", "shape": [4]},
                "weights": {"data": [0.0, 1.0, 1.0, 1.0], "dtype": "float32", "shape": [4]},
            },
        }
    ],
    "loss_fn": "cross_entropy",
    "loss_fn_config": None,
}


def test_a_run_is_promised_under_the_id_that_the_sdk_derives(api: Api, worker: Worker) -> None:
    session = api.session()
    promise = api.ok(api.create_model(session))
    assert promise == {"request_id": f"{session}:train:0:0", "model_id": f"{session}:train:0"}
    assert api.ok(api.create_model(session)) == promise
    (operation,) = worker.step({"create_model": Outcome(result=b'{"model_id": "%s"}' % promise["model_id"].encode())})
    message = decode(operation.kind, operation.body)
    assert isinstance(message, CreateModel)
    assert (message.base_model, message.rank, message.seed, message.train_mlp) == ("tiny/random", 8, 0, True)
    assert api.ok(api.poll(promise["request_id"])) == {"model_id": promise["model_id"]}


def test_a_seed_that_the_client_leaves_out_is_drawn_once(api: Api, worker: Worker) -> None:
    session = api.session()
    for _ in range(2):
        api.ok(api.create_model(session, lora_config={"rank": 4, "seed": None}))
    (operation,) = worker.step()
    assert isinstance(decode("create_model", operation.body).seed, int)


def test_a_suffix_after_the_base_models_colon_is_the_clients_own(api: Api) -> None:
    run = api.ok(api.create_model(api.session(), base_model="tiny/random:peft:262144"))["model_id"]
    assert api.ok(api.get(f"/training_runs/{run}"))["base_model"] == "tiny/random"


def test_another_run_under_a_used_number_is_refused(api: Api) -> None:
    session = api.session()
    api.ok(api.create_model(session))
    other = api.create_model(session, lora_config={"rank": 16, "seed": 0})
    assert other.status_code == 422 and other.get_json()["error"]["code"] == "key_reused"


def test_get_info_says_what_a_run_is(api: Api) -> None:
    run = api.run()
    assert api.ok(api.post("/get_info", {"model_id": run, "type": "get_info"})) == {
        "type": "get_info",
        "model_id": run,
        "model_data": {"arch": "llama", "model_name": "tiny/random", "tokenizer_id": "tiny/random"},
        "model_name": "tiny/random",
        "is_lora": True,
        "lora_rank": 8,
        "optimizer_config": {"type": "adamw"},
    }


def test_operations_are_promised_in_any_order_and_run_in_theirs(api: Api, worker: Worker) -> None:
    run = api.run()
    for seq in (2, 3, 1):
        answer = api.optim_step(run, seq) if seq == 3 else api.forward_backward(run, seq)
        assert api.ok(answer) == {"request_id": f"{run}:{seq}", "model_id": run}
    assert [operation.seq_id for operation in worker.step()] == [0, 1, 2, 3]


def test_the_same_batch_is_one_operation_however_it_is_sent(api: Api, worker: Worker) -> None:
    run = api.run()
    body = forward_backward(run, 1)
    old = {"forward_backward_input": OLD_JSON, "model_id": run, "seq_id": 1}
    squeezed = {**PROTOBUF, "Content-Encoding": "zstd"}
    answers = [
        api.send("/forward_backward", body, headers=PROTOBUF),
        api.send("/forward_backward", zstandard.compress(body), headers=squeezed),
        api.post("/forward_backward", old),
    ]
    assert [api.ok(answer)["request_id"] for answer in answers] == [f"{run}:1"] * 3
    operations = worker.step()
    assert [operation.kind for operation in operations] == ["create_model", "forward_backward"]
    message = decode("forward_backward", operations[1].body)
    assert isinstance(message, ForwardBackward)
    assert message.data[0].tokens.tolist() == [1, 2, 3, 4]
    assert message.data[0].inputs["weights"].tolist() == [0.0, 1.0, 1.0, 1.0]


def test_forward_is_its_own_kind_by_flag_and_by_route(api: Api, worker: Worker) -> None:
    from openrl.tasks.wire import openrl_pb2 as pb

    run = api.run()
    call = pb.ForwardBackwardCall.FromString(forward_backward(run, 1))
    call.forward_only = True
    api.ok(api.send("/forward_backward", call.SerializeToString(), headers=PROTOBUF))
    api.ok(api.post("/forward", {"forward_input": OLD_JSON, "model_id": run, "seq_id": 2}))
    assert [operation.kind for operation in worker.step()] == ["create_model", "forward", "forward"]


def test_a_large_compressed_body_arrives_whole(api: Api, worker: Worker) -> None:
    from openrl.tasks.wire import openrl_pb2 as pb

    run = api.run()
    call = pb.ForwardBackwardCall.FromString(forward_backward(run, 1))
    for _ in range(2000):
        call.data.append(call.data[0])
    sent = zstandard.compress(call.SerializeToString())
    api.ok(api.send("/forward_backward", sent, headers={**PROTOBUF, "Content-Encoding": "zstd"}))
    assert len(decode("forward_backward", worker.step()[1].body).data) == 2001


@pytest.mark.parametrize("params", [{}, {"learning_rate": 0.5, "grad_clip_norm": 1.0, "beta1": 0}])
def test_each_step_obeys_its_own_parameters(api: Api, worker: Worker, params: dict) -> None:
    run = api.run()
    body = {"model_id": run, "seq_id": 1, "type": "optim_step", "adam_params": params}
    api.ok(api.post("/optim_step", body))
    assert decode("optim_step", worker.step()[1].body) == OptimStep(**params)


def test_a_run_starts_from_a_checkpoint_and_loads_one(api: Api, worker: Worker) -> None:
    session = api.session()
    run = api.ok(api.create_model(session))["model_id"]
    api.ok(api.post("/save_weights", {"model_id": run, "path": "ck1", "seq_id": 1, "overwrite": False}))
    worker.step({"save_weights": worker.save("local", run, "ck1")})
    path = f"tinker://{run}/weights/ck1"
    via = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True, "type": "load_weights"}
    promise = api.ok(api.post("/load_weights", via))
    assert promise == {"request_id": f"{session}:train:1:0", "model_id": f"{session}:train:1"}
    api.ok(api.post("/load_weights", {"model_id": run, "seq_id": 2, "path": path, "optimizer": False}))
    created, loaded = sorted(worker.step(), key=lambda operation: operation.kind)
    message = decode(created.kind, created.body)
    assert (message.checkpoint_path, message.checkpoint_dir, message.with_optimizer, message.rank) == (
        path,
        "tenants/local/weights/ck1",
        True,
        8,
    )
    assert decode(loaded.kind, loaded.body).with_optimizer is False


def test_a_checkpoint_of_another_shape_is_not_loaded_onto_a_run(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.post("/save_weights", {"model_id": run, "path": "wide", "seq_id": 1}))
    worker.step({"save_weights": worker.save("local", run, "wide", rank=16)})
    path = f"tinker://{run}/weights/wide"
    refused = api.post("/load_weights", {"model_id": run, "seq_id": 2, "path": path, "optimizer": False})
    assert refused.status_code == 422 and "16" in refused.text and "8" in refused.text
    assert [operation.kind for operation in worker.step()] == ["refused"]
