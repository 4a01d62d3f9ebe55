"""All weights of every family: gradients and a step as stock transformers has them, and files that it loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from openrl.tasks.messages import OptimStep
from openrl.workers.model import coordinates
from tests.model_families.zoo import ZOO, make_model
from tests.plain import Plain, furthest
from tests.trainer.bench import forward_backward
from tests.trainer.test_device import result
from tests.trainer.test_full import FullBench

BOUND = 1e-5
IN_MAKE_TEST = ("gemma3", "qwen3-moe")
ADAM = {"learning_rate": 1e-3, "eps": 1e-8}


def in_our_names(bench: FullBench, stock: torch.nn.Module, tensors: list[Tensor]) -> dict[str, Tensor]:
    """Return tensors of the stock model's parameters by the names of the checkpoint; both have one order."""
    assert [name for name, _ in stock.named_parameters()] == [name for name, _ in bench.loaded.model.named_parameters()]
    return coordinates.taken_apart(bench.loaded.model, tensors)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_MAKE_TEST else pytest.mark.full) for name in ZOO]
)
def test_all_weights_of_a_family_are_trained_as_stock_transformers_trains_them(tmp_path: Path, name: str) -> None:
    bench = FullBench(make_model(tmp_path / "model", name), tmp_path / "data")
    run, plain = bench.full_run(), Plain(bench.model_dir, None)
    message = forward_backward(lengths=[5, 40], seed=1)
    _, metrics = result(bench.one(run, message))
    loss, _ = plain.forward_backward(message.data, "cross_entropy")
    assert metrics["loss:sum"] == pytest.approx(loss, rel=BOUND, abs=1e-4)
    ours = dict(zip(dict(run.weights().named_parameters()), run.gradient or [], strict=True))
    gradients = [parameter.grad for parameter in plain.model.parameters()]
    whole = [grad if grad is not None else torch.zeros(()) for grad in gradients]
    expected = in_our_names(bench, plain.model, whole)
    norm = float(torch.cat([one.flatten() for one in expected.values()]).norm())
    for each, gradient in expected.items():
        assert float((ours[each] - gradient).norm()) <= BOUND * max(float(gradient.norm()), 1e-3 * norm), each
    bench.did(run, OptimStep(**ADAM))
    directory = bench.data_dir / bench.saved(run)["directory"]
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    there = in_our_names(bench, stock, [parameter.detach() for parameter in stock.parameters()])
    assert furthest(dict(run.weights().named_parameters()), there)[0] == 0
