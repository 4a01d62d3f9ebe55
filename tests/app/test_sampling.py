from __future__ import annotations

import pytest

from openrl.tasks.journal import Journal
from openrl.tasks.operations import PROTOBUF, Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.store import Store
from openrl.tasks.wire import codec
from tests.app.conftest import MODEL, Api, Worker


def sampler(api: Api) -> str:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0, "base_model": "tiny/random"}
    return str(api.ok(api.post("/create_sampling_session", body))["sampling_session_id"])


def asample(name: str, seq: int = 0, **changes) -> dict:
    params = {"max_tokens": 3, "seed": 7, "stop": [0], "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    return {
        "num_samples": 2,
        "prompt": {"chunks": [{"tokens": [1, 2, 3], "type": "encoded_text"}]},
        "sampling_params": params | changes.pop("params", {}),
        "sampling_session_id": name,
        "seq_id": seq,
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "prompt_alt_tokens_k": 0,
        "record_stability_info": False,
        "type": "sample",
    } | changes


@pytest.fixture
def jobs(store: Store):
    """Take what a sampler would get."""
    with Lease(store, "s1", kind="sampler", slug=MODEL.slug) as lease:
        journal = Journal(store)

        def take(outcome: Outcome | None = None) -> list:
            found = journal.take_samples(MODEL.slug, lease, limit=100)
            for job in found:
                if outcome:
                    journal.commit_sample(lease, job, outcome)
            return found

        yield take


def test_a_sample_is_promised_with_an_id_for_each_sequence(api: Api, jobs) -> None:
    name = sampler(api)
    promise = api.ok(api.post("/asample", asample(name)))
    assert promise == {"request_id": f"{name}:0", "sample_sequence_ids": [f"{name}:0:0", f"{name}:0:1"]}
    assert api.ok(api.post("/asample", asample(name))) == promise
    (job,) = jobs()
    message = job.message
    assert (message.prompt, message.num_samples, message.seed, message.adapter_dir) == ((1, 2, 3), 2, 7, "")
    assert (message.stop_tokens, message.temperature) == ((0,), 1.0)


@pytest.mark.parametrize(
    ("stop", "tokens", "strings", "at_eos"),
    [
        (None, (), (), True),
        ("\n\n", (), ("\n\n",), True),
        (["a", "b"], (), ("a", "b"), True),
        ([5, 6], (5, 6), (), True),
        ([5, "x"], (5,), ("x",), True),
        ([], (), (), False),
    ],
)
def test_stop_has_its_three_shapes(api: Api, jobs, stop, tokens, strings, at_eos) -> None:
    api.ok(api.post("/asample", asample(sampler(api), params={"stop": stop})))
    message = jobs()[0].message
    assert (message.stop_tokens, message.stop_strings, message.stop_at_eos) == (tokens, strings, at_eos)


def test_chunks_are_joined_and_defaults_are_tinkers(api: Api, jobs) -> None:
    name = sampler(api)
    chunks = {"chunks": [{"tokens": [1, 2]}, {"tokens": [3], "type": "encoded_text"}]}
    body = {"prompt": chunks, "sampling_params": {}, "sampling_session_id": name, "seq_id": 0}
    api.ok(api.post("/asample", body))
    message = jobs()[0].message
    assert message.prompt == (1, 2, 3) and message.num_samples == 1 and message.max_tokens is None
    assert isinstance(message.seed, int) and message.stop_at_eos
    assert (message.temperature, message.top_k, message.top_p) == (1.0, -1, 1.0)


TARGETS = {"data": [4, -1, 5, 6], "dtype": "int64", "shape": [2, 2]}
SPARSE = {
    "data": [4, 6], "dtype": "int64", "shape": [2, 9], "sparse_crow_indices": [0, 0, 2], "sparse_col_indices": [1, 8],
}  # fmt: skip


def test_what_is_asked_of_the_prompt_reaches_the_sampler_as_it_was_laid_out(api: Api, jobs) -> None:
    name = sampler(api)
    more = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2, "prompt_alt_tokens_k": 3}
    api.ok(api.post("/asample", asample(name, 0, target_prompt_logprobs=TARGETS, **more)))
    (dense,) = (job.message for job in jobs())
    assert (dense.target_ids, dense.target_shape, dense.target_crow, dense.target_columns) == (
        (4, -1, 5, 6),
        (2, 2),
        (),
        (),
    )
    assert (dense.prompt_logprobs, dense.prompt_logprobs_last_n, dense.prompt_alt_tokens_k) == (True, 2, 3)
    api.ok(api.post("/asample", asample(name, 1, target_prompt_logprobs=SPARSE)))
    (sparse,) = (job.message for job in jobs())
    assert (sparse.target_ids, sparse.target_shape) == ((4, 6), (2, 9))
    assert (sparse.target_crow, sparse.target_columns) == ((0, 0, 2), (1, 8))
    assert sparse.prompt_logprobs_last_n is None


