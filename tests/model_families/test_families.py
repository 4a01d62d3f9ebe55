"""Each family in one packed pass of many runs equals stock transformers and PEFT, one sequence at a time.

The bound is 1e-5 of each tensor's norm in float32, of gradients, and of weights after two steps.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.workers.model import decoder
from openrl.workers.model.attention import BLOCK, hidden_states, packed, positions
from openrl.workers.model.families import FAMILIES
from openrl.workers.model.kv_cache import KVCache, Row, cached, row_positions
from openrl.workers.model.loading import load
from openrl.workers.model.logprobs import head_logits
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.trainer.device import Device
from tests.model_families.mixed import LENGTHS, STEPS, Mixed, result
from tests.model_families.zoo import WINDOW, ZOO, make_model
from tests.plain import LOSSES, exported, furthest

BOUND = 1e-5
SUM_BOUND = BOUND * sum(LENGTHS)
"""Of a sum over a run's tokens, whose terms are of the order of 1 and cancel."""
OPTIONS = {
    "a sliding window": ("mistral", {"sliding_window": None}),
    "a window in some layers": ("qwen2.5", {"use_sliding_window": False}),
    "a window where positions aren't embedded": ("smollm3", {"use_sliding_window": False}),
    "layers without positions": ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    "yarn": ("qwen2.5", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3's positions": ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}),
    "positions by kind of layer": ("gemma3", {"rope_parameters": None}),
    "kinds of layers": ("gemma3", {"layer_types": ["sliding_attention"] * 3}),
    "the scale of queries": ("gemma3", {"query_pre_attn_scalar": 16}),
    "capped logits": ("gemma3", {"final_logit_softcapping": None}),
    "capped scores": ("gemma2", {"attn_logit_softcapping": None}),
    "how experts count": ("qwen3-moe", {"norm_topk_prob": False}),
}


def test_every_family_that_is_served_is_in_the_zoo():
    assert {said["model_type"] for said in ZOO.values()} == FAMILIES.keys()


@pytest.mark.parametrize("name", ZOO)
def test_eight_runs_of_a_family_in_one_pass_equal_their_solo_passes_and_some_the_plain_way(models, tmp_path, name):
    mixed = Mixed.of(models(name), tmp_path)
    chosen = {"qwen2.5": [5], "qwen3": [1, 7], "gemma3": [0, 4], "qwen3-moe": [2, 5]}.get(name, [4])
    assert_equal(mixed, plain=chosen, alone=chosen)


@pytest.mark.parametrize(
    "name", ["gemma2", *[pytest.param(name, marks=pytest.mark.full) for name in ZOO if name != "gemma2"]]
)
def test_a_sequence_of_several_blocks_equals_solo_and_plain(models, tmp_path, name):
    assert_equal(Mixed.of(models(name), tmp_path, lengths=[BLOCK + 50]), plain=[4], alone=[4])


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3-moe" else pytest.mark.full) for n in ZOO])
def test_a_family_has_the_same_bits_whether_its_layers_are_computed_again_or_not(models, tmp_path, name):
    found = []
    for mode in ("on", "off"):
        mixed = Mixed.of(models(name), tmp_path / mode)
        device = Device(
            models(name), mixed.bench.checkpoints, token_budget=4096, recomputing=Recomputing(models(name), mode)
        )
        mixed.bench.device = device
        outcomes = [result(outcome) for outcome in mixed.together()]
        found.append((outcomes, [run.gradient for run in mixed.runs]))
    (outcomes, gradients), (expected, others) = found
    for (mine, metrics), (theirs, their_metrics) in zip(outcomes, expected, strict=True):
        assert mine.tobytes() == theirs.tobytes() and metrics == their_metrics
    for mine, theirs in zip(gradients, others, strict=True):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.full
@pytest.mark.parametrize("first", [0, 2, 4])
@pytest.mark.parametrize("name", ZOO)
def test_each_family_with_every_loss_at_every_rank_and_target_equals_solo_and_plain(models, tmp_path, name, first):
    mixed = Mixed.of(models(name), tmp_path, first=first)
    assert {message.loss_fn for message in mixed.messages} == set(LOSSES)
    twins = assert_equal(mixed, plain=range(8), alone=range(8))
    for hyper in STEPS:
        assert not any(outcome.error for outcome in mixed.bench.all(*[(run, hyper) for run in mixed.runs]))
        for number, twin in twins.items():
            twin.step(**{field: getattr(hyper, field) for field in type(hyper).__slots__})
            mine = exported(mixed.export(mixed.runs[number], f"after-{hyper.learning_rate}"))
            error, tensor = furthest(mine, twin.weights())
            assert error < BOUND, (number, tensor)
        if hyper is STEPS[0]:
            mixed.together()
            for number, twin in twins.items():
                twin.forward_backward(mixed.messages[number].data, mixed.messages[number].loss_fn)


@pytest.mark.full
@pytest.mark.parametrize("name", ZOO)
def test_in_bfloat16_a_run_equals_its_solo_pass_to_1_and_stock_float32_to_10_percent(tmp_path, name):
    """The bounds of docs/models.md. Rounded scores send tokens to other experts, so those aren't held to the second."""
    directory = make_model(tmp_path / "model", name, dtype=torch.bfloat16)
    mixed = Mixed.of(load(directory, device="cpu", dtype=torch.bfloat16), tmp_path)
    outcomes = mixed.together()
    for number, message in enumerate(mixed.messages):
        gradient = mixed.gradient(mixed.runs[number])
        run, outcome = mixed.alone(number)
        assert close(result(outcomes[number])[0], result(outcome)[0]) < 1e-3
        assert close(joined(gradient), joined(mixed.gradient(run))) < 1e-2
        if number in (0, 2, 4, 7):
            twin = mixed.plain(number)
            _, arrays = twin.forward_backward(message.data, message.loss_fn)
            assert close(result(outcomes[number])[0], np.concatenate(arrays)) < 1e-2
            assert name == "qwen3-moe" or close(joined(gradient), joined(twin.gradients())) < 0.1


def joined(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def assert_equal(mixed, *, plain, alone):
    """Compare a mixed pass with some runs' solo passes and with the plain way; returns the plain ones."""
    outcomes = mixed.together()
    gradients = [mixed.gradient(run) for run in mixed.runs]
    twins = {}
    for number in alone:
        run, outcome = mixed.alone(number)
        (mine, metrics), (solo, others) = result(outcomes[number]), result(outcome)
        assert close(mine, solo) < BOUND and metrics == pytest.approx(others, rel=BOUND, abs=SUM_BOUND)
        error, tensor = furthest(gradients[number], mixed.gradient(run))
        assert error < BOUND, (number, tensor)
    for number in plain:
        message, twin = mixed.messages[number], mixed.plain(number)
        total, arrays = twin.forward_backward(message.data, message.loss_fn)
        mine, metrics = result(outcomes[number])
        assert metrics["loss:sum"] == pytest.approx(total, rel=BOUND, abs=SUM_BOUND)
        assert close(mine, torch.cat([torch.tensor(array) for array in arrays])) < BOUND
        error, tensor = furthest(gradients[number], twin.gradients())
        assert error < BOUND, (number, tensor)
        twins[number] = twin
    return twins


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_of_a_family_changes_what_the_zoo_computes(models, tmp_path, option):
    """Else its model would pass the tests here without it."""
    name, without = OPTIONS[option]
    loaded = models(name)
    said = json.loads((Path(loaded.tokenizer_path) / "config.json").read_text())
    other = load(make_model(tmp_path, name, **without), device="cpu", dtype=torch.float32)
    assert json.loads((tmp_path / "config.json").read_text()) != said
    tokens = some_tokens(40)
    assert close(logits(loaded, tokens), logits(other, tokens)) > 1e-3


@pytest.mark.parametrize("name", sorted(ZOO))
def test_token_by_token_past_the_window_equals_the_stock_model(models, name):
    """Sequences of different age, read in parts, in neighbouring slots and spread, that begin at different steps."""
    loaded = models(name)
    way = decoder.way_through(loaded)
    stock = AutoModelForCausalLM.from_pretrained(loaded.tokenizer_path)
    sequences = {slot: some_tokens(length, seed=slot) for slot, length in {0: 30, 1: 22, 5: 26}.items()}
    cache = KVCache(loaded, slots=6, max_length=32)
    done, hidden = dict.fromkeys(sequences, 0), {slot: [] for slot in sequences}
    plan = [{0: 20, 1: 3, 5: 9}, {0: 1, 1: 1, 5: 1}, {1: 12, 0: 1}, *[{1: 1, 0: 1, 5: 1}] * 3, {0: 4, 5: 12}]
    plan += [{0: 1, 1: 1}, *[{1: 1}] * 2, {5: 1}]
    for step in plan:
        rows = [Row(slot, done[slot], length) for slot, length in step.items()]
        tokens = torch.cat([sequences[row.slot][row.start : row.start + row.length] for row in rows])
        with torch.no_grad(), cached(cache, rows) as appending:
            parts = way.hidden_states(tokens, row_positions(rows), appending).split([row.length for row in rows])
        for row, part in zip(rows, parts, strict=True):
            done[row.slot] += row.length
            hidden[row.slot].append(part)
    for slot, sequence in sequences.items():
        assert done[slot] > 2 * WINDOW
        with torch.no_grad():
            expected = stock(sequence[None, : done[slot]]).logits[0]
        assert close(head_logits(loaded, torch.cat(hidden[slot])), expected) < BOUND


def logits(loaded, tokens):
    with torch.no_grad(), packed([len(tokens)]):
        return head_logits(loaded, hidden_states(loaded, tokens, positions([len(tokens)])))


def some_tokens(length, *, seed=0):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


def close(mine, expected) -> float:
    """||a-b|| / ||b||."""
    mine, expected = torch.as_tensor(mine).double(), torch.as_tensor(expected).double()
    return float((mine - expected).norm() / expected.norm())
