"""What every engine must do, compared with stock transformers and PEFT on the same files."""

import numpy as np
import pytest
import torch

from openrl.tasks.wire import codec
from tests.contract.conftest import MAX_LORAS, MAX_RANK, PROMPT, SLOTS

LONG = tuple(b"it was a bright cold day in april, and the clocks were striking thirteen. " * 4)
"""Longer than what is read in one step."""
MEAN_GAP, GAP = 1e-4, 2e-4
"""Nats, in float32."""


def near_ties(base, prompt, tokens, version):
    """Tell where the two best tokens are closer than 1e-4: there either may be drawn."""
    best_T2 = base.logits([*prompt, *tokens], version)[len(prompt) - 1 : -1].log_softmax(-1).topk(2).values
    return (best_T2[:, 0] - best_T2[:, 1]) < 1e-4


def check_greedy(served, version, *, prompt=PROMPT, count=24):
    result = served.draw(
        adapter_dir=version, prompt=prompt, temperature=0.0, max_tokens=count, stop_at_eos=False,
        prompt_logprobs=True,
    )  # fmt: skip
    [one] = result.sequences
    assert one.tokens == served.base.greedy(prompt, count, version)
    gaps_T = (torch.tensor(one.logprobs) - served.base.logprobs(prompt, one.tokens, version)).abs()
    own_T = torch.tensor(result.prompt_logprobs[1:])
    prompt_gaps_T = (own_T - served.base.logprobs(prompt[:1], prompt[1:], version)).abs()
    assert float(gaps_T.mean()) < MEAN_GAP and float(prompt_gaps_T.mean()) < MEAN_GAP
    return one


def test_greedy_tokens_and_logprobs_are_those_of_the_stock_model(tied):
    check_greedy(tied, "")
    check_greedy(tied, "", prompt=LONG)


def test_an_adapter_is_really_applied_and_is_pefts(tied):
    version = tied.base.save("applied", 3)
    base, adapted = check_greedy(tied, ""), check_greedy(tied, version)
    assert base.tokens != adapted.tokens
    theirs_T = tied.base.logprobs(PROMPT, adapted.tokens, version)
    ignored_T = tied.base.logprobs(PROMPT, adapted.tokens)
    assert float((theirs_T - ignored_T).abs().mean()) > 0.1, "the adapter changes too little to be missed"


def test_an_adapter_on_the_head_alone_is_applied_to_a_tied_model(tied):
    version = tied.base.save("head", 4, train_attn=False, train_mlp=False)
    adapted = check_greedy(tied, version)
    ignored_T = tied.base.logprobs(PROMPT, adapted.tokens)
    assert float((torch.tensor(adapted.logprobs) - ignored_T).abs().mean()) > 0.1


def test_an_untied_head_is_adapted_too(untied):
    check_greedy(untied, "")
    check_greedy(untied, untied.base.save("head", 5, train_attn=False, train_mlp=False))
    check_greedy(untied, untied.base.save("all", 6))


def test_requests_of_several_adapters_side_by_side_get_what_each_gets_alone(tied):
    versions = ["", *(tied.base.save(f"beside{n}", 10 + n, rank=2 + n, train_unembed=n != 1) for n in range(3))]
    asked = {"temperature": 0.0, "max_tokens": 16, "stop_at_eos": False, "prompt_logprobs": True}
    prompts = [PROMPT, LONG, PROMPT[:5], LONG[:100]]
    requests = [
        tied.request(adapter_dir=version, prompt=prompt, **asked)
        for version, prompt in zip(versions, prompts, strict=True)
    ]
    for ended, version, prompt in zip(tied.run(*requests), versions, prompts, strict=True):
        assert ended.result is not None, ended.error
        assert ended.result.sequences[0].tokens == tied.base.greedy(prompt, 16, version)
        own = torch.tensor(ended.result.prompt_logprobs[1:])
        gaps_T = (own - tied.base.logprobs(prompt[:1], prompt[1:], version)).abs()
        assert float(gaps_T.max()) < GAP


