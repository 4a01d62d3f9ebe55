"""The torch engine on tiny models, against the plain forward of the same model and against itself."""

import dataclasses
import functools
from collections.abc import Sequence
from threading import Event

import pytest
import torch

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.model import attention
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.model.logprobs import head_logits
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.sampler.requests import Finished, Limits, Result, read
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from tests.tiny import make_tiny_model

torch.set_num_threads(1)

PROMPT = tuple(b"the quick brown fox")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> LoadedModel:
    return load(make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama"))


def text(tokens: Sequence[int]) -> str:
    names = {256: "<pad>", 257: "<bos>", 258: "<eos>", 259: "<unk>"}
    pieces = [names[token].encode() if token > 255 else bytes([token]) for token in tokens]
    return b"".join(pieces).decode(errors="replace")


@functools.cache
def adapter_of(loaded: LoadedModel, seed: int, rank: int) -> Adapter:
    adapter = Adapter.init(loaded, rank=rank, seed=seed, train_attn=True, train_mlp=True, train_unembed=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b_OR in adapter.weights.values():
            b_OR.normal_(0, 0.05, generator=generator)
    return adapter


def engine(loaded: LoadedModel, **options) -> TorchEngine:
    def adapter(name: str) -> Adapter:
        if name == "broken":
            raise ValueError("bad header")
        return adapter_of(loaded, int(name), 4 + int(name))

    sizes = {"num_slots": 8, "kv_tokens": 4096, "prefill_tokens": 64} | options
    return TorchEngine(loaded, Versions(adapter, max_idle=2), text, **sizes)


def request(loaded: LoadedModel, name: str = "r", tenant: str = "local", cache_tokens: int = 4096, **fields):
    message = Sample(**({"adapter_dir": "", "prompt": PROMPT, "num_samples": 1, "max_tokens": 8, "seed": 1} | fields))
    limits = Limits(
        vocab_size=loaded.vocab_size,
        max_context=loaded.max_context,
        cache_tokens=cache_tokens,
        eos_token_ids=loaded.eos_token_ids,
    )
    return read(SampleJob(tenant=tenant, request_id=name, message=message, submitted=0.0), limits)


def run(running: TorchEngine, *requests, steps: int = 2000) -> dict[str, Finished]:
    for one in requests:
        running.add(one)
    ended: dict[str, Finished] = {}
    while running.requests:
        steps -= 1
        assert steps, "the engine doesn't end"
        for one in running.step():
            ended[one.request.job.request_id] = one
    return ended


def run_until(running: TorchEngine, one) -> list[str]:
    """Step until `one` ends; return the names of what ended with it."""
    running.add(one)
    while one in running.requests:
        ended = running.step()
    return [each.request.job.request_id for each in ended]


def sample(loaded: LoadedModel, options: dict | None = None, **fields) -> Result:
    ended = run(engine(loaded, **(options or {})), request(loaded, **fields))["r"]
    assert ended.result is not None, ended.error
    return ended.result


def tokens_of(result: Result) -> list[list[int]]:
    return [one.tokens for one in result.sequences]


@torch.inference_mode()
def plain_logits(loaded: LoadedModel, tokens: Sequence[int], adapter: Adapter | None = None) -> torch.Tensor:
    """Logits [T, V] of one packed forward, without a cache."""
    segments = [Segment(0, len(tokens), adapter)]
    with attention.packed([len(tokens)]), routing(segments):
        hidden_TD = attention.hidden_states(
            loaded, torch.tensor(tokens), attention.positions([len(tokens)], loaded.device)
        )
    return head_logits(loaded, hidden_TD, segments)


def plain_greedy(loaded: LoadedModel, prompt: Sequence[int], count: int, adapter: Adapter | None = None) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain_logits(loaded, tokens, adapter)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("adapter_dir", ["", "3"])
def test_greedy_equals_the_plain_forward_token_by_token(loaded, adapter_dir):
    adapter = adapter_of(loaded, 3, 7) if adapter_dir else None
    result = sample(loaded, adapter_dir=adapter_dir, temperature=0.0, max_tokens=12, stop_at_eos=False)
    assert tokens_of(result) == [plain_greedy(loaded, PROMPT, 12, adapter)]


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_logprobs_are_of_the_tempered_distribution_whatever_is_cut(loaded, temperature):
    result = sample(loaded, temperature=temperature, top_k=5, top_p=0.9, num_samples=2, adapter_dir="2")
    for one in result.sequences:
        logits_TV = plain_logits(loaded, [*PROMPT, *one.tokens], adapter_of(loaded, 2, 6))[len(PROMPT) - 1 : -1]
        expected_TV = (logits_TV / (temperature or 1.0)).log_softmax(-1)
        expected_T = expected_TV.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
        assert one.logprobs == pytest.approx(expected_T.tolist(), abs=2e-4)


def test_a_seed_gives_the_same_distinct_set_again_and_another_seed_another_set(loaded):
    first, again = (tokens_of(sample(loaded, num_samples=8, seed=7)) for _ in range(2))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 8
    assert tokens_of(sample(loaded, num_samples=8, seed=8)) != first


def test_a_hundred_greedy_samples_are_one(loaded):
    assert len({tuple(tokens) for tokens in tokens_of(sample(loaded, num_samples=100, temperature=0.0))}) == 1


@pytest.mark.parametrize("options", [{"num_slots": 1}, {"num_slots": 2}, {"kv_tokens": 512}, {"prefill_tokens": 3}])
def test_neither_slots_nor_budgets_change_what_is_drawn(loaded, options):
    wanted = sample(loaded, num_samples=6, seed=5)
    tight = sample(loaded, options, num_samples=6, seed=5)
    assert tokens_of(tight) == tokens_of(wanted)
    for one, other in zip(tight.sequences, wanted.sequences, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("options", [{"num_slots": 4, "kv_tokens": 512}, {"num_slots": 3, "kv_tokens": 1024}])
def test_sequences_that_grow_move_and_give_way_draw_what_they_draw_alone(loaded, options):
    requests = [
        request(loaded, f"r{i}", f"t{i % 3}", cache_tokens=512, adapter_dir=str(i % 3 or ""), prompt=PROMPT * (1 + i),
                seed=i, num_samples=1 + i % 2, max_tokens=None if i == 1 else 120 * i + 10, stop_at_eos=i % 2 == 0,
                topk_sample_logprobs=i % 2 * 3, prompt_logprobs=True)
        for i in range(4)
    ]  # fmt: skip
    together = run(engine(loaded, **options), *requests, steps=5000)
    for one in requests:
        got, wanted = together[one.job.request_id].result, run(engine(loaded), one)[one.job.request_id].result
        assert tokens_of(got) == tokens_of(wanted)
        assert got.prompt_logprobs[1:] == pytest.approx(wanted.prompt_logprobs[1:], abs=1e-5)
        for mine, other in zip(got.sequences, wanted.sequences, strict=True):
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-5)
            assert (mine.topk is None) == (other.topk is None)
            assert mine.topk is None or (mine.topk.tokens[:, 0] == other.topk.tokens[:, 0]).all()


def test_a_newcomer_of_another_tenant_is_answered_while_a_thousand_long_sequences_run(loaded):
    running = engine(loaded)
    running.add(request(loaded, "many", "big", num_samples=1000, max_tokens=200, stop_at_eos=False))
    for _ in range(20):
        running.step()
    running.add(request(loaded, "one", "small", max_tokens=1))
    assert [one.request.job.request_id for one in running.step()] == ["one"]


def test_others_draw_on_while_weights_are_loaded(loaded):
    go = Event()

    def adapter(name: str) -> Adapter:
        assert go.wait(10)
        return adapter_of(loaded, 3, 7)

    versions = Versions(adapter, max_idle=2)
    running = TorchEngine(loaded, versions, text, num_slots=4, kv_tokens=4096, prefill_tokens=64)
    running.add(request(loaded, "slow", adapter_dir="3"))
    assert run_until(running, request(loaded, "base", max_tokens=30)) == ["base"]
    go.set()
    assert tokens_of(run(running)["slow"].result) == tokens_of(sample(loaded, adapter_dir="3"))


def test_a_request_draws_the_same_beside_others_of_other_adapters(loaded):
    requests = [
        request(loaded, f"r{i}", f"t{i % 3}", adapter_dir=str(i % 4 or ""), prompt=PROMPT[: 5 + i], seed=i,
                num_samples=1 + i % 3, temperature=[0.0, 1.0, 0.7][i % 3], max_tokens=5 + i)
        for i in range(10)
    ]  # fmt: skip
    together = run(engine(loaded), *requests)
    for one in requests:
        alone = run(engine(loaded), one)[one.job.request_id]
        assert tokens_of(together[one.job.request_id].result) == tokens_of(alone.result)


def test_a_short_request_submitted_during_a_long_one_returns_first(loaded):
    running = engine(loaded)
    running.add(request(loaded, "long", max_tokens=256, stop_at_eos=False))
    for _ in range(5):
        assert running.step() == []
    ended = run(running, request(loaded, "short", max_tokens=4, stop_at_eos=False))
    assert list(ended) == ["short", "long"]
    assert len(ended["long"].result.sequences[0].tokens) == 256


def test_a_long_prompt_does_not_stop_running_sequences(loaded):
    running = engine(loaded, prefill_tokens=16)
    running.add(request(loaded, "runs", max_tokens=20, stop_at_eos=False, prompt=(1, 2)))
    running.step()
    ended = run(running, request(loaded, "long", prompt=tuple(range(200)) * 2, max_tokens=1))
    assert list(ended) == ["runs", "long"]


def test_prompt_logprobs_equal_the_plain_forward_also_in_parts(loaded):
    prompt = tuple((7 * i) % 256 for i in range(150))
    result = sample(loaded, prompt=prompt, prompt_logprobs=True, topk_prompt_logprobs=4, max_tokens=1,
                    adapter_dir="1", temperature=0.3)  # fmt: skip
    expected_TV = plain_logits(loaded, prompt, adapter_of(loaded, 1, 5)).log_softmax(-1)
    expected = expected_TV[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    top = result.topk_prompt_logprobs
    assert result.prompt_logprobs[0] is None and top.logprobs[0].tolist() == [-99999.0] * 4
    assert result.prompt_logprobs[1:] == pytest.approx(expected.tolist(), abs=2e-4)
    assert len(top.tokens) == len(prompt)
    torch.testing.assert_close(torch.from_numpy(top.logprobs[1:]), expected_TV[:-1].topk(4).values, atol=2e-4, rtol=0)


def test_only_the_last_tokens_of_a_prompt_are_scored_when_asked_and_to_the_same_values(loaded):
    prompt = tuple((7 * i) % 256 for i in range(150))
    fields = {"prompt": prompt, "prompt_logprobs": True, "topk_prompt_logprobs": 2, "max_tokens": 1}
    whole = sample(loaded, **fields)
    for last in (1, 60, 149):
        some = sample(loaded, prompt_logprobs_last_n=last, **fields)
        assert some.prompt_logprobs[:-last] == [None] * (150 - last)
        assert (some.topk_prompt_logprobs.logprobs[:-last] == -99999.0).all()
        assert some.prompt_logprobs[-last:] == pytest.approx(whole.prompt_logprobs[-last:], abs=1e-5)
        assert (some.topk_prompt_logprobs.tokens[-last:] == whole.topk_prompt_logprobs.tokens[-last:]).all()


@pytest.mark.parametrize("sparse", [False, True])
def test_named_ids_are_scored_at_their_positions_and_cells_without_one_are_0(loaded, sparse):
    prompt = tuple((7 * i) % 256 for i in range(150))
    generator = torch.Generator().manual_seed(3)
    ids_TK = torch.randint(0, 260, (149, 3), generator=generator)
    ids_TK[torch.rand(149, 3, generator=generator) < 0.6] = -1
    ids_TK[:90] = -1
    fields = {"target_ids": tuple(ids_TK.flatten().tolist())}
    if sparse:
        listed_TK = ids_TK >= 0
        fields = {
            "target_ids": tuple(ids_TK[listed_TK].tolist()),
            "target_crow": (0, *listed_TK.sum(1).cumsum(0).tolist()),
            "target_columns": tuple(listed_TK.nonzero()[:, 1].tolist()),
        }
    result = sample(
        loaded, prompt=prompt, max_tokens=1, adapter_dir="1", temperature=0.3, target_shape=(149, 3), **fields
    )
    got = result.target_logprobs
    logprobs_TV = plain_logits(loaded, prompt, adapter_of(loaded, 1, 5)).log_softmax(-1)[:-1]
    expected_TK = logprobs_TV.gather(1, ids_TK.clamp(min=0)).masked_fill(ids_TK < 0, 0.0)
    assert got.shape == (149, 3) and (got.crow is not None) == sparse
    values = expected_TK[ids_TK >= 0] if sparse else expected_TK.flatten()
    assert got.values.tolist() == pytest.approx(values.tolist(), abs=2e-4)
    assert result.prompt_logprobs is None


def test_alternatives_are_independent_draws_of_the_tempered_distribution_with_the_models_own_logprobs(loaded):
    fields = {"prompt": PROMPT, "max_tokens": 1, "prompt_alt_tokens_k": 400, "temperature": 0.5, "seed": 3, "top_k": 1}
    drawn = sample(loaded, **fields).alternatives
    logits_TV = plain_logits(loaded, PROMPT)[:-1]
    expected_TK = logits_TV.log_softmax(-1).gather(1, torch.from_numpy(drawn.tokens))
    assert drawn.tokens.shape == (len(PROMPT) - 1, 400)
    torch.testing.assert_close(torch.from_numpy(drawn.logprobs), expected_TK, atol=2e-4, rtol=0)
    seen_TV = torch.stack([torch.bincount(torch.from_numpy(row), minlength=260) / 400 for row in drawn.tokens])
    assert (seen_TV - (logits_TV / 0.5).softmax(-1)).abs().max() < 0.1
    in_parts = sample(loaded, {"prefill_tokens": 3}, **fields).alternatives
    assert (in_parts.tokens == drawn.tokens).mean() > 0.999


def test_alternatives_leave_the_continuations_as_they_are_and_are_greedy_at_temperature_zero(loaded):
    assert tokens_of(sample(loaded, prompt_alt_tokens_k=4)) == tokens_of(sample(loaded))
    greedy = sample(loaded, prompt_alt_tokens_k=3, temperature=0.0).alternatives
    best_T = plain_logits(loaded, PROMPT)[:-1].argmax(-1)
    assert greedy.tokens.tolist() == [[token] * 3 for token in best_T.tolist()]


def test_a_prompt_of_one_token_has_nothing_to_score(loaded):
    result = sample(loaded, prompt=(5,), prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2)
    assert result.prompt_logprobs == [None] and result.topk_prompt_logprobs.tokens.shape == (1, 0)
    assert result.alternatives.tokens.shape == result.alternatives.logprobs.shape == (0, 2)


def test_named_ids_that_the_vocabulary_lacks_are_refused_by_the_sampler_too(loaded):
    with pytest.raises(InvalidRequest, match="target_prompt_logprobs"):
        request(loaded, prompt=(1, 2), target_ids=(260,), target_shape=(1, 1))


def test_a_stop_string_that_ends_inside_a_token_leaves_the_token_whole(loaded):
    seed = next(s for s in range(200) if 259 in tokens_of(sample(loaded, seed=s, max_tokens=30, stop_at_eos=False))[0])
    free = sample(loaded, seed=seed, max_tokens=30, stop_at_eos=False).sequences[0].tokens
    one = sample(loaded, seed=seed, max_tokens=30, stop_at_eos=False, stop_strings=("<un",)).sequences[0]
    assert one.tokens == free[: free.index(259) + 1] and one.stop_reason == "stop"


def test_a_stop_of_the_callers_adds_to_the_models_own_end_token(loaded):
    seed = next(s for s in range(200) if 258 in tokens_of(sample(loaded, seed=s, max_tokens=30, stop_at_eos=False))[0])
    one = sample(loaded, seed=seed, max_tokens=30, stop_strings=("never ever",)).sequences[0]
    assert one.tokens[-1] == 258 and one.stop_reason == "stop"


def test_top_logprobs_of_samples_have_a_row_per_token_with_the_drawn_one_among_them_when_greedy(loaded):
    one = sample(loaded, topk_sample_logprobs=3, temperature=0.0).sequences[0]
    assert one.topk.tokens.shape == (len(one.tokens), 3)
    assert one.topk.tokens[:, 0].tolist() == one.tokens and one.topk.logprobs[:, 0].tolist() == one.logprobs


def test_what_was_not_asked_for_is_absent(loaded):
    result = sample(loaded)
    assert result.prompt_logprobs is None and result.topk_prompt_logprobs is None and result.sequences[0].topk is None


@pytest.mark.parametrize("form", ["token", "string", "mixed"])
def test_a_stop_ends_the_sequence_and_stays_in_it(loaded, form):
    free = sample(loaded, max_tokens=40, stop_at_eos=False).sequences[0].tokens
    at = next(i for i, token in enumerate(free) if i >= 3 and token not in free[:i] and token < 128)
    stops = {
        "token": {"stop_tokens": (free[at],)},
        "string": {"stop_strings": (text([free[at]]),)},
        "mixed": {"stop_strings": ("never ever",), "stop_tokens": (free[at],)},
    }[form]
    one = sample(loaded, max_tokens=40, stop_at_eos=False, **stops).sequences[0]
    assert (one.tokens, one.stop_reason, len(one.logprobs)) == (free[: at + 1], "stop", at + 1)


def test_without_stop_the_models_own_end_token_stops_and_with_an_empty_stop_it_does_not(loaded):
    seed = next(s for s in range(200) if 258 in tokens_of(sample(loaded, seed=s, max_tokens=30, stop_at_eos=False))[0])
    endless = sample(loaded, seed=seed, max_tokens=30, stop_at_eos=False).sequences[0]
    ended = sample(loaded, seed=seed, max_tokens=30).sequences[0]
    assert (len(endless.tokens), endless.stop_reason) == (30, "length")
    assert ended.tokens == endless.tokens[: endless.tokens.index(258) + 1] and ended.stop_reason == "stop"


def test_without_max_tokens_a_sequence_fills_the_context(loaded):
    one = sample(loaded, prompt=tuple(range(200)) * 2 + (1,) * 100, max_tokens=None, stop_at_eos=False).sequences[0]
    assert (len(one.tokens), one.stop_reason) == (12, "length")


def test_a_prompt_as_long_as_the_context_can_be_scored(loaded):
    result = sample(loaded, prompt=(5,) * 512, max_tokens=1, prompt_logprobs=True)
    assert len(result.prompt_logprobs) == 512 and len(result.sequences[0].tokens) == 1


def test_a_cache_shorter_than_the_context_bounds_what_is_asked_by_name_and_what_is_left_open(loaded):
    fields = {"cache_tokens": 64, "prompt": (1,) * 60}
    with pytest.raises(InvalidRequest, match=r"need 159 .* has 64"):
        request(loaded, max_tokens=100, **fields)
    assert request(loaded, max_tokens=None, **fields).max_new == 5
    assert request(loaded, max_tokens=5, **fields).max_new == 5


@pytest.mark.parametrize("prompt", [(), (1,) * 513, (260,), (-1,)])
def test_a_prompt_that_cannot_be_served_is_refused_by_itself(loaded, prompt):
    with pytest.raises(InvalidRequest):
        request(loaded, prompt=prompt)


def test_weights_that_cannot_be_loaded_fail_their_request_only(loaded):
    ended = run(engine(loaded), request(loaded, "good"), request(loaded, "bad", adapter_dir="broken"))
    assert "can't be loaded" in ended["bad"].error
    assert ended["bad"].category == "server"
    assert ended["good"].result is not None


def test_a_request_that_breaks_the_step_fails_alone_and_others_draw_what_they_would_have(loaded):
    wanted = run(engine(loaded), request(loaded, "good", num_samples=3, adapter_dir="1"))["good"]

    class Poisoned(Adapter):
        def factors(self, module):
            raise RuntimeError("out of luck")

    def adapter(name):
        return Poisoned(rank=1, weights={}) if name == "bad" else adapter_of(loaded, int(name), 4 + int(name))

    running = TorchEngine(loaded, Versions(adapter, max_idle=2), text, num_slots=8, kv_tokens=4096, prefill_tokens=64)
    running.add(request(loaded, "good", num_samples=3, adapter_dir="1"))
    running.step()
    running.step()
    ended = run(running, request(loaded, "bad", adapter_dir="bad"))
    assert "error" in ended["bad"].error and ended["bad"].category == "server"
    assert tokens_of(ended["good"].result) == tokens_of(wanted.result)
    assert run(running, request(loaded))["r"].result is not None


def test_weights_that_are_not_finite_fail_their_request_and_leave_nothing_in_the_cache(loaded):
    adapter = adapter_of(loaded, 1, 5)
    nan = Adapter(
        rank=5, weights={name: (a, torch.full_like(b, torch.nan)) for name, (a, b) in adapter.weights.items()}
    )
    versions = Versions({"nan": nan, "1": adapter}.__getitem__, max_idle=2)
    running = TorchEngine(loaded, versions, text, num_slots=2, kv_tokens=4096, prefill_tokens=64)
    ended = run(running, request(loaded, "bad", adapter_dir="nan"), request(loaded, "good", adapter_dir="1"))
    assert "not finite" in ended["bad"].error
    again = run(running, *(request(loaded, f"r{i}", adapter_dir="1") for i in range(4)))
    assert all(tokens_of(one.result) == tokens_of(ended["good"].result) for one in again.values())


def test_churning_more_adapters_than_stay_resident_equals_solo_runs(loaded):
    requests = [request(loaded, f"r{i}", adapter_dir=str(1 + i % 6), temperature=0.0) for i in range(18)]
    together = run(engine(loaded, num_slots=3), *requests)
    for one in requests[:6]:
        seed = int(one.adapter_dir)
        expected = plain_greedy(loaded, PROMPT, 8, adapter_of(loaded, seed, 4 + seed))
        got = tokens_of(together[one.job.request_id].result)[0]
        assert got == expected[: len(got)]


def test_greedy_samples_of_a_version_are_the_same_bits_whatever_ran_in_between(loaded):
    running = engine(loaded)
    fields = {"adapter_dir": "2", "temperature": 0.0, "num_samples": 2, "max_tokens": 20, "prompt_logprobs": True}
    before = run(running, request(loaded, **fields))["r"].result
    run(running, *(request(loaded, f"r{i}", adapter_dir=str(i), seed=i) for i in range(1, 9)))
    assert run(running, request(loaded, **fields))["r"].result == before


def test_dropping_all_leaves_an_empty_engine(loaded):
    running = engine(loaded)
    for i in range(12):
        running.add(request(loaded, f"r{i}", num_samples=3, adapter_dir="1"))
    running.step()
    running.step()
    running.drop(running.requests)
    assert running.requests == []
    assert run(running, request(loaded))["r"].result is not None


def test_dropping_a_request_tells_how_many_tokens_it_had(loaded):
    heard = []
    running, drawn = engine(loaded), request(loaded, "drawn", num_samples=2, max_tokens=40)
    drawn = dataclasses.replace(drawn, heard=heard.append)
    new = request(loaded, "new")
    running.add(drawn)
    for _ in range(4):
        running.step()
    running.add(new)
    assert running.drop([new, drawn]) == [0, len(heard)] and heard


def test_dropping_one_request_frees_its_slots_and_changes_no_other(loaded):
    running = engine(loaded, num_slots=4)
    kept = request(loaded, "kept", num_samples=2, max_tokens=20, adapter_dir="1")
    expected = tokens_of(run(engine(loaded), kept)["kept"].result)
    dropped = request(loaded, "dropped", num_samples=2, max_tokens=40, adapter_dir="2")
    for one in (kept, dropped, request(loaded, "later", num_samples=2)):
        running.add(one)
    running.step()
    running.step()
    running.drop([dropped])
    ended = run(running)
    assert tokens_of(ended["kept"].result) == expected
    assert set(ended) == {"kept", "later"} and ended["later"].result is not None
