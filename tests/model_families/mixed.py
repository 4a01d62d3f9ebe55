"""Eight runs in one pass, each of them alone, and the plain way: stock transformers with PEFT, or plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from openrl.tasks.journal import Outcome
from openrl.tasks.messages import ForwardBackward, OptimStep
from openrl.tasks.wire.codec import output_to_json
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer.runs import Run
from openrl.workers.weights.adapter import Adapter, save_adapter
from tests.plain import LOSSES, Plain, exported
from tests.trainer.bench import BASE, Bench, computed, forward_backward

KINDS = [
    (1, {}),
    (2, {"train_mlp": False, "train_unembed": False}),
    (4, {"train_attn": False, "train_unembed": False}),
    (8, {"train_attn": False, "train_mlp": False}),
    (16, {"train_unembed": False}),
    (32, {}),
    (64, {"train_mlp": False, "train_unembed": False}),
    (3, {"train_attn": False}),
]
"""Rank and targets of the runs."""
LENGTHS = [40, 7]
STEPS = [OptimStep(learning_rate=1e-2, eps=10.0), OptimStep(learning_rate=2e-2, eps=5.0, weight_decay=0.1)]


@dataclass
class Mixed:
    """A device on one model and eight runs, with an operation for each."""

    bench: Bench
    model: Path
    runs: list[Run]
    messages: list[ForwardBackward]

    @classmethod
    def of(cls, loaded: LoadedModel, directory: Path, *, first: int = 0, lengths: list[int] = LENGTHS) -> Mixed:
        """The runs' losses go round, from number `first` on."""
        bench = Bench(loaded, directory, token_budget=4096)
        runs = [a_run(bench, number) for number in range(len(KINDS))]
        messages = [forward_backward(LOSSES[(first + n) % len(LOSSES)], lengths, seed=20 + n) for n in range(len(runs))]
        return cls(bench, Path(loaded.tokenizer_path), runs, messages)

    def together(self) -> list[Outcome]:
        """All operations in one pass."""
        return self.bench.all(*zip(self.runs, self.messages, strict=True))

    def alone(self, number: int) -> tuple[Run, Outcome]:
        """A fresh run like number `number`, and its operation in a pass of its own."""
        run = a_run(self.bench, number, offset=100)
        return run, self.bench.one(run, self.messages[number])

    def plain(self, number: int) -> Plain:
        """The same weights in stock PEFT; for a stack of experts in stock transformers and plain torch."""
        directory = self.export(self.runs[number], "plain")
        stacked = any(a.ndim == 3 for a, _ in self.runs[number].weights().weights.values())
        return Merged(self.model, directory) if stacked else Plain(self.model, directory)

    def export(self, run: Run, name: str, adapter: Adapter | None = None) -> Path:
        directory = self.bench.data_dir / f"{run.run_id}-{name}".replace(":", "_")
        directory.mkdir()
        save_adapter(directory, adapter or run.weights(), BASE)
        return directory

    def gradient(self, run: Run, name: str = "gradient") -> dict[str, Tensor]:
        """A run's gradient under the names that its factors have on disk."""
        weights, gradient = run.weights(), iter(run.gradient)
        pairs = {module: (next(gradient), next(gradient)) for module in weights.weights}
        return exported(self.export(run, name, Adapter(rank=weights.rank, weights=pairs)))


def a_run(bench: Bench, number: int, *, offset: int = 0) -> Run:
    """A run of its kind that changes the base's weights by about a third of their size, whatever its rank."""
    rank, flags = KINDS[number]
    run = bench.run(number + offset, rank=rank, seed=number + 1, warm=False, **flags)
    draw = torch.Generator().manual_seed(number)
    with torch.no_grad():
        for _, b in run.weights().weights.values():
            b.copy_(torch.randn(b.shape, generator=draw) * 0.02 * rank**0.5)
    return run


class Merged(Plain):
    """A LoRA run without PEFT: `scale * B @ A` is added to the weights, and autograd does the rest."""

    def __init__(self, model_dir: Path, adapter_dir: Path) -> None:
        self.stock = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).requires_grad_(False)
        self.frozen = dict(self.stock.named_parameters())
        self.parameters = {name: tensor.requires_grad_() for name, tensor in exported(adapter_dir).items()}
        self._adamw = torch.optim.AdamW(list(self.parameters.values()), lr=1.0)

    def model(self, input_ids: Tensor) -> object:
        return functional_call(self.stock, self.merged(), kwargs={"input_ids": input_ids})

    def merged(self) -> dict[str, Tensor]:
        weights = dict(self.frozen)
        for name in self.parameters:
            module, factor = name.rsplit(".", 2)[0], name.rsplit(".", 2)[1]
            if factor == "lora_A" and ".experts." not in module:
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + self.delta(module)
        for name, stack in self.frozen.items():
            parts = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}.get(name.split(".")[-1])
            modules = name.rpartition(".")[0]
            if parts and f"{modules}.0.{parts[0]}.lora_A.weight" in self.parameters:
                deltas = [
                    torch.cat([self.delta(f"{modules}.{number}.{part}") for part in parts])
                    for number in range(len(stack))
                ]
                weights[name] = stack + torch.stack(deltas)
        return weights

    def delta(self, module: str) -> Tensor:
        a, b = self.parameters[f"{module}.lora_A.weight"], self.parameters[f"{module}.lora_B.weight"]
        return 32 / len(a) * b @ a


def result(outcome: Outcome) -> tuple[np.ndarray, dict[str, float]]:
    """All log-probabilities of an operation, and its metrics."""
    assert outcome.error is None, outcome.error
    decoded = output_to_json(outcome.result)
    return np.concatenate([record["logprobs"]["data"] for record in decoded["loss_fn_outputs"]]), computed(
        decoded["metrics"]
    )