def test_a_seed_gives_the_same_again_whatever_runs_beside_it(tied):
    version = tied.base.save("seeds", 7)
    alone = tied.draw(num_samples=4, seed=11, adapter_dir=version, max_tokens=12)
    beside = [tied.request(num_samples=3, seed=n, tenant="other", prompt=LONG[:n]) for n in (20, 50, 90)]
    ended = tied.run(*beside, tied.request(num_samples=4, seed=11, adapter_dir=version, max_tokens=12))
    assert [one.tokens for one in ended[-1].result.sequences] == [one.tokens for one in alone.sequences]
    other = tied.draw(num_samples=4, seed=12, adapter_dir=version, max_tokens=12)
    assert [one.tokens for one in other.sequences] != [one.tokens for one in alone.sequences]
    assert len({tuple(one.tokens) for one in alone.sequences}) == 4


def test_more_sequences_than_slots_are_drawn_from_one_seed_and_all_differ(tied):
    result = tied.draw(num_samples=3 * SLOTS, seed=5, temperature=2.0, max_tokens=8, stop_at_eos=False)
    assert len({tuple(one.tokens) for one in result.sequences}) == 3 * SLOTS
    again = tied.draw(num_samples=3 * SLOTS, seed=5, temperature=2.0, max_tokens=8, stop_at_eos=False)
    assert [one.tokens for one in again.sequences] == [one.tokens for one in result.sequences]


@pytest.mark.parametrize("temperature", [0.0, 0.001, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.5}])
def test_logprobs_are_of_the_tempered_distribution_whatever_is_cut(tied, temperature, cut):
    result = tied.draw(temperature=temperature, num_samples=2, max_tokens=6, topk_sample_logprobs=3, **cut)
    for one in result.sequences:
        expected_T = tied.base.logprobs(PROMPT, one.tokens, temperature=temperature or 1.0)
        tolerance = GAP / min(1.0, temperature or 1.0)
        assert one.logprobs == pytest.approx(expected_T.tolist(), abs=tolerance)
        logits_TV = tied.base.logits([*PROMPT, *one.tokens])[len(PROMPT) - 1 : -1] / (temperature or 1.0)
        best = logits_TV.log_softmax(-1).topk(3)
        assert one.topk.tokens.shape == (len(one.tokens), 3)
        assert one.topk.logprobs == pytest.approx(best.values.clamp(min=-9999).numpy(), abs=tolerance)


def test_top_k_and_top_p_leave_only_what_they_should(tied):
    first = tied.base.logits(PROMPT)[-1].log_softmax(-1)
    order = first.argsort(descending=True).tolist()
    nucleus = order[: int((first.exp().sort(descending=True).values.cumsum(0) < 0.7).sum()) + 1]
    drawn = {
        cut: [one.tokens[0] for one in tied.draw(num_samples=200, max_tokens=1, seed=3, **dict([cut])).sequences]
        for cut in (("top_k", 3), ("top_p", 0.7), ("top_k", 1))
    }
    assert set(drawn["top_k", 3]) == set(order[:3])
    assert set(drawn["top_p", 0.7]) <= set(nucleus)
    assert set(drawn["top_k", 1]) == {order[0]}


def test_tokens_are_drawn_as_often_as_they_are_likely(tied):
    probs = tied.base.logits(PROMPT)[-1].softmax(-1)
    tokens = [one.tokens[0] for one in tied.draw(num_samples=1000, max_tokens=1, seed=9).sequences]
    counts = np.bincount(tokens, minlength=len(probs)) / 1000
    likely = probs > 0.02
    assert np.abs(counts - probs.numpy())[likely].max() < 0.05


def test_a_sequence_ends_at_a_stop_token_and_keeps_it(tied):
    free = tied.draw(seed=4, max_tokens=30, stop_at_eos=False).sequences[0].tokens
    stop = next(token for token in free[5:] if token not in free[:5])
    [stopped] = tied.draw(seed=4, max_tokens=30, stop_at_eos=False, stop_tokens=(stop,)).sequences
    assert stopped.tokens == free[: free.index(stop) + 1]
    assert (stopped.stop_reason, len(stopped.logprobs)) == ("stop", len(stopped.tokens))