def test_temperature_zero_stays_zero(api: Api, jobs) -> None:
    api.ok(api.post("/asample", asample(sampler(api), params={"temperature": 0.0})))
    assert jobs()[0].message.temperature == 0.0


def test_numbers_past_two_to_the_53_stay_apart(api: Api, jobs) -> None:
    name = sampler(api)
    for seq in (432543029000000001, 432543029000000002):
        assert api.ok(api.post("/asample", asample(name, seq)))["request_id"] == f"{name}:{seq}"
    assert {job.request_id for job in jobs()} == {f"{name}:{seq}" for seq in (432543029000000001, 432543029000000002)}


def test_another_request_under_a_used_number_is_refused(api: Api) -> None:
    name = sampler(api)
    api.ok(api.post("/asample", asample(name)))
    answer = api.post("/asample", asample(name, num_samples=3))
    assert answer.status_code == 422 and answer.get_json()["error"]["code"] == "key_reused"


def test_a_sample_comes_back_as_protobuf_or_json(api: Api, jobs) -> None:
    name = sampler(api)
    api.ok(api.post("/asample", asample(name, num_samples=1)))
    sequence = codec.SampledSequence(tokens=[5, 6], logprobs=[-0.5, -0.25], stop_reason="length")
    result = codec.encode_sample_response([sequence], [None, -1.0, -1.0], None)
    jobs(Outcome(result=result, content_type=PROTOBUF))
    answer = api.poll(f"{name}:0", headers={"Accept": "application/x-protobuf"})
    assert (answer.mimetype, answer.data) == ("application/x-protobuf", result)
    old = api.ok(api.poll(f"{name}:0"))
    assert old["sequences"][0]["tokens"] == [5, 6] and old["prompt_logprobs"] == [None, -1.0, -1.0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": {"chunks": [{"type": "image", "data": "x", "format": "png"}]}}, ["prompt", "image"]),
        ({"prompt": {"chunks": []}}, ["prompt", "empty"]),
        ({"prompt": {"chunks": [{"tokens": [1, 260]}]}}, ["prompt", "260", "259"]),
        ({"prompt": {"chunks": [{"tokens": [1.5]}]}}, ["prompt"]),
        ({"prompt": {"chunks": [{"tokens": [True]}]}}, ["prompt"]),
        ({"prompt": {"chunks": [{"tokens": [1] * 64}]}}, ["prompt of 64 tokens", "room for 0"]),
        ({"prompt": None}, ["prompt", "required"]),
        ({"num_samples": 0}, ["num_samples", "0"]),
        ({"num_samples": 10**6}, ["num_samples"]),
        ({"params": {"temperature": -1}}, ["sampling_params.temperature", "-1"]),
        ({"params": {"temperature": float("nan")}}, ["sampling_params.temperature"]),
        ({"params": {"temperature": None}}, ["sampling_params.temperature = None", "null"]),
        ({"params": {"top_p": None}}, ["sampling_params.top_p", "null"]),
        ({"params": {"top_p": 0}}, ["sampling_params.top_p"]),
        ({"params": {"top_p": 1.5}}, ["sampling_params.top_p"]),
        ({"params": {"top_k": 0}}, ["sampling_params.top_k"]),
        ({"params": {"max_tokens": 0}}, ["sampling_params.max_tokens", "0"]),
        ({"params": {"max_tokens": 62}}, ["sampling_params.max_tokens is 62", "room for 61", "64"]),
        ({"params": {"stop": [""]}}, ["sampling_params.stop"]),
        ({"params": {"stop": [None]}}, ["sampling_params.stop"]),
        ({"params": {"stop": ["\ud800"]}}, ["sampling_params.stop"]),
        ({"params": {"stop": {"a": 1}}}, ["sampling_params.stop"]),
        ({"params": {"seed": 2**64}}, ["sampling_params.seed"]),
        ({"params": {"best_of": 2}}, ["sampling_params.best_of", "unknown"]),
        ({"sampling_params": None}, ["sampling_params", "required"]),
        ({"params": {"top_p": float("nan")}}, ["sampling_params.top_p", "finite"]),
        ({"params": {"top_k": float("nan")}}, ["sampling_params.top_k"]),
        ({"params": {"stop": 5}}, ["sampling_params.stop", "5"]),
        ({"params": {"stop": [1.0]}}, ["sampling_params.stop[0]", "1.0"]),
        ({"params": {"n": 1}}, ["sampling_params.n", "unknown"]),
        ({"params": {"presence_penalty": 0.5}}, ["sampling_params.presence_penalty", "unknown"]),
        ({"best_of": 2}, ["best_of", "unknown"]),
        ({"record_stability_info": True}, ["record_stability_info", "stable_reinforce", "importance_sampling", "ppo"]),
        ({"record_stability_info": "no"}, ["record_stability_info"]),
        ({"prompt_alt_tokens_k": -1}, ["prompt_alt_tokens_k"]),
        ({"prompt_logprobs_last_n": 1}, ["prompt_logprobs_last_n", "prompt_logprobs too"]),
        ({"prompt_logprobs_last_n": 3, "prompt_logprobs": True}, ["prompt_logprobs_last_n is 3", "1 to 2"]),
        ({"prompt_logprobs_last_n": 0, "prompt_logprobs": True}, ["prompt_logprobs_last_n is 0"]),
        ({"target_prompt_logprobs": {"data": []}}, ["target_prompt_logprobs", "int64"]),
        ({"target_prompt_logprobs": TARGETS | {"dtype": "float32"}}, ["target_prompt_logprobs", "float32", "int64"]),
        ({"target_prompt_logprobs": TARGETS | {"shape": [4]}}, ["target_prompt_logprobs", "[4]", "[N, K]"]),
        ({"target_prompt_logprobs": TARGETS | {"shape": [4, 1]}}, ["target_prompt_logprobs", "[4, 1]", "[2, K]"]),
        ({"target_prompt_logprobs": TARGETS | {"shape": [2, 3]}}, ["target_prompt_logprobs", "4 values", "needs 6"]),
        ({"target_prompt_logprobs": TARGETS | {"data": [1, 2, 3, 260]}}, ["target_prompt_logprobs", "260", "259"]),
        ({"target_prompt_logprobs": TARGETS | {"data": [1, 2, 3, -2]}}, ["target_prompt_logprobs", "-2"]),
        ({"target_prompt_logprobs": TARGETS | {"data": [-1] * 4}}, ["target_prompt_logprobs", "no id"]),
        ({"target_prompt_logprobs": TARGETS | {"data": [1, 2, 3, float("nan")]}}, ["target_prompt_logprobs", "float"]),
        ({"target_prompt_logprobs": TARGETS | {"pad": 0}}, ["target_prompt_logprobs", "pad"]),
        ({"target_prompt_logprobs": SPARSE | {"sparse_crow_indices": [0, 2]}}, ["target_prompt_logprobs", "2 row"]),
        (
            {"target_prompt_logprobs": SPARSE | {"sparse_crow_indices": [0, 1, 3]}},
            ["target_prompt_logprobs", "2 values"],
        ),
        ({"target_prompt_logprobs": SPARSE | {"sparse_crow_indices": None}}, ["target_prompt_logprobs", "crow"]),
        ({"target_prompt_logprobs": SPARSE | {"sparse_col_indices": [1, 9]}}, ["target_prompt_logprobs", "9", "8"]),
        ({"target_prompt_logprobs": SPARSE | {"sparse_col_indices": [8, 8]}}, ["target_prompt_logprobs", "increasing"]),
        (
            {
                "target_prompt_logprobs": SPARSE
                | {"data": [], "sparse_crow_indices": [0, 0, 0], "sparse_col_indices": []}
            },
            ["target_prompt_logprobs", "no id"],
        ),
        ({"topk_sample_logprobs": -1}, ["topk_sample_logprobs"]),
        ({"seq_id": -1}, ["seq_id"]),
        ({"seq_id": 2**63}, ["seq_id"]),
        ({"base_model": "tiny/random"}, ["base_model", "unknown"]),
    ],
)
def test_a_bad_sample_is_refused_and_leaves_nothing(api: Api, jobs, changes: dict, words: list[str]) -> None:
    name = sampler(api)
    answer = api.post("/asample", asample(name, **changes))
    assert answer.status_code == 422, answer.text
    for word in words:
        assert word in answer.get_json()["detail"]
    assert jobs() == [] and api.poll(f"{name}:0").status_code == 404
    api.ok(api.post("/asample", asample(name)))


