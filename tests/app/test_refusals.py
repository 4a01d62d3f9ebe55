"""Bad input: a clear error that names field, value and what is right; its key used up, nothing else changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from werkzeug.test import TestResponse

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks import keys
from openrl.tasks.store import Store
from openrl.tasks.wire import openrl_pb2 as pb
from tests.app.conftest import MODEL, PROTOBUF, Api, Worker, forward_backward

CHECKOUT = str(Path(__file__).parents[2])

NAN = float("nan")


def refused(response: TestResponse, status: int, *words: str) -> None:
    """Check a refusal's form, its status, and that its one line says these words."""
    assert response.status_code == status, (response.status_code, response.text)
    body = response.get_json()
    assert body["detail"] == body["error"]["message"]
    for word in words:
        assert word in body["detail"], body["detail"]
    for inside in ("Traceback", CHECKOUT, ".py", "site-packages"):
        assert inside not in response.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model": "no/such"}, ["base_model", "no/such", "tiny/random"]),
        ({"lora_config": {"rank": 0}}, ["lora_config.rank", "0", "1 to 256"]),
        ({"lora_config": {"rank": 100_000}}, ["lora_config.rank", "100000", "256"]),
        ({"lora_config": {"rank": "8"}}, ["lora_config.rank", "'8'", "whole number"]),
        ({"lora_config": {"rank": 8, "alpha": 16}}, ["lora_config.alpha", "unknown"]),
        ({"lora_config": {}}, ["lora_config.rank", "is required"]),
        (
            {"lora_config": None, "user_metadata": {"openrl.fine_tuning_type": "lora"}},
            ["lora_config", "absent", "openrl.fine_tuning_type"],
        ),
        ({"user_metadata": {"openrl.fine_tuning_type": "most"}}, ["openrl.fine_tuning_type", "'most'", "lora, full"]),
        ({"user_metadata": {"openrl.fine_tuning_typ": "full"}}, ["openrl.fine_tuning_typ", "openrl.fine_tuning_type"]),
        (
            {
                "user_metadata": {"openrl.fine_tuning_type": "full"},
                "lora_config": {"rank": 8, "train_mlp": False},
            },
            ["lora_config.train_mlp", "all weights"],
        ),
        ({"lora_config": {"rank": 8, "train_mlp": 1}}, ["lora_config.train_mlp", "true or false"]),
        ({"lora_config": {"rank": 8, "seed": 1.5}}, ["lora_config.seed", "1.5"]),
        (
            {"lora_config": {"rank": 8, "train_mlp": False, "train_attn": False, "train_unembed": False}},
            ["lora_config", "train"],
        ),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, ["optimizer_config.type", "dimuon", "adamw"]),
        ({"model_seq_id": -1}, ["model_seq_id", "-1"]),
        ({"model_seq_id": True}, ["model_seq_id", "whole number"]),
        ({"user_metadata": {"x": NAN}}, ["user_metadata", "finite"]),
        ({"user_metadata": "x"}, ["user_metadata", "object"]),
        ({"surprise": 1}, ["surprise", "unknown"]),
        ({"type": "optim_step"}, ["type", "create_model"]),
    ],
)
def test_a_bad_create_model_is_refused_and_uses_nothing_up(api: Api, changes: dict, words: list[str]) -> None:
    session = api.session()
    refused(api.create_model(session, **changes), 422, *words)
    assert api.ok(api.get("/training_runs"))["training_runs"] == []
    api.ok(api.create_model(session))