def test_a_sequence_ends_where_a_stop_string_is_complete(tied):
    text = bytearray()
    free = tied.draw(seed=8, max_tokens=40, stop_at_eos=False, top_k=40).sequences[0].tokens
    pairs = [
        (at, bytes(free[at : at + 2]).decode())
        for at in range(4, 38)
        if all(0x20 < token < 0x7F for token in free[at : at + 2])
    ]
    text.extend(token for token in free if token < 256)
    at, pair = next((at, pair) for at, pair in pairs if bytes(text).decode("latin-1").count(pair) == 1)
    [stopped] = tied.draw(seed=8, max_tokens=40, stop_at_eos=False, top_k=40, stop_strings=(pair,)).sequences
    assert stopped.tokens == free[: at + 2]
    assert stopped.stop_reason == "stop"


def test_max_tokens_and_the_context_bound_a_sequence(tied):
    [short] = tied.draw(max_tokens=3, stop_at_eos=False).sequences
    assert (len(short.tokens), short.stop_reason) == (3, "length")
    [rest] = tied.draw(prompt=(LONG * 3)[:500], max_tokens=None, stop_at_eos=False).sequences
    assert (len(rest.tokens), rest.stop_reason) == (12, "length")


def test_what_a_prompt_is_worth(tied):
    version = tied.base.save("worth", 13)
    rows, width = len(LONG) - 1, 3
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, 260, (rows, width))
    ids[0] = -1
    result = tied.draw(
        prompt=LONG, adapter_dir=version, max_tokens=1, prompt_logprobs=True, topk_prompt_logprobs=4,
        target_ids=tuple(ids.ravel().tolist()), target_shape=(rows, width),
    )  # fmt: skip
    all_TV = tied.base.logits(LONG, version)[:-1].log_softmax(-1)
    own_T = all_TV.gather(1, torch.tensor(LONG[1:])[:, None])[:, 0]
    assert result.prompt_logprobs[0] is None
    assert result.prompt_logprobs[1:] == pytest.approx(own_T.tolist(), abs=GAP)
    assert result.topk_prompt_logprobs.logprobs[1:] == pytest.approx(all_TV.topk(4).values.numpy(), abs=GAP)
    named = np.where(ids >= 0, all_TV.gather(1, torch.tensor(ids.clip(min=0))).numpy(), 0.0)
    assert result.target_logprobs.values.reshape(rows, width) == pytest.approx(named, abs=GAP)


def test_the_last_of_a_prompt_can_be_asked_for_alone(tied):
    result = tied.draw(prompt=LONG, max_tokens=1, prompt_logprobs=True, prompt_logprobs_last_n=5)
    own_T = tied.base.logprobs(LONG[:-5], LONG[-5:])
    assert result.prompt_logprobs[:-5] == [None] * (len(LONG) - 5)
    assert result.prompt_logprobs[-5:] == pytest.approx(own_T.tolist(), abs=GAP)


def test_alternatives_to_a_prompts_tokens_are_drawn_and_worth_what_they_are_worth(tied):
    result = tied.draw(max_tokens=1, prompt_alt_tokens_k=3, temperature=0.8)
    all_TV = tied.base.logits(PROMPT)[:-1].log_softmax(-1)
    tokens_TK = torch.tensor(result.alternatives.tokens)
    assert tokens_TK.shape == (len(PROMPT) - 1, 3)
    assert result.alternatives.logprobs == pytest.approx(all_TV.gather(1, tokens_TK).numpy(), abs=GAP)
    assert len(set(tokens_TK.ravel().tolist())) > 10


def test_what_is_dropped_midway_leaves_the_others_as_they_were(tied):
    alone = tied.draw(seed=2, max_tokens=60, stop_at_eos=False)
    dropped = [tied.request(max_tokens=480, num_samples=3, stop_at_eos=False, seed=n) for n in range(2)]
    kept = tied.request(seed=2, max_tokens=60, stop_at_eos=False)
    heard = []
    object.__setattr__(dropped[0], "heard", heard.append)
    for one in (*dropped, kept):
        tied.runner.add(one)
    while len(heard) < 5:
        assert tied.runner.step() == []
    counts = tied.runner.drop(dropped)
    assert counts[0] >= len(heard) >= 5
    assert tied.runner.requests == [kept]
    ended = []
    while not ended:
        ended = tied.runner.step()
    assert ended[0].result.sequences[0].tokens == alone.sequences[0].tokens
    assert len(tied.draw(num_samples=SLOTS, max_tokens=4, stop_at_eos=False).sequences) == SLOTS


