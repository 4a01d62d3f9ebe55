"""Full fine-tuning of a real model, against plain torch; with the model that `make demo` fetches, else skipped."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from openrl.tasks.messages import OptimStep
from tests.plain import Plain, furthest
from tests.trainer.bench import forward_backward
from tests.trainer.test_device import bits, result
from tests.trainer.test_full import ADAM, CLOSE, FullBench

MODEL = Path(__file__).parents[2] / ".demo/HuggingFaceTB/SmolLM2-135M-Instruct"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not MODEL.is_dir(), reason="no model here: make demo"),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def distance(mine: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    gap = sum(float((mine[name] - right).norm()) ** 2 for name, right in expected.items())
    return float((gap / sum(float(right.norm()) ** 2 for right in expected.values())) ** 0.5)


def test_gradients_steps_and_a_resumed_run_of_a_real_model_are_those_of_plain_torch(tmp_path: Path) -> None:
    bench = FullBench(MODEL, tmp_path / "data")
    run, plain = bench.full_run(), Plain(MODEL, None)
    plain.model.double()  # in float32 stock transformers is further from it than we are
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