def test_a_run_of_an_unknown_session_is_not_found(api: Api) -> None:
    refused(api.create_model("s-" + "0" * 32), 404, "session")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [1, 2, 3, 99_999]}, ["data[0].model_input", "99999", "259"]),
        ({"tokens": [1, 2, 3, -1]}, ["data[0].model_input", "-1"]),
        ({"tokens": [1, 2, 3]}, ["data[0]", "target_tokens", "4", "3"]),
        ({"tokens": []}, ["data[0].model_input", "empty"]),
        ({"tokens": [1] * 65}, ["65", "64"]),
        ({"loss_fn": "pp0"}, ["pp0", "cross_entropy", "importance_sampling", "ppo"]),
        ({"loss_fn": "stable_reinforce"}, ["stable_reinforce", "use importance_sampling"]),
    ],
)
def test_a_bad_batch_is_refused_and_uses_up_its_number(
    api: Api, worker: Worker, changes: dict, words: list[str]
) -> None:
    run = api.run()
    refused(api.forward_backward(run, 1, **changes), 422, *words)
    refused(api.forward_backward(run, 1, **changes), 422, *words)
    api.ok(api.forward_backward(run, 2))
    assert [(operation.kind, operation.seq_id) for operation in worker.step()] == [
        ("create_model", 0),
        ("refused", 1),
        ("forward_backward", 2),
    ]
    failed = api.ok(api.poll(f"{run}:1"))
    assert failed["category"] == "user" and words[0] in failed["error"]


def test_a_good_batch_under_a_refused_number_is_told_so(api: Api) -> None:
    run = api.run()
    refused(api.forward_backward(run, 1, tokens=[]), 422)
    refused(api.forward_backward(run, 1), 422, "seq_id 1")


def test_a_refusal_under_an_accepted_number_changes_nothing(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    refused(api.forward_backward(run, 1, tokens=[]), 422, "empty")
    assert [operation.kind for operation in worker.step()] == ["create_model", "forward_backward"]
    api.ok(api.forward_backward(run, 1))


@pytest.mark.parametrize(
    ("body", "headers", "status", "word"),
    [
        (lambda good: good[:-7], PROTOBUF, 400, "protobuf"),
        (lambda good: good, {**PROTOBUF, "Content-Encoding": "gzip"}, 400, "gzip"),
        (lambda good: b"{" + good, {"Content-Type": "application/json"}, 400, "JSON"),
        (lambda good: b"[1]", {"Content-Type": "application/json"}, 400, "object"),
        (lambda good: b"[" * 100_000, {"Content-Type": "application/json"}, 422, "deep"),
        (lambda good: b"1" * 10_000, {"Content-Type": "application/json"}, 400, "JSON"),
        (lambda good: good, {"Content-Type": "text/plain"}, 400, "text/plain"),
        (lambda good: good, {"Content-Type": ""}, 400, "Content-Type"),
        (lambda good: b"junk", {**PROTOBUF, "Content-Encoding": "zstd"}, 400, "zstd"),
        (lambda good: zstandard.compress(good)[:-3], {**PROTOBUF, "Content-Encoding": "zstd"}, 400, "zstd"),
    ],
)
def test_what_cannot_be_decoded_is_a_400_with_a_body(
    api: Api, body: Any, headers: dict, status: int, word: str
) -> None:
    run = api.run()
    refused(api.send("/forward_backward", body(forward_backward(run, 1)), headers=headers), status, word)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (lambda run: forward_backward(run, 1)[:-7], PROTOBUF),
        (lambda run: zstandard.compress(forward_backward(run, 1)[:-7]), {**PROTOBUF, "Content-Encoding": "zstd"}),
        (lambda run: b'{"model_id": "%s", "seq_id": 1, "x": ' % run.encode(), {"Content-Type": "application/json"}),
        (lambda run: b'{"model_id": "%s", "seq_id": 1}' % run.encode(), {"Content-Type": "application/json"}),
    ],
)
def test_a_body_that_breaks_off_still_uses_up_its_number(api: Api, worker: Worker, body: Any, headers: dict) -> None:
    run = api.run()
    answer = api.send("/forward_backward", body(run), headers=headers)
    assert answer.status_code in (400, 422)
    api.ok(api.optim_step(run, 2))
    operations = worker.step()
    assert [(operation.kind, operation.voids) for operation in operations][1:] == [
        ("refused", True),
        ("optim_step", False),
    ]


