"""`openrl up --sampler vllm`: the SDK trains here, and samples from vLLM in an environment of its own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests import tiny
from tests.stack.conftest import Service
from tests.stack.test_sdk import cross_entropy_datum

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.timeout(400),
]

MODEL = "tiny/wide"
PYTHON = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
TEXT = b"open, " * 8


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models") / MODEL
    tiny.make_tiny_model(directory, head_dim=32)
    running = Service(
        tmp_path_factory.mktemp("data"),
        directory,
        model=MODEL,
        options=("--sampler", "vllm", "--sampler-python", str(PYTHON)),
        env={"OPENRL_SAMPLER_SLOTS": "8", "OPENRL_SAMPLER_KV_TOKENS": "8192", "OPENRL_SAMPLER_MAX_LORA_RANK": "16"},
    )
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


@pytest.fixture(scope="module")
def training(api: tinker.ServiceClient) -> tinker.TrainingClient:
    run = api.create_lora_training_client(base_model=MODEL, rank=8, seed=3).result()
    for _ in range(60):
        learned = run.forward_backward([cross_entropy_datum(TEXT)], "cross_entropy")
        run.optim_step(types.AdamParams(learning_rate=5e-3)).result()
        learned.result()
    return run


def processes(service: Service) -> list[int]:
    """Return vLLM's processes, by the sampler's log."""
    log = next((service.data_dir / "logs").glob("sampler-*.log")).read_text()
    return [int(pid) for pid in re.findall(r"runs in the processes \((\d+), (\d+)\)", log)[-1]]


def test_what_was_trained_is_sampled_by_vllm_and_worth_what_the_trainer_says(service, training) -> None:
    sampling = training.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=18, temperature=0.0)
    answer = sampling.sample(types.ModelInput.from_ints(list(TEXT[:12])), 1, asked).result()
    [one] = answer.sequences
    assert bytes(one.tokens) == TEXT[12:30]
    assert processes(service)

    tokens = [*TEXT[:12], *one.tokens]
    forward = training.forward([cross_entropy_datum(tokens)], "cross_entropy").result()
    theirs = forward.loss_fn_outputs[0]["logprobs"].to_numpy()[11:]
    assert np.abs(theirs - np.array(one.logprobs)).mean() < 1e-4
    scored = sampling.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert np.abs(forward.loss_fn_outputs[0]["logprobs"].to_numpy() - np.array(scored[1:])).mean() < 1e-4


def test_a_rank_that_the_sampler_cannot_serve_is_refused_when_the_run_is_created(api) -> None:
    with pytest.raises(tinker.APIStatusError, match=r"lora_config.rank is 32; the samplers of tiny/wide serve ranks"):
        api.create_lora_training_client(base_model=MODEL, rank=32).result()


def test_a_sample_outlives_the_end_of_vllm(service, training) -> None:
    sampling = training.save_weights_and_get_sampling_client().result()
    asked = types.SamplingParams(max_tokens=400, temperature=1.0, seed=5, stop=[])
    prompt = types.ModelInput.from_ints(list(TEXT[:12]))
    whole = sampling.sample(prompt, 2, asked).result()
    promise = sampling.sample(prompt, 2, asked)
    os.kill(processes(service)[0], signal.SIGKILL)
    again = promise.result()
    assert [one.tokens for one in again.sequences] == [one.tokens for one in whole.sequences]
