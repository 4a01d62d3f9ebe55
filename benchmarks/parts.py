"""The trainer's device code without the service: random base models, runs, and operations on them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from openrl.tasks.journal import Outcome
from openrl.tasks.messages import CreateModel, Datum, ForwardBackward, Message, OptimStep
from openrl.tasks.registry import Registry
from openrl.workers.model import attention, families, loading
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.residency import Residency
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work

BASE = "random"
ADAMW = OptimStep(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12)


def random_model(config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> loading.LoadedModel:
    """Draw a base model where it will lie."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
    return loading.prepare(model.to(device), families.family("qwen3"), path=Path(BASE))


class OperationFailed(Exception):
    """The trainer answered an operation with this error; for one that is internal, its log says more."""


class Parts:
    """A device with runs, and short ways to ask it for things."""

    def __init__(self, loaded: loading.LoadedModel, *, token_budget: int, **options: Any) -> None:
        """`options` are the device's: its residency, its recomputing."""
        self.loaded = loaded
        registry = cast(Registry, None)  # a save would ask it, and nothing is saved here
        checkpoints = Checkpoints(loaded, base_model=BASE, slug=BASE, registry=registry, data_dir=Path(BASE))
        self.device = Device(loaded, checkpoints, token_budget=token_budget, **options)

    @property
    def residency(self) -> Residency:
        """Where the runs lie."""
        return self.device.residency

    def run(self, number: int, *, rank: int) -> Run:
        """Create a run on every layer and the head."""
        run = Run(tenant="bench", run_id=f"run-{number}:train:0", token=1)
        self.call([(run, CreateModel(base_model=BASE, rank=rank, seed=number))])
        return run

    def call(self, pairs: Sequence[tuple[Run, Message]]) -> list[Outcome]:
        """Carry out operations together; stop at the first that fails."""
        works = [Work(run=run, seq_id=number, message=message) for number, (run, message) in enumerate(pairs, 1)]
        outcomes = self.device.execute(works)
        for outcome in outcomes:
            if outcome.error is not None:
                raise OperationFailed(outcome.error)
        return outcomes

    def step(self, pairs: Sequence[tuple[Run, ForwardBackward]]) -> None:
        """Let runs take a training step each, their forwards in one pass."""
        self.call(pairs)
        self.call([(run, ADAMW) for run in dict.fromkeys(run for run, _ in pairs)])


def batch(num: int, length: int, *, vocab: int, seed: int = 0, targets: int | None = None) -> ForwardBackward:
    """Draw `num` sequences of `length` tokens, with one target a position or with `targets` of them."""
    draw = np.random.default_rng(seed)
    shape = (length,) if targets is None else (length, targets)
    data = tuple(
        Datum(
            tokens=draw.integers(0, vocab, length).astype(np.int32),
            inputs={"target_tokens": draw.integers(0, vocab, shape), "weights": np.ones(shape, np.float32)},
        )
        for _ in range(num)
    )
    return ForwardBackward(data=data, loss_fn="cross_entropy", loss_fn_config={})