def test_a_body_over_a_cap_is_a_413_that_still_uses_up_its_number(store: Store, app, worker: Worker) -> None:
    small = create_app(AppSettings(max_body_bytes=4096, max_decoded_bytes=8192), store=store)
    api = Api(small.test_client(), small.extensions["openrl"])
    run = api.run()
    long = forward_backward(run, 1) + b"\x22\x90\x4e" + b"x" * 10_000
    refused(api.send("/forward_backward", long, headers=PROTOBUF), 413, "4096")
    bomb = zstandard.compress(forward_backward(run, 2) + b"\x22\x80\x80\x80\x08" + bytes(1 << 24))
    assert len(bomb) < 4096
    refused(api.send("/forward_backward", bomb, headers={**PROTOBUF, "Content-Encoding": "zstd"}), 413, "8192")
    assert [operation.seq_id for operation in worker.step()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("adam", "words"),
    [
        ({"learning_rate": NAN}, ["adam_params.learning_rate", "finite"]),
        ({"learning_rate": float("inf")}, ["adam_params.learning_rate", "finite"]),
        ({"learning_rate": None}, ["adam_params.learning_rate = None", "NaN"]),
        ({"grad_clip_norm": None}, ["adam_params.grad_clip_norm = None", "NaN"]),
        ({"learning_rate": 10**400}, ["adam_params.learning_rate", "finite"]),
        ({"learning_rate": "1e-4"}, ["adam_params.learning_rate", "'1e-4'"]),
        ({"learning_rate": -1}, ["adam_params.learning_rate", "-1"]),
        ({"beta1": 1.0}, ["adam_params.beta1", "1.0"]),
        ({"beta2": True}, ["adam_params.beta2", "True"]),
        ({"eps": 0}, ["adam_params.eps", "0"]),
        ({"momentum": 0.9}, ["adam_params.momentum", "unknown"]),
    ],
)
def test_a_bad_step_is_refused_and_uses_up_its_number(api: Api, worker: Worker, adam: dict, words: list[str]) -> None:
    run = api.run()
    body = {"model_id": run, "seq_id": 1, "type": "optim_step", "adam_params": adam}
    refused(api.post("/optim_step", body), 422, *words)
    api.ok(api.optim_step(run, 2))
    assert [operation.kind for operation in worker.step()] == ["create_model", "refused", "optim_step"]
    assert words[0] in api.ok(api.poll(f"{run}:1"))["error"]


def test_another_optimizer_is_refused_by_name(api: Api) -> None:
    body = {"model_id": api.run(), "seq_id": 1, "optimizer_params": {"type": "dimuon", "learning_rate": 0.1}}
    refused(api.post("/optim_step", body), 422, "dimuon", "adam_params")


@pytest.mark.parametrize("seq", [0, -1, 2**31, "1", 1.0, True, None])
def test_a_number_that_cannot_be_one_is_refused(api: Api, seq: object) -> None:
    refused(api.post("/optim_step", {"model_id": api.run(), "seq_id": seq, "adam_params": {}}), 422, "seq_id")


