"""Every sampling parameter through the unmodified SDK, against what the trainer says of the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.stack import wire
from tests.stack.conftest import MODEL, Service

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

TEXT = list(b"the quick brown fox jumps over the lazy dog")
PROMPT = TEXT[:12]
VOCAB, EOS, UNK = 260, 258, 259


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


@pytest.fixture(scope="module")
def training(api: tinker.ServiceClient) -> tinker.TrainingClient:
    """A run whose adapter has learned a little."""
    training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=1).result()
    for _ in range(6):
        training.forward_backward([datum(TEXT)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    return training


@pytest.fixture(scope="module")
def sampling(training: tinker.TrainingClient) -> tinker.SamplingClient:
    return training.save_weights_and_get_sampling_client().result()


def datum(tokens: list[int], targets: np.ndarray | None = None) -> types.Datum:
    """A text whose own tokens are the targets, or others [N, K]."""
    wanted = np.array(tokens[1:]) if targets is None else targets
    inputs = {"target_tokens": wanted, "weights": np.ones(wanted.shape, np.float32)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def trained_logprobs(
    training: tinker.TrainingClient, tokens: list[int], targets: np.ndarray | None = None
) -> np.ndarray:
    """What the trainer gives for each token after the first, or for the targets."""
    output = training.forward([datum(tokens, targets)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"]
    return np.array(output.data).reshape(output.shape)


def trained_law(training: tinker.TrainingClient, tokens: list[int]) -> np.ndarray:
    """The whole next-token distribution [N, V] at each token but the last."""
    everything = np.tile(np.arange(VOCAB), (len(tokens) - 1, 1))
    return trained_logprobs(training, tokens, everything)


def tempered(logprobs_NV: np.ndarray, temperature: float) -> np.ndarray:
    return torch.from_numpy(logprobs_NV / temperature).log_softmax(-1).numpy()


def draw(sampling: tinker.SamplingClient, num_samples: int = 1, **params) -> list[types.SampledSequence]:
    sampled = sampling.sample(types.ModelInput.from_ints(PROMPT), num_samples, types.SamplingParams(**params))
    return list(sampled.result().sequences)


def test_sampled_logprobs_at_temperature_one_are_the_trainers_whatever_is_cut(training, sampling) -> None:
    for sequence in draw(sampling, 4, max_tokens=24, temperature=1.0, top_k=20, top_p=0.9, seed=3):
        trained = trained_logprobs(training, PROMPT + list(sequence.tokens))
        np.testing.assert_allclose(sequence.logprobs, trained[len(PROMPT) - 1 :], atol=1e-4)


def test_sampled_logprobs_are_those_of_the_tempered_law_before_the_cuts_and_untempered_when_greedy(
    training, sampling
) -> None:
    for temperature, divisor in ((0.5, 0.5), (2.0, 2.0), (0.0, 1.0)):
        (sequence,) = draw(sampling, max_tokens=8, temperature=temperature, top_k=5, top_p=0.8, seed=1)
        law_NV = tempered(trained_law(training, PROMPT + list(sequence.tokens)), divisor)[len(PROMPT) - 1 :]
        expected = law_NV[np.arange(len(sequence.tokens)), sequence.tokens]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_greedy_takes_the_likeliest_each_time_and_no_token_leaves_the_cuts(training, sampling) -> None:
    greedy = draw(sampling, 3, max_tokens=10, temperature=0.0)
    assert len({tuple(one.tokens) for one in greedy}) == 1
    law_NV = trained_law(training, PROMPT + list(greedy[0].tokens))[len(PROMPT) - 1 :]
    assert law_NV.argmax(-1).tolist() == list(greedy[0].tokens)
    (best,) = draw(sampling, max_tokens=10, temperature=1.7, top_k=1, seed=5)
    assert best.tokens == greedy[0].tokens
    likeliest = set(law_NV[0].argsort()[-3:].tolist())
    first = {one.tokens[0] for one in draw(sampling, 60, max_tokens=1, temperature=3.0, top_k=3, seed=5)}
    assert first == likeliest


def test_a_seed_draws_the_same_distinct_set_again_and_none_is_an_unseeded_one(sampling) -> None:
    sets = [[tuple(one.tokens) for one in draw(sampling, 8, max_tokens=12, seed=seed)] for seed in (7, 7, 8)]
    assert sets[0] == sets[1] and len(set(sets[0])) == 8
    assert set(sets[0]).isdisjoint(sets[2])
    unseeded = [[tuple(one.tokens) for one in draw(sampling, 2, max_tokens=12)] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_without_max_tokens_a_sample_runs_to_the_end_of_the_context(sampling) -> None:
    prompt = types.ModelInput.from_ints((TEXT * 12)[:500])
    (one,) = sampling.sample(prompt, 1, types.SamplingParams(stop=[])).result().sequences
    assert (len(one.tokens), one.stop_reason) == (12, "length")


@pytest.fixture(scope="module")
def special(sampling) -> tuple[int, list[int]]:
    """A seed whose draw has the special tokens <unk> and then <eos> in it, and the draw, which no stop ends."""
    params = {"max_tokens": 300, "temperature": 4.0, "stop": []}
    for seed in range(40):
        tokens = list(draw(sampling, seed=seed, **params)[0].tokens)
        if EOS in tokens and UNK in tokens[: tokens.index(EOS)] and tokens.index(UNK) > 4:
            assert len(tokens) == 300
            return seed, tokens
    raise AssertionError("no draw has both tokens: choose another temperature")


@pytest.mark.parametrize("form", ["string", "strings", "ids", "part", "unknown", "absent", "absurd"])
def test_what_stops_a_sample_stays_in_it_and_stops_beside_the_end_token(sampling, special, form: str) -> None:
    seed, free = special
    letter = next(token for token in free[2:] if token < 128)
    stop, last = {
        "string": (chr(letter), letter),
        "strings": (["no such text", chr(letter)], letter),
        "ids": ([UNK, PROMPT[0]], None),
        "part": ("<un", UNK),
        "unknown": ("<unk>", UNK),
        "absent": (None, EOS),
        "absurd": (["no such text"], EOS),
    }[form]
    (one,) = draw(sampling, seed=seed, max_tokens=300, temperature=4.0, stop=stop)
    stops = {last, EOS} if last is not None else {*stop, EOS}
    end = next(i for i, token in enumerate(free) if token in stops)
    assert list(one.tokens) == free[: end + 1]
    assert one.stop_reason == "stop" and len(one.logprobs) == end + 1


def base_sampler(http: httpx.Client) -> str:
    body = {"session_id": wire.new_session(http), "sampling_session_seq_id": 0, "base_model": MODEL}
    return str(http.post("/create_sampling_session", json=body).json()["sampling_session_id"])


def test_ids_and_texts_may_be_mixed_in_a_stop(service: Service) -> None:
    http = service.http()
    sampler = base_sampler(http)

    def tokens(seq: int, stop: list[int | str]) -> list[int]:
        promise = wire.asample(http, sampler, seq, PROMPT, stop=stop, max_tokens=300, temperature=4.0, seed=1).json()
        return list(wire.poll(http, promise["request_id"]).json()["sequences"][0]["tokens"])

    free = tokens(0, [])
    assert len(free) == 300
    letter = next(token for token in free[3:] if token < 128)
    mixed = (([free[20], chr(letter)], {free[20], letter}), (["no such text", free[20]], {free[20]}))
    for seq, (stop, ends) in enumerate(mixed, 1):
        end = next(i for i, token in enumerate(free) if token in {*ends, EOS})
        assert tokens(seq, stop) == free[: end + 1]


def test_prompt_logprobs_are_the_trainers_with_none_at_first_and_only_the_last_when_asked(training, sampling) -> None:
    trained = trained_logprobs(training, TEXT)
    prompt = types.ModelInput.from_ints(TEXT)
    for last in (None, 5):
        scored = sampling.compute_logprobs(prompt, prompt_logprobs_last_n=last).result()
        unscored = 1 if last is None else len(TEXT) - last
        assert len(scored) == len(TEXT) and scored[:unscored] == [None] * unscored
        np.testing.assert_allclose(scored[unscored:], trained[unscored - 1 :], atol=1e-4)


def test_the_likeliest_tokens_of_prompt_and_sample_are_the_trainers_sorted(training, sampling) -> None:
    result = sampling.sample(
        types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=6, temperature=0.5, seed=2, stop=[]),
        include_prompt_logprobs=True, topk_prompt_logprobs=5, topk_sample_logprobs=3, prompt_logprobs_last_n=4,
    ).result()  # fmt: skip
    (sequence,) = result.sequences
    law_NV = trained_law(training, TEXT + list(sequence.tokens))
    prompt_rows = result.topk_prompt_logprobs
    assert prompt_rows[:-4] == [None] * (len(TEXT) - 4) and len(prompt_rows) == len(TEXT)
    sampled_NV = tempered(law_NV, 0.5)[len(TEXT) - 1 :]
    for row, law_V, width in (
        *((row, law_V, 5) for row, law_V in zip(prompt_rows[-4:], law_NV[len(TEXT) - 5 :], strict=False)),
        *((row, law_V, 3) for row, law_V in zip(sequence.topk_logprobs, sampled_NV, strict=True)),
    ):
        np.testing.assert_allclose([value for _, value in row], np.sort(law_V)[::-1][:width], atol=1e-4)
        np.testing.assert_allclose([value for _, value in row], law_V[[token for token, _ in row]], atol=1e-4)


@pytest.mark.parametrize("sparse", [False, True])
def test_named_ids_have_the_trainers_logprobs_in_the_layout_they_were_asked_in(training, sampling, sparse) -> None:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (len(TEXT) - 1, 4), generator=generator)
    ids[torch.rand(ids.shape, generator=generator) < 0.8] = -1
    asked = types.TensorData.from_torch_sparse(ids, pad_value=-1) if sparse else types.TensorData.from_torch(ids)
    assert (asked.sparse_crow_indices is not None) == sparse
    result = sampling.sample(
        types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=1), target_prompt_logprobs=asked
    ).result()
    got = result.target_prompt_logprobs
    assert (got.dtype, got.shape, got.sparse_crow_indices) == ("float32", [len(TEXT) - 1, 4], asked.sparse_crow_indices)
    law_NV = torch.from_numpy(trained_law(training, TEXT))
    expected = law_NV.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    torch.testing.assert_close(got.to_torch(), expected.float(), atol=1e-4, rtol=0)
    assert result.prompt_logprobs is None


def test_alternatives_to_the_prompts_tokens_are_draws_with_the_trainers_logprobs(training, sampling) -> None:
    def ask() -> types.PromptAltTokens:
        return (
            sampling.sample(
                types.ModelInput.from_ints(TEXT), 1, types.SamplingParams(max_tokens=1, seed=4), prompt_alt_tokens_k=6
            )
            .result()
            .prompt_alt_tokens
        )

    drawn = ask()
    tokens = drawn.tokens.to_torch()
    assert tokens.shape == (len(TEXT) - 1, 6) and tokens.dtype == torch.int64
    law_NV = torch.from_numpy(trained_law(training, TEXT))
    torch.testing.assert_close(drawn.logprobs.to_torch(), law_NV.gather(1, tokens).float(), atol=1e-4, rtol=0)
    assert torch.equal(ask().tokens.to_torch(), tokens)
    assert len(tokens.unique()) > 10


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"temperature": -1.0}, "sampling_params.temperature is -1.0"),
        ({"top_p": 0.0}, "sampling_params.top_p is 0.0"),
        ({"top_k": 0}, "sampling_params.top_k is 0"),
        ({"max_tokens": 501}, "max_tokens is 501; a prompt of 12 tokens leaves room for 500"),
        ({"stop": [""]}, r"sampling_params.stop\[0\]"),
        ({"stop": [VOCAB]}, "sampling_params.stop holds 260"),
    ],
)
def test_a_parameter_that_makes_no_sense_is_refused_by_name(sampling, params, words) -> None:
    with pytest.raises(tinker.UnprocessableEntityError, match=words):
        draw(sampling, **({"max_tokens": 1} | params))


def test_stability_info_is_refused_naming_what_to_use(api: tinker.ServiceClient) -> None:
    client = api.create_sampling_client(base_model=MODEL, record_stability_info=True).result()
    with pytest.raises(tinker.UnprocessableEntityError, match=r"record_stability_info.*importance_sampling"):
        draw(client, max_tokens=1)


def test_a_sample_over_the_samplers_cache_fails_as_the_callers_and_names_the_setting(own_service: Service) -> None:
    own_service.env["OPENRL_SAMPLER_KV_TOKENS"] = "64"
    http = own_service.start().http()
    sampler = base_sampler(http)
    refused, open_ended = (
        wire.asample(http, sampler, seq, PROMPT, stop=[], **params).json()["request_id"]
        for seq, params in enumerate(({"max_tokens": 100}, {}))
    )
    failure = wire.poll(http, refused).json()
    assert failure["category"] == "user"
    assert "OPENRL_SAMPLER_KV_TOKENS" in failure["error"] and "111" in failure["error"] and "64" in failure["error"]
    (one,) = wire.poll(http, open_ended).json()["sequences"]
    assert len(PROMPT) + len(one["tokens"]) - 1 == 64
