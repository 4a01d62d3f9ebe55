"""The unmodified Tinker SDK against the running service."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import tinker
from tinker import types

from tests.stack.conftest import MODEL, Service

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

TEXT = b"the quick brown fox jumps over the lazy dog"


@pytest.fixture
def rest(service: Service) -> tinker.RestClient:
    return tinker.RestClient(api_key="tml-local", base_url=service.base_url)


@pytest.fixture
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


def cross_entropy_datum(tokens: bytes | list[int] = TEXT) -> types.Datum:
    ids = list(tokens)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def test_fine_tuning_learns_a_sentence_and_samples_it_back(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
    text = b"open, " * 8
    data = [cross_entropy_datum(text)]
    losses = []
    for _ in range(80):
        pair = (
            training.forward_backward(data, "cross_entropy"),
            training.optim_step(types.AdamParams(learning_rate=5e-3)),
        )
        losses.append(pair[0].result().metrics["loss:sum"])
        assert pair[1].result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.3 * losses[0], losses

    sampling = training.save_weights_and_get_sampling_client().result()
    answer = sampling.sample(
        types.ModelInput.from_ints(list(text[:12])), 1, types.SamplingParams(max_tokens=18, temperature=0.0)
    ).result()
    assert bytes(answer.sequences[0].tokens) == text[12:30]
    assert answer.sequences[0].stop_reason == "length"


def test_an_old_sampling_client_keeps_its_weights_through_further_training(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=4).result()
    prompt, params = types.ModelInput.from_ints(list(TEXT[:8])), types.SamplingParams(max_tokens=24, temperature=0.0)
    old = training.save_weights_and_get_sampling_client().result()
    before = old.sample(prompt, 1, params).result().sequences[0]
    for _ in range(5):
        training.forward_backward([cross_entropy_datum()], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=2e-2)).result()
    new = training.save_weights_and_get_sampling_client().result()
    changed = new.sample(prompt, 1, params).result().sequences[0]
    again = old.sample(prompt, 1, params).result().sequences[0]
    assert again.tokens == before.tokens and again.logprobs == before.logprobs
    assert changed.logprobs != before.logprobs


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_policy_gradient_raises_the_probability_of_rewarded_samples(api: tinker.ServiceClient, loss_fn: str) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=5).result()
    prompt = list(TEXT[:8])
    sampling = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=7)
    sequences = sampling.sample(types.ModelInput.from_ints(prompt), 4, params).result().sequences
    assert len({tuple(sequence.tokens) for sequence in sequences}) > 1
    data = []
    for index, sequence in enumerate(sequences):
        ids = prompt + list(sequence.tokens)
        pad = len(prompt) - 1
        advantage = 1.0 if index == 0 else -1.0 / 3
        data.append(
            types.Datum(
                model_input=types.ModelInput.from_ints(ids[:-1]),
                loss_fn_inputs={
                    "target_tokens": ids[1:],
                    "logprobs": [0.0] * pad + list(sequence.logprobs),
                    "advantages": [0.0] * pad + [advantage] * len(sequence.tokens),
                },
            )
        )
    first = training.forward_backward(data, loss_fn)
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    result = first.result()
    for datum, sequence, output in zip(data, sequences, result.loss_fn_outputs, strict=True):
        learner = np.array(output["logprobs"].data)[len(prompt) - 1 :]
        np.testing.assert_allclose(learner, sequence.logprobs, atol=1e-4)
        assert len(output["logprobs"].data) == len(datum.loss_fn_inputs["target_tokens"].data)
    # At ratio 1 the loss is minus the sum of the advantages, which cancel.
    assert abs(result.metrics["loss:sum"]) < 1e-3
    after = training.forward(data, loss_fn).result()
    rewarded = [np.array(r.loss_fn_outputs[0]["logprobs"].data)[len(prompt) - 1 :].sum() for r in (result, after)]
    assert rewarded[1] > rewarded[0]


def test_a_run_resumes_from_its_checkpoint_with_and_without_the_optimizer(
    api: tinker.ServiceClient, rest: tinker.RestClient
) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=6).result()
    adam = types.AdamParams(learning_rate=1e-2)
    for _ in range(3):
        training.forward_backward([cross_entropy_datum()], "cross_entropy")
        training.optim_step(adam).result()
    path = training.save_state("three-steps").result().path
    assert path == f"tinker://{training.model_id}/weights/three-steps"

    def next_loss(resumed: tinker.TrainingClient) -> float:
        resumed.forward_backward([cross_entropy_datum()], "cross_entropy")
        resumed.optim_step(adam).result()
        return float(resumed.forward([cross_entropy_datum()], "cross_entropy").result().metrics["loss:sum"])

    with_optimizer = next_loss(api.create_training_client_from_state_with_optimizer(path).result())
    weights_only = next_loss(api.create_training_client_from_state(path).result())
    undisturbed = next_loss(training)
    assert with_optimizer == undisturbed
    assert weights_only != undisturbed
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (MODEL, 4, True)


def test_bad_input_is_a_clear_error_and_the_run_stays_usable(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4).result()
    out_of_vocabulary = cross_entropy_datum([1, 2, 100_000])
    with pytest.raises(tinker.TinkerError, match="100000"):
        training.forward_backward([out_of_vocabulary], "cross_entropy").result()
    with pytest.raises(tinker.TinkerError, match=r"accumulated|void"):
        training.optim_step(types.AdamParams()).result()
    with pytest.raises(tinker.TinkerError, match=r"data\[0\]"):
        short = cross_entropy_datum()
        short.loss_fn_inputs["weights"] = types.TensorData(data=[1.0], dtype="float32", shape=[1])
        training.forward_backward([short], "cross_entropy").result()
    training.forward_backward([cross_entropy_datum()], "cross_entropy")
    with pytest.raises(tinker.TinkerError):
        training.optim_step(types.AdamParams()).result()
    loss = training.forward_backward([cross_entropy_datum()], "cross_entropy").result().metrics["loss:sum"]
    assert math.isfinite(loss) and loss > 0
    assert training.optim_step(types.AdamParams()).result().metrics["grad_norm"] > 0


def test_an_operation_that_fails_in_the_worker_is_a_request_failed_error(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4).result()
    with pytest.raises(tinker.RequestFailedError) as failure:
        training.optim_step(types.AdamParams()).result()
    assert "forward_backward" in str(failure.value)


def test_requests_join_and_leave_the_batch_between_tokens(api: tinker.ServiceClient) -> None:
    sampling = api.create_sampling_client(base_model=MODEL).result()
    prompt = types.ModelInput.from_ints(list(TEXT[:4]))
    sampling.sample(prompt, 1, types.SamplingParams(max_tokens=1)).result()
    long = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=256, stop=[]))
    short = sampling.sample(prompt, 1, types.SamplingParams(max_tokens=4, stop=[]))
    assert len(short.result().sequences[0].tokens) == 4
    assert not long.future().done()
    assert len(long.result().sequences[0].tokens) == 256


def test_compute_logprobs_agrees_with_the_trainer(api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=9).result()
    training.forward_backward([cross_entropy_datum()], "cross_entropy")
    training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    trained = training.forward([cross_entropy_datum()], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampling = training.save_weights_and_get_sampling_client().result()
    scored = sampling.compute_logprobs(types.ModelInput.from_ints(list(TEXT))).result()
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=1e-4)


def test_runs_and_checkpoints_are_listed(api: tinker.ServiceClient, rest: tinker.RestClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4).result()
    training.save_state("listed").result()
    named = training.save_weights_for_sampler("listed").result().path
    assert {c.checkpoint_id for c in rest.list_checkpoints(training.model_id).result().checkpoints} == {
        "weights/listed",
        "sampler_weights/listed",
    }
    assert rest.get_training_run(training.model_id).result().lora_rank == 4
    assert training.model_id in {run.training_run_id for run in rest.list_training_runs().result().training_runs}
    sampled = api.create_sampling_client(model_path=named).result()
    assert sampled.get_base_model() == MODEL