def test_an_unknown_sampler_is_not_found(api: Api) -> None:
    for name in ("nope", "s-" + "0" * 32 + ":sample:0", api.run(), "a:sample:0:ops"):
        assert api.post("/asample", asample(name)).status_code == 404
        assert api.get(f"/samplers/{name}").status_code == 404


def test_a_sampler_of_saved_weights_knows_them(api: Api, worker: Worker, jobs) -> None:
    run = api.run()
    session = run.partition(":")[0]
    api.ok(api.post("/save_weights_for_sampler", {"model_id": run, "path": "final", "seq_id": 1}))
    worker.step({"save_weights_for_sampler": worker.save("local", run, "final", "sampler")})
    path = f"tinker://{run}/sampler_weights/final"
    body = {"session_id": session, "sampling_session_seq_id": 3, "model_path": path}
    answer = api.ok(api.post("/create_sampling_session", body))
    assert answer == {"type": "create_sampling_session", "sampling_session_id": f"{session}:sample:3"}
    assert api.ok(api.post("/create_sampling_session", body)) == answer
    shown = api.ok(api.get(f"/samplers/{session}:sample:3"))
    assert shown == {"sampler_id": f"{session}:sample:3", "base_model": "tiny/random", "model_path": path}
    api.ok(api.post("/asample", asample(f"{session}:sample:3")))
    assert jobs()[0].message.adapter_dir == "tenants/local/sampler_weights/final"
    base = body | {"base_model": "tiny/random:peft:9"}
    assert api.ok(api.post("/create_sampling_session", base)) == answer
    other = api.post("/create_sampling_session", {**body, "model_path": None, "base_model": "tiny/random"})
    assert other.status_code == 422 and other.get_json()["error"]["code"] == "key_reused"


