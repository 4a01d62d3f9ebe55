"""Full fine-tuning of SmolLM2-135M against plain torch: random weights in its shape, and its own where they are here.

Float64 is the judge. Where a tensor's gradient is a sum of which most cancels, float32 alone is further than 1e-5 from
it; so each tensor is compared with how far stock transformers in float32 is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from openrl.tasks.messages import OptimStep
from tests.plain import Plain, furthest
from tests.trainer.bench import forward_backward
from tests.trainer.test_device import bits, result
from tests.trainer.test_full import ADAM, CLOSE, FullBench

MODEL = Path(__file__).parents[2] / ".demo/HuggingFaceTB/SmolLM2-135M-Instruct"

SMOLLM2_135M = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "tie_word_embeddings": True,
}  # fmt: skip

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["random weights", "its own"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    if request.param == "its own":
        if not MODEL.is_dir():
            pytest.skip("no model here: make demo")
        return MODEL
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M, initializer_range=0.04, dtype="bfloat16"))
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1.0, 0.3)
    model.bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def distance(mine: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    gap = sum(float((mine[name] - right).norm()) ** 2 for name, right in expected.items())
    return float((gap / sum(float(right.norm()) ** 2 for right in expected.values())) ** 0.5)


def distances(mine: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Tensor:
    """||a - b|| / ||b|| of each tensor."""
    return torch.tensor([float((mine[name] - right).norm() / right.norm()) for name, right in exact.items()])


def test_the_gradient_of_each_tensor_is_as_near_to_float64_as_stock_torchs(model_dir: Path, tmp_path: Path) -> None:
    bench = FullBench(model_dir, tmp_path / "data")
    run, exact, stock = bench.full_run(), Plain(model_dir, None), Plain(model_dir, None)
    exact.model.double()
    names = [name for name, _ in run.weights().named_parameters()]
    for loss_fn in ("cross_entropy", "ppo") if model_dir == MODEL else ("cross_entropy",):
        message = forward_backward(loss_fn, [12, 7])
        assert bench.one(run, message).error is None
        for each in (exact, stock):
            each.forward_backward(message.data, loss_fn)
        gradients = dict(zip(names, run.gradient or [], strict=True))
        assert distance(gradients, exact.gradients()) < CLOSE
        ours, theirs = (distances(each, exact.gradients()) for each in (gradients, stock.gradients()))
        assert ours.max() <= max(CLOSE, float(theirs.max()))
        assert (ours > CLOSE).sum() <= (theirs > CLOSE).sum()
        run.gradient = None
        for each in (exact, stock):
            each.model.zero_grad()


@pytest.mark.skipif(not MODEL.is_dir(), reason="no model here: make demo")
def test_gradients_steps_and_a_resumed_run_of_a_real_model_are_those_of_plain_torch(tmp_path: Path) -> None:
    bench = FullBench(MODEL, tmp_path / "data")
    run, plain = bench.full_run(), Plain(MODEL, None)
    plain.model.double()
    names = [name for name, _ in run.weights().named_parameters()]
    for number in range(2):
        message = forward_backward("ppo" if number else "cross_entropy", [12, 7], seed=number)
        arrays, metrics = result(bench.one(run, message))
        loss, expected = plain.forward_backward(message.data, message.loss_fn)
        assert metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE)
        for mine, theirs in zip(arrays, expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=CLOSE, atol=CLOSE)
        gradients = dict(zip(names, run.gradient or [], strict=True))
        assert distance(gradients, plain.gradients()) < CLOSE
        # Steps from one gradient: where it is nearly 0, AdamW makes of its last bits as much as of any other.
        for name, gradient in gradients.items():
            plain.parameters[name].grad = gradient.double()
        metrics = json.loads(bench.did(run, OptimStep(**ADAM)).result)["metrics"]
        plain.step(**ADAM)
        assert furthest(dict(run.weights().named_parameters()), plain.weights())[0] < CLOSE
        plain.model.load_state_dict(dict(run.weights().named_parameters()), strict=False)
    assert metrics["step"] == 2
    row = bench.saved(run)
    del plain

    path = {"checkpoint_path": "tinker://s-0:train:0/weights/a", "checkpoint_dir": row["directory"]}
    heir = FullBench(MODEL, tmp_path / "data")
    resumed = heir.full_run(1, with_optimizer=True, **path)
    for device, each in ((bench, run), (heir, resumed)):
        device.trained(each, steps=1, first=5)
    assert bits(resumed) == bits(run)
