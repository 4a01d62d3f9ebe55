"""A device on a tiny model without a store, short ways to ask it for things, and data for it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from openrl.tasks.errors import NotFound
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import CreateModel, Datum, Forward, ForwardBackward, Message
from openrl.tasks.registry import Checkpoint
from openrl.tasks.wire.codec import output_to_json
from openrl.workers.model import loading
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.full import FullTuning
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work

BASE = "tiny"


@dataclass
class FakeRegistry:
    """Checkpoints by id."""

    known: dict[str, Checkpoint] = field(default_factory=dict)

    def checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        if checkpoint_id not in self.known:
            raise NotFound(checkpoint_id)
        return self.known[checkpoint_id]


class Bench:
    """A device, and short ways to ask it for things."""

    def __init__(
        self,
        loaded: loading.LoadedModel,
        data_dir: Path,
        *,
        token_budget: int = 96,
        full: FullTuning | None = None,
    ) -> None:
        self.loaded = loaded
        self.data_dir = data_dir
        self.registry = FakeRegistry()
        self.checkpoints = Checkpoints(
            loaded, base_model=BASE, slug=BASE, registry=self.registry, data_dir=data_dir, full=full
        )
        self.device = Device(loaded, self.checkpoints, token_budget=token_budget)
        self._next = 0

    def run(self, number: int = 0, *, rank: int = 4, seed: int = 0, warm: bool = True, **flags: bool) -> Run:
        """Create a run; `warm` gives B random values, so that every gradient is non-zero."""
        run = Run(tenant="t", run_id=f"s-{number}:train:0", token=1 << 32)
        outcome = self.one(run, CreateModel(base_model=BASE, rank=rank, seed=seed, **flags))
        assert outcome.error is None, outcome.error
        if warm:
            draw = torch.Generator().manual_seed(seed + 1)
            for a, b in run.weights().weights.values():
                with torch.no_grad():
                    b.copy_(torch.randn(b.shape, generator=draw) * 0.05 + a.mean() * 0)
        return run

    def work(self, run: Run, message: Message) -> Work:
        """Give an operation the next number."""
        self._next += 1
        return Work(run=run, seq_id=self._next, message=message)

    def one(self, run: Run, message: Message) -> Outcome:
        """Carry out one operation."""
        [outcome] = self.device.execute([self.work(run, message)])
        return outcome

    def all(self, *pairs: tuple[Run, Message]) -> list[Outcome]:
        """Carry out several operations in one call."""
        return self.device.execute([self.work(run, message) for run, message in pairs])


COSTS = ("seconds:sum", "pass_tokens:max")
"""Metrics of what an operation cost, which depends on its pass and on the machine."""


def computed(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics without those of what the operation cost, which have to be there."""
    assert metrics.keys() >= set(COSTS), metrics
    return {name: value for name, value in metrics.items() if name not in COSTS}


def told(result: bytes) -> dict[str, Any]:
    """Return what a promise of any kind holds, without what the operation cost."""
    if result.startswith(b"{"):
        answer: dict[str, Any] = json.loads(result)
        return answer
    answer = output_to_json(result)
    return answer | {"metrics": computed(answer["metrics"])}


def make_data(loss_fn: str, lengths: list[int], *, seed: int = 0, width: int | None = None) -> tuple[Datum, ...]:
    """Random sequences of these lengths with the inputs of a loss; `width` gives K targets a position."""
    draw = np.random.default_rng(seed)
    data = []
    for length in lengths:
        shape = (length,) if width is None else (length, width)
        inputs: dict[str, np.ndarray] = {"target_tokens": draw.integers(0, 260, shape)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = draw.normal(size=shape).astype(np.float32)
        else:
            inputs["logprobs"] = (draw.normal(size=shape) * 0.3 - 6).astype(np.float32)
            inputs["advantages"] = draw.normal(size=shape).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(length) >= length // 3).astype(np.float32)
        data.append(Datum(tokens=draw.integers(0, 260, length).astype(np.int32), inputs=inputs))
    return tuple(data)


def forward_backward(
    loss_fn: str = "cross_entropy",
    lengths: list[int] | None = None,
    *,
    seed: int = 0,
    width: int | None = None,
    forward: bool = False,
    **config: float,
) -> ForwardBackward:
    """A forward_backward (or a forward) over random data."""
    kind = Forward if forward else ForwardBackward
    return kind(
        data=make_data(loss_fn, lengths or [5, 9], seed=seed, width=width), loss_fn=loss_fn, loss_fn_config=config
    )