@pytest.mark.parametrize(
    "name", ["a/b", "../../x", "..", ".hidden", "x" * 300, "", "a b", "\u00fc", "a\n", "a\x00b", 7]
)
@pytest.mark.parametrize("route", ["save_weights", "save_weights_for_sampler"])
def test_a_name_that_could_leave_its_directory_is_refused(api: Api, worker: Worker, name: object, route: str) -> None:
    run = api.run()
    refused(api.post(f"/{route}", {"model_id": run, "seq_id": 1, "path": name}), 422, "path")
    assert [operation.kind for operation in worker.step()] == ["create_model", "refused"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ttl_seconds": 300}, ["ttl_seconds", "300", "3600"]),
        ({"ttl_seconds": 0}, ["ttl_seconds", "3600"]),
        ({"ttl_seconds": 10**12}, ["ttl_seconds", "315360000"]),
        ({"overwrite": "yes"}, ["overwrite"]),
    ],
)
def test_a_bad_save_is_refused(api: Api, changes: dict, words: list[str]) -> None:
    body = {"model_id": api.run(), "seq_id": 1, "path": "ok"} | changes
    refused(api.post("/save_weights", body), 422, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ["path", "sampling_session_seq_id"]),
        ({"path": "x", "sampling_session_seq_id": 0}, ["path", "sampling_session_seq_id"]),
        ({"sampling_session_seq_id": 0, "kind": "inflight"}, ["kind", "inflight", "snapshot"]),
        ({"sampling_session_seq_id": -1}, ["sampling_session_seq_id", "-1"]),
    ],
)
def test_a_bad_sampler_save_is_refused(api: Api, changes: dict, words: list[str]) -> None:
    refused(api.post("/save_weights_for_sampler", {"model_id": api.run(), "seq_id": 1} | changes), 422, *words)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/etc/passwd", 422),
        ("tinker://a/b", 422),
        ("tinker://../../weights/x", 422),
        ("tinker://nobody:train:0/weights/x", 404),
        ("tinker://{run}/weights/nope", 404),
        ("tinker://{run}/weights/../x", 422),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_and_the_run_goes_on(
    api: Api, worker: Worker, path: str, status: int
) -> None:
    run = api.run()
    body = {"model_id": run, "seq_id": 1, "path": path.format(run=run), "optimizer": False}
    refused(api.post("/load_weights", body), status)
    refused(api.post("/weights_info", {"tinker_path": path.format(run=run)}), status)
    api.ok(api.optim_step(run, 2))
    assert [operation.kind for operation in worker.step()] == ["create_model", "refused", "optim_step"]


def test_a_load_says_onto_what_and_whose(api: Api) -> None:
    run = api.run()
    load = {"path": f"tinker://{run}/weights/x", "optimizer": False}
    refused(api.post("/load_weights", load), 422, "model_id", "session_id")
    refused(api.post("/load_weights", load | {"session_id": "s", "model_id": run, "seq_id": 1}), 422, "either")
    # Without keys there is nobody else whose checkpoint a token could open.
    token = {"model_id": run, "seq_id": 1, "weights_access_token": "tml-other"}
    refused(api.post("/load_weights", load | token), 404, load["path"])


@pytest.mark.parametrize(
    "name", ["nope", "s-" + "0" * 32 + ":train:0", "{run}:journal", "{run}:bodies", "{run}:0", "a b"]
)
def test_an_unknown_run_is_not_found_anywhere(api: Api, name: str) -> None:
    run = name.format(run=api.run())
    refused(api.forward_backward(run, 1), 404)
    refused(api.optim_step(run, 1), 404)
    refused(api.post("/get_info", {"model_id": run}), 404)
    refused(api.post("/save_weights", {"model_id": run, "seq_id": 1, "path": "x"}), 404)
    refused(api.get(f"/training_runs/{run}"), 404)
    refused(api.get(f"/training_runs/{run}/checkpoints"), 404)


@pytest.mark.parametrize(
    "name", ["nope", "{run}:7", "{run}", "s-0:sample:0:0", "a:train:0:0 x", "{run}:-1", "{run}:01", ""]
)
def test_an_unknown_future_is_not_found_at_once(api: Api, name: str) -> None:
    refused(api.poll(name.format(run=api.run())), 404)


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=100000", "offset=-1", "access_scope=all", "nonsense=1"])
@pytest.mark.parametrize("route", ["training_runs", "checkpoints", "sessions"])
def test_a_list_refuses_a_page_that_cannot_be(api: Api, route: str, query: str) -> None:
    refused(api.get(f"/{route}?{query}"), 422, query.partition("=")[0])


@pytest.mark.parametrize("body", [{"request_id": 5}, {}, {"request_id": "x", "later": 1}])
def test_a_bad_poll_is_refused(api: Api, body: dict) -> None:
    refused(api.post("/retrieve_future", body), 422)


def test_text_that_is_not_unicode_is_refused(api: Api) -> None:
    raw = b'{"session_id": "\\ud800"}'
    headers = {"Content-Type": "application/json"}
    refused(api.send("/session_heartbeat", raw, headers=headers), 422, "session_id")
    metadata = b'{"tags": [], "user_metadata": {"x": "\\ud800"}}'
    refused(api.send("/create_session", metadata, headers=headers), 422, "user_metadata")
    refused(api.send("/create_session", b"\xff\xfe{}", headers=headers), 400)