def test_tokens_are_heard_in_order_as_they_are_drawn(tied):
    heard = []
    [ended] = tied.run(tied.request(num_samples=2, max_tokens=6, heard=heard.append, topk_sample_logprobs=2))
    for index, one in enumerate(ended.result.sequences):
        mine = [draft for draft in heard if draft.sequence == index]
        assert [draft.token for draft in mine] == one.tokens
        assert [draft.position for draft in mine] == list(range(len(one.tokens)))
        assert mine[-1].ended == one.stop_reason and not any(draft.ended for draft in mine[:-1])
        assert [token for token, _ in mine[0].top] == one.topk.tokens[0].tolist()


def test_a_small_tenant_does_not_wait_for_a_large_one(tied):
    flood = [tied.request(tenant="large", max_tokens=400, num_samples=4, stop_at_eos=False, seed=n) for n in range(8)]
    small = tied.request(tenant="small", max_tokens=5, stop_at_eos=False)
    for one in flood:
        tied.runner.add(one)
    for _ in range(5):
        assert tied.runner.step() == []
    tied.runner.add(small)
    ended = []
    while not ended:
        ended = tied.runner.step()
    assert [one.request for one in ended] == [small]
    tied.runner.drop(flood)


def test_whoever_gives_up_a_slot_goes_on_to_the_same_tokens(tied):
    asked = {"max_tokens": 100, "num_samples": SLOTS, "stop_at_eos": False, "seed": 3}
    alone = tied.draw(tenant="large", **asked)
    large = tied.request(tenant="large", **asked)
    tied.runner.add(large)
    for _ in range(3):
        tied.runner.step()
    others = [tied.request(tenant="small", max_tokens=40, stop_at_eos=False, seed=n) for n in range(SLOTS)]
    for one in others:
        tied.runner.add(one)
    ended = {}
    while tied.runner.requests:
        ended |= {one.request.job.request_id: one for one in tied.runner.step()}
    assert list(ended)[-1] == large.job.request_id, "nobody took a slot from it"
    found = ended[large.job.request_id].result
    assert [one.tokens for one in found.sequences] == [one.tokens for one in alone.sequences]


def test_eight_versions_in_four_places_give_what_each_gives_alone(tied):
    count = 96
    versions = [tied.base.save(f"churn{n}", 100 + n, rank=1 + n % MAX_RANK) for n in range(2 * MAX_LORAS)]
    asked = {"temperature": 0.0, "max_tokens": count, "stop_at_eos": False}
    alone = {version: tied.draw(adapter_dir=version, **asked).sequences[0] for version in versions}
    requests = [tied.request(adapter_dir=version, **asked) for _ in range(2) for version in versions]
    for ended, version in zip(tied.run(*requests), versions * 2, strict=True):
        [one] = ended.result.sequences
        tie_T = near_ties(tied.base, PROMPT, alone[version].tokens, version)
        end = int(tie_T.nonzero()[0]) if bool(tie_T.any()) else count
        assert one.tokens[:end] == alone[version].tokens[:end]
        assert one.logprobs[:end] == pytest.approx(alone[version].logprobs[:end], abs=1e-5)


def test_nothing_that_was_read_under_one_version_is_used_under_another(tied):
    versions = [tied.base.save(f"cached{n}", 200 + n) for n in range(2)]
    for version in ("", versions[0], versions[1], "", versions[0]):
        check_greedy(tied, version, prompt=LONG, count=4)


def test_a_version_that_is_gone_or_damaged_or_too_large_fails_its_request_alone(tied):
    damaged = tied.base.save("damaged", 30)
    weights = tied.base.data_dir / damaged / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    missing = damaged.replace("damaged", "missing")
    bad, gone, good = tied.run(
        tied.request(adapter_dir=damaged), tied.request(adapter_dir=missing), tied.request(max_tokens=4)
    )
    assert (bad.result, bad.category) == (None, "server") and "damaged' can't be loaded" in bad.error
    assert (gone.result, gone.category) == (None, "user") and "no longer on disk" in gone.error
    assert good.result is not None


def test_an_answer_can_be_written(tied):
    result = tied.draw(num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=2, topk_sample_logprobs=2)
    body = codec.encode_sample_response(
        result.sequences, result.prompt_logprobs, result.topk_prompt_logprobs, result.target_logprobs,
        result.alternatives,
    )  # fmt: skip
    assert len(codec.sample_response_to_json(body)["sequences"]) == 2
