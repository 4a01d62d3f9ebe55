"""Adapters on a stack of experts: on disk as PEFT reads them, in checkpoints, and in the sampler.

Their gradients are compared with plain torch in test_families.py.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import LoadWeights, OptimStep, Sample, SaveWeights, SaveWeightsExternal
from openrl.tasks.registry import Checkpoint
from openrl.workers.model.loading import load
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from openrl.workers.weights.adapter import load_adapter
from tests.model_families.mixed import KINDS, Merged, Mixed
from tests.model_families.zoo import SMALL, ZOO, make_model
from tests.plain import furthest

EXPERTS, INNER = ZOO["qwen3-moe"]["num_experts"], ZOO["qwen3-moe"]["moe_intermediate_size"]
BOUND = 1e-5


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    torch.set_num_threads(1)
    return load(make_model(tmp_path_factory.mktemp("moe"), "qwen3-moe"), device="cpu", dtype=torch.float32)


@pytest.fixture
def mixed(loaded, tmp_path):
    return Mixed.of(loaded, tmp_path)


def export(mixed, number):
    """A run's export, as a client asks for it."""
    [row] = mixed.bench.one(mixed.runs[number], SaveWeightsExternal(name="e1")).rows
    return mixed.bench.data_dir / Checkpoint.from_json(row.value).directory


# PEFT looks the stacks up among modules too, and says that it found none there.
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("number", [0, 2, 4])
def test_stock_peft_loads_an_export_with_no_key_missing_and_computes_and_trains_the_same(mixed, number):
    directory = export(mixed, number)
    stock = AutoModelForCausalLM.from_pretrained(mixed.model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(stock, directory, is_trainable=True).eval()
    found = peft.load_adapter(directory, "again")
    assert not found.missing_keys and not found.unexpected_keys
    peft.set_adapter("default")

    mixed.together()
    plain = mixed.plain(number)
    plain.model = peft
    plain.forward_backward(mixed.messages[number].data, mixed.messages[number].loss_fn)
    trained = {name: tensor.grad for name, tensor in peft.named_parameters() if tensor.grad is not None}
    error, tensor = furthest(mixed.gradient(mixed.runs[number]), apart(trained, KINDS[number][0]))
    assert error < BOUND, tensor


def apart(trained, rank):
    """PEFT's gradients under our names: it keeps gate and up of all experts in one, as blocks of twice the rank."""
    found = {}
    for name, gradient in trained.items():
        name = name.removeprefix("base_model.model.").replace(".default.", ".")
        if ".experts." not in name:
            found[name] = gradient
            continue
        factor, fused = name.split(".")[-2], ".base_layer." in name
        stack = name.split(".experts.")[0] + ".experts"
        for place, part in enumerate(["gate_proj", "up_proj"] if fused else ["down_proj"]):
            block = slice(place * rank, (place + 1) * rank)
            if factor == "lora_A":
                ours = gradient.unflatten(0, (EXPERTS, -1))[:, block]
            else:
                outputs = slice(place * INNER, (place + 1) * INNER) if fused else slice(None)
                ours = gradient.unflatten(1, (-1, EXPERTS)).permute(2, 0, 1)[:, outputs, block]
            found |= {f"{stack}.{n}.{part}.{factor}.weight": one for n, one in enumerate(ours)}
    return found


def test_each_expert_has_factors_of_its_own_on_disk_and_they_come_back_bit_by_bit(loaded, mixed):
    directory, run = export(mixed, 2), mixed.runs[2]
    tensors = load_file(directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text())
    name = "base_model.model.model.layers.1.mlp.experts.{}.{}.weight"

    assert config["target_modules"] == ["down_proj", "gate_proj", "up_proj"] and config["r"] == 4
    assert len(tensors) == 3 * EXPERTS * 3 * 2
    assert tensors[name.format(5, "up_proj.lora_A")].shape == (4, SMALL["hidden_size"])
    assert tensors[name.format(0, "down_proj.lora_B")].shape == (SMALL["hidden_size"], 4)
    again = load_adapter(directory, loaded)
    assert all(map(torch.equal, again.parameters(), run.weights().parameters()))


def test_a_checkpoint_brings_back_factors_and_moments_of_every_expert(mixed):
    bench, run = mixed.bench, mixed.runs[0]
    mixed.together()
    assert bench.one(run, OptimStep(learning_rate=0.01)).error is None
    [row] = bench.one(run, SaveWeights(name="c1")).rows
    checkpoint = Checkpoint.from_json(row.value)
    other = bench.run(50, rank=1, seed=99)
    message = LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=True)
    outcome = bench.one(other, message)

    assert outcome.error is None, outcome.error
    for mine, theirs in (
        (other.weights().parameters(), run.weights().parameters()),
        (other.moments.exp_avg, run.moments.exp_avg),
        (other.moments.exp_avg_sq, run.moments.exp_avg_sq),
    ):
        assert all(map(torch.equal, mine, theirs))


def test_the_sampler_draws_from_what_was_trained_with_several_adapters_in_one_batch(loaded, mixed):
    directories = {str(export(mixed, number)): number for number in (0, 2, 7)}
    engine = TorchEngine(
        loaded,
        Versions(lambda name: load_adapter(Path(name), loaded), max_idle=4),
        lambda tokens: "",
        num_slots=8,
        kv_tokens=1024,
        prefill_tokens=16,
    )
    limits = Limits(vocab_size=260, max_context=512, cache_tokens=1024, eos_token_ids=loaded.eos_token_ids)
    prompt = tuple(b"the quick brown fox")
    for directory in directories:
        message = Sample(adapter_dir=directory, prompt=prompt, num_samples=2, max_tokens=10, seed=1, stop_at_eos=False)
        engine.add(read(SampleJob(tenant="t", request_id=directory, message=message, submitted=0.0), limits))
    ended = {}
    while engine.requests:
        ended |= {one.request.job.request_id: one for one in engine.step()}

    for directory in directories:
        plain = Merged(mixed.model, Path(directory))
        assert ended[directory].result is not None, ended[directory].error
        for sequence in ended[directory].result.sequences:
            tokens = np.array([*prompt, *sequence.tokens])
            expected = plain.logprobs(tokens[:-1], tokens[1:].astype(np.int64))[len(prompt) - 1 :]
            assert sequence.logprobs == pytest.approx(expected.tolist(), abs=2e-5)