@pytest.mark.parametrize("depth", [33, 300, 500, 700, 940, 2000, 100_000])
@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"x":', "}")])
def test_json_that_is_nested_too_deep_is_refused_everywhere(api: Api, depth: int, left: str, right: str) -> None:
    run = api.run()
    session = run.partition(":")[0]
    deep = left * (depth - 1) + "1" + right * (depth - 1)
    model = f'"session_id": "{session}", "model_seq_id": 1, "base_model": "{MODEL.name}", "lora_config": {{"rank": 8}}'
    for route, body in (
        ("/create_session", f'{{"user_metadata": {deep}}}'),
        ("/create_model", f'{{{model}, "user_metadata": {deep}}}'),
        ("/optim_step", f'{{"model_id": "{run}", "seq_id": 1, "optimizer_params": {deep}}}'),
        ("/forward_backward", f'{{"model_id": "{run}", "seq_id": 2, "forward_backward_input": {deep}}}'),
        ("/asample", f'{{"sampling_session_id": "{session}:sample:0", "seq_id": 0, "prompt": {deep}}}'),
        ("/retrieve_future", f'{{"request_id": {deep}}}'),
    ):
        refused(api.send(route, body.encode(), headers={"Content-Type": "application/json"}), 422, "deep")


def test_metadata_as_deep_as_json_may_be_is_kept(api: Api) -> None:
    deep: Any = 1
    for _ in range(31):
        deep = {"x": deep}
    session = api.ok(api.post("/create_session", {"user_metadata": deep}))["session_id"]
    assert set(api.ok(api.get(f"/sessions/{session}"))["user_metadata"]) == {"x"}


def test_a_tensor_whose_bytes_do_not_make_its_shape_is_refused_by_name(api: Api) -> None:
    """As forward_backward_custom of the SDK would make it: zero weights, one for each listed cell of sparse targets."""
    run = api.run()
    call = pb.ForwardBackwardCall.FromString(forward_backward(run, 1))
    inputs = call.data[0].loss_fn_inputs
    sparse = pb.Tensor(dtype=pb.ELEMENT_INT64, shape=[4, 3])
    for name, numbers in {"values": [5, 6], "crow_indices": [0, 1, 1, 1, 2], "col_indices": [2, 0]}.items():
        setattr(sparse.sparse_csr, name, np.array(numbers, "<i8").tobytes())
    inputs["target_tokens"].CopyFrom(sparse)
    inputs["weights"].CopyFrom(pb.Tensor(dtype=pb.ELEMENT_FLOAT32, shape=[4, 3], dense=bytes(8)))
    words = ["data[0].loss_fn_inputs['weights']", "has 2 values; its shape [4, 3] needs 12"]
    refused(api.send("/forward_backward", call.SerializeToString(), headers=PROTOBUF), 422, *words)
    targets = {
        "data": [5, 6], "dtype": "int64", "shape": [4, 3],
        "sparse_crow_indices": [0, 1, 1, 1, 2], "sparse_col_indices": [2, 0],
    }  # fmt: skip
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
        "loss_fn_inputs": {
            "target_tokens": targets,
            "weights": {"data": [0.0, 0.0], "dtype": "float32", "shape": [4, 3]},
        },
    }
    body = {"model_id": run, "seq_id": 2, "forward_input": {"data": [datum], "loss_fn": "cross_entropy"}}
    refused(api.post("/forward", body), 422, *words)


def test_a_body_that_broke_off_uses_nothing_up(api: Api, worker: Worker) -> None:
    run = api.run()
    whole = forward_backward(run, 1)
    promised = {"CONTENT_LENGTH": str(len(whole)), "wsgi.input_terminated": True}
    broken = api.send("/forward_backward", whole[:-7], headers=PROTOBUF, environ_overrides=promised)
    refused(broken, 408, "broke off", "send it again")
    api.ok(api.forward_backward(run, 1))
    assert [operation.kind for operation in worker.step()] == ["create_model", "forward_backward"]


