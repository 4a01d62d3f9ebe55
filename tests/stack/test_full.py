"""Full fine-tuning through the unmodified SDK: a run trains all weights, is sampled, saved, and goes on as another."""

from __future__ import annotations

import psutil
import pytest
import tinker
from tinker import types

from openrl.tasks import keys
from tests.stack.conftest import MODEL, Service
from tests.stack.test_sdk import cross_entropy_datum

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:DEPRECATED. TrainingClient.load_state:FutureWarning"),
    pytest.mark.timeout(240),
]

FULL = {"openrl.fine_tuning_type": "full"}
TEXT = b"open, " * 8


def step(run: tinker.TrainingClient) -> float:
    """One step on the text; returns the loss before it."""
    pair = (
        run.forward_backward([cross_entropy_datum(TEXT)], "cross_entropy"),
        run.optim_step(types.AdamParams(learning_rate=2e-3)),
    )
    assert pair[1].result().metrics["grad_norm"] > 0
    return pair[0].result().metrics["loss:sum"]


def kill_trainer(service: Service, run_id: str) -> None:
    """End the process that trains a run, without a warning."""
    assert service.process is not None
    pool = keys.pool_slug(keys.slug(MODEL), "local", run_id)
    [trainer] = [
        child
        for child in psutil.Process(service.process.pid).children(recursive=True)
        if {"openrl.workers.trainer", pool} <= set(child.cmdline())
    ]
    trainer.kill()


def test_a_full_run_learns_is_sampled_survives_its_trainer_and_goes_on_as_another_run(service: Service) -> None:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
        run = api.create_lora_training_client(base_model=MODEL, user_metadata=FULL).result()
        info = run.get_info()
        assert info.is_lora is False and info.lora_rank is None
        losses = [step(run) for _ in range(30)]
        assert losses[-1] < 0.2 * losses[0], losses

        sampling = run.save_weights_and_get_sampling_client().result()
        prompt, params = types.ModelInput.from_ints(list(TEXT[:12])), types.SamplingParams(max_tokens=18, temperature=0)
        answer = sampling.sample(prompt, 1, params).result().sequences[0]
        assert bytes(answer.tokens) == TEXT[12:30]

        path = run.save_state("half").result().path
        kill_trainer(service, run.model_id)
        expected = [step(run) for _ in range(3)]
        other = api.create_training_client_from_state_with_optimizer(path).result()
        assert other.get_info().is_lora is False
        assert [step(other) for _ in range(3)] == expected

        newer = run.save_weights_and_get_sampling_client().result()
        assert newer.sample(prompt, 1, params).result().sequences[0].logprobs != answer.logprobs
        assert sampling.sample(prompt, 1, params).result().sequences[0].logprobs == answer.logprobs, "its very weights"

    rest = tinker.RestClient(api_key="tml-local", base_url=service.base_url)
    weights = rest.get_weights_info_by_tinker_path(path).result()
    assert weights.is_lora is False and weights.base_model == MODEL
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
        adapter = api.create_lora_training_client(base_model=MODEL, rank=4).result()
        with pytest.raises(tinker.APIError, match="full fine-tuning, the run of lora"):
            adapter.load_state(path).result()
