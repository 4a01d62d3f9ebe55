"""In bfloat16 the packed forward and the cached one agree on the same text as closely as its eight bits let them."""

from pathlib import Path

import pytest
import torch

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.model import attention
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.model.logprobs import target_logprobs
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from tests.tiny import make_tiny_model

torch.set_num_threads(1)

PROMPT = tuple(b"the quick brown fox")
MEAN_GAP, GAP = 0.01, 0.2
"""Nats: docs/sampling.md."""


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request, tmp_path_factory) -> LoadedModel:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("tiny") / "model", model_type=request.param)
    return load(directory, dtype=torch.bfloat16)


def trained(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    """What a training pass makes of a text: log-probabilities [T - 1]."""
    text_T = torch.tensor(tokens)
    with torch.no_grad(), attention.packed([len(tokens) - 1]):
        hidden_TD = attention.hidden_states(loaded, text_T[:-1], attention.positions([len(tokens) - 1]))
    return target_logprobs(hidden_TD, loaded.head, text_T[1:])


def test_trainer_and_sampler_agree_in_bfloat16(loaded):
    engine = TorchEngine(
        loaded, Versions({}.__getitem__, max_idle=1), str, num_slots=16, kv_tokens=4096, prefill_tokens=64
    )
    limits = Limits(vocab_size=260, max_context=512, cache_tokens=4096, eos_token_ids=(258,))
    message = Sample(adapter_dir="", prompt=PROMPT, num_samples=16, max_tokens=64, seed=1, stop_at_eos=False)
    engine.add(read(SampleJob(tenant="local", request_id="1", message=message, submitted=0.0), limits))
    ended = []
    while engine.requests:
        ended += engine.step()
    gaps = []
    for one in ended[0].result.sequences:
        own_T = trained(loaded, [*PROMPT, *one.tokens])[len(PROMPT) - 1 :]
        gaps.append((own_T - torch.tensor(one.logprobs)).abs())
    found = torch.stack(gaps)
    assert 0 < float(found.mean()) < MEAN_GAP and float(found.max()) < GAP