LONG, HUGE = "x" * 300, 10**400


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/forward_backward", {"model_id": "{run}", "seq_id": HUGE, "forward_backward_input": {}}),
        ("/optim_step", {"model_id": LONG, "seq_id": 1, "adam_params": {}}),
        ("/optim_step", {"model_id": "{run}", "seq_id": 1, LONG: LONG}),
        ("/optim_step", {"model_id": "{run}", "seq_id": 1, "optimizer_params": {"type": LONG}}),
        (
            "/create_model",
            {"session_id": LONG, "model_seq_id": 0, "base_model": MODEL.name, "lora_config": {"rank": 1}},
        ),
        ("/create_model", {"session_id": "{session}", "model_seq_id": HUGE, "base_model": LONG}),
        ("/load_weights", {"model_id": "{run}", "seq_id": 1, "path": LONG, "optimizer": False}),
        ("/load_weights", {"model_id": "{run}", "seq_id": 1, "path": f"tinker://a/b/{LONG}", "optimizer": False}),
        ("/weights_info", {"tinker_path": LONG}),
        ("/asample", {"sampling_session_id": LONG, "seq_id": 0, "prompt": {}, "sampling_params": {}}),
        ("/create_sampling_session", {"session_id": "{session}", "sampling_session_seq_id": 0, "base_model": LONG}),
        ("/retrieve_future", {"request_id": LONG}),
        ("/session_heartbeat", {"session_id": LONG}),
    ],
)
def test_a_refusal_repeats_no_more_of_a_value_than_a_line_bears(api: Api, route: str, body: dict) -> None:
    run = api.run()
    names = {"{run}": run, "{session}": run.partition(":")[0]}
    answer = api.post(route, {key: names.get(str(value), value) for key, value in body.items()})
    assert answer.status_code in (404, 422)
    assert len(answer.get_json()["detail"]) < 400
    assert "x" * 90 not in answer.text and "0" * 90 not in answer.text


def test_the_run_is_usable_after_every_refusal(api: Api, worker: Worker) -> None:
    run = api.run()
    for seq in range(1, 6):
        refused(api.forward_backward(run, seq, tokens=[MODEL.vocab_size]), 422)
    api.ok(api.forward_backward(run, 6))
    assert [operation.seq_id for operation in worker.step()] == list(range(7))


def test_over_a_tenants_bytes_a_batch_or_a_sample_is_a_429_that_uses_nothing_up(
    store: Store, app, worker: Worker
) -> None:
    small = create_app(AppSettings(), store=Store(store.redis, replace(store.settings, tenant_bytes=1)))
    api = Api(small.test_client(), small.extensions["openrl"])
    session = api.session()
    run = str(api.ok(api.create_model(session))["model_id"])
    sampler = api.ok(
        api.post(
            "/create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL.name},
        )
    )["sampling_session_id"]
    sample = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 4},
    }
    worker.step()
    api.ok(api.forward_backward(run, 1))
    for answer in (api.forward_backward(run, 2), api.optim_step(run, 3), api.post("/asample", sample)):
        refused(answer, 429, "queued")
        assert answer.headers["Retry-After"]
    assert [operation.seq_id for operation in worker.step()] == [1]
    api.ok(api.forward_backward(run, 2))
    assert [operation.seq_id for operation in worker.step()] == [2]
    api.ok(api.post("/asample", sample))


def test_a_number_absurdly_far_ahead_is_refused_and_uses_nothing_up(api: Api, worker: Worker) -> None:
    run = api.run()
    refused(api.optim_step(run, 2**31 - 1), 422, "far ahead")
    worker.step()
    api.ok(api.optim_step(run, 1))
    assert [operation.seq_id for operation in worker.step()] == [1]


def test_a_fault_of_the_store_is_a_500_that_tells_nothing_of_it(api: Api, store: Store) -> None:
    run = api.run()
    store.redis.delete(keys.journal("local", run))
    store.redis.set(keys.journal("local", run), "no hash")
    answer = api.optim_step(run, 1)
    refused(answer, 500)
    assert "WRONGTYPE" not in answer.text
