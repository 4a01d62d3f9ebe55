"""The law of what is drawn, and its log-probabilities, against stock transformers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.model.loading import load
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from tests.tiny import make_tiny_model

torch.set_num_threads(1)

PROMPT = tuple(b"the quick brown fox")
TEMPERATURE, TOP_K, TOP_P = 0.5, 12, 0.9


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    """A tiny model whose next token isn't nearly certain, so that the cuts bite."""
    directory = make_tiny_model(tmp_path_factory.mktemp("tiny") / "qwen3", model_type="qwen3", tied=False)
    weights = load_file(directory / "model.safetensors")
    weights["lm_head.weight"] *= 0.7
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def results(model_dir):
    """2,000 samples of two tokens, in two requests with seeds of their own."""
    loaded = load(model_dir)
    engine = TorchEngine(
        loaded, Versions({}.__getitem__, max_idle=1), str, num_slots=64, kv_tokens=8192, prefill_tokens=512
    )
    limits = Limits(vocab_size=260, max_context=512, cache_tokens=8192, eos_token_ids=(258,))
    for seed in (1, 2):
        message = Sample(
            adapter_dir="", prompt=PROMPT, num_samples=1000, max_tokens=2, seed=seed, stop_at_eos=False,
            temperature=TEMPERATURE, top_k=TOP_K, top_p=TOP_P,
        )  # fmt: skip
        engine.add(read(SampleJob(tenant="local", request_id=str(seed), message=message, submitted=0.0), limits))
    ended = []
    while engine.requests:
        ended += engine.step()
    return [one for request in ended for one in request.result.sequences]


@pytest.fixture(scope="module")
def stock(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.no_grad()
def logits(stock, tokens) -> torch.Tensor:
    """Float64 logits [V] after `tokens`."""
    return stock(torch.tensor([tokens])).logits[0, -1].double()


def reference(logits_V: torch.Tensor) -> np.ndarray:
    """Return the probabilities after temperature, top-k and top-p as transformers' `generate` applies them."""
    scores_1V = logits_V[None]
    for warper in (TemperatureLogitsWarper(TEMPERATURE), TopKLogitsWarper(TOP_K), TopPLogitsWarper(TOP_P)):
        scores_1V = warper(None, scores_1V)
    return scores_1V[0].softmax(-1).numpy()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Return how far the counts are from the law, as a standard normal (Wilson and Hilferty 1931)."""
    expected = probabilities * counts.sum()
    frequent = expected >= 5
    seen = np.append(counts[frequent], counts[~frequent].sum())
    expected = np.append(expected[frequent], expected[~frequent].sum())
    seen, expected = seen[expected > 0], expected[expected > 0]
    freedom = len(seen) - 1
    assert freedom > 0
    statistic = ((seen - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def test_two_thousand_first_tokens_follow_the_reference_and_none_lies_outside_the_cuts(results, stock):
    wanted_V = reference(logits(stock, PROMPT))
    counts_V = np.bincount([one.tokens[0] for one in results], minlength=260)
    assert counts_V.sum() == 2000 and 3 < (wanted_V > 0).sum() <= TOP_K
    assert counts_V[wanted_V == 0].sum() == 0
    assert chi_square(counts_V, wanted_V) < 2.33


def test_second_tokens_follow_the_reference_after_their_first(results, stock):
    firsts, counts = np.unique([one.tokens[0] for one in results], return_counts=True)
    common = firsts[counts >= 150]
    assert len(common) >= 2
    for first in common.tolist():
        wanted_V = reference(logits(stock, [*PROMPT, first]))
        counts_V = np.bincount([one.tokens[1] for one in results if one.tokens[0] == first], minlength=260)
        assert counts_V[wanted_V == 0].sum() == 0
        if (wanted_V * counts_V.sum() >= 5).sum() > 1:
            assert chi_square(counts_V, wanted_V) < 3


def test_the_law_would_not_pass_at_another_temperature_or_without_a_cut(results, stock):
    counts_V = np.bincount([one.tokens[0] for one in results], minlength=260)
    logits_V = logits(stock, PROMPT)
    hotter_V = reference(logits_V * (TEMPERATURE / 0.75))
    assert chi_square(counts_V, hotter_V) > 5
    assert chi_square(counts_V, (logits_V / TEMPERATURE).softmax(-1).numpy()) > 5


def test_logprobs_are_those_of_the_stock_models_tempered_distribution_before_the_cuts(results, stock):
    for one in results[:50]:
        tokens = [*PROMPT, *one.tokens]
        for index, (token, logprob) in enumerate(zip(one.tokens, one.logprobs, strict=True)):
            expected_V = (logits(stock, tokens[: len(PROMPT) + index]) / TEMPERATURE).log_softmax(-1)
            assert logprob == pytest.approx(expected_V[token].item(), abs=1e-4)