def test_a_sampler_of_the_base_model_has_no_path(api: Api) -> None:
    name = sampler(api)
    assert api.ok(api.get(f"/samplers/{name}")) == {
        "sampler_id": name,
        "base_model": "tiny/random",
        "model_path": None,
    }


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, 422, ["base_model", "model_path"]),
        ({"base_model": "no/such"}, 422, ["no/such", "tiny/random"]),
        ({"model_path": "tinker://a:train:0/sampler_weights/x"}, 404, ["x"]),
        ({"model_path": "/etc/passwd"}, 422, ["/etc/passwd"]),
        ({"base_model": "tiny/random", "sampling_session_seq_id": -1}, 422, ["sampling_session_seq_id"]),
        ({"base_model": "tiny/random", "session_id": "s-" + "0" * 32}, 404, ["session"]),
    ],
)
def test_a_bad_sampling_session_is_refused(api: Api, changes: dict, status: int, words: list[str]) -> None:
    body = {"session_id": api.session(), "sampling_session_seq_id": 0} | changes
    answer = api.post("/create_sampling_session", body)
    assert answer.status_code == status, answer.text
    for word in words:
        assert word in answer.get_json()["detail"]


def test_training_state_cannot_be_sampled_nor_the_wrong_base_model(api: Api, worker: Worker, store: Store) -> None:
    from dataclasses import replace

    api.services.registry.add_model(replace(MODEL, name="tiny/other", slug="tiny-other"))
    run = api.run()
    for seq, (route, kind) in enumerate((("save_weights", "training"), ("save_weights_for_sampler", "sampler")), 1):
        api.ok(api.post(f"/{route}", {"model_id": run, "path": "x", "seq_id": seq}))
        worker.step({route: worker.save("local", run, "x", kind)})
    body = {"session_id": run.partition(":")[0], "sampling_session_seq_id": 0}
    training = api.post("/create_sampling_session", body | {"model_path": f"tinker://{run}/weights/x"})
    assert training.status_code == 422 and "sampler_weights" in training.text
    path = {"model_path": f"tinker://{run}/sampler_weights/x", "base_model": "tiny/other"}
    wrong = api.post("/create_sampling_session", body | path)
    assert wrong.status_code == 422 and "tiny/other" in wrong.text and "tiny/random" in wrong.text
    into = {"model_id": run, "seq_id": 3, "path": f"tinker://{run}/sampler_weights/x", "optimizer": False}
    assert api.post("/load_weights", into).status_code == 422
