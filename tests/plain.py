"""The obvious way, to compare with: stock transformers and PEFT, one sequence at a time, every loss as its formula.

Dense log-softmax over the whole vocabulary, autograd, torch's own AdamW. Nothing of ours is called.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


class Plain:
    """One run: LoRA from the files of an adapter, or without one all weights of the model."""

    def __init__(self, model_dir: Path, adapter_dir: Path | None, dtype: torch.dtype = torch.float32) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stock = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
            self.model = stock
            if adapter_dir is not None:
                self.model = PeftModel.from_pretrained(stock, adapter_dir, is_trainable=True)
        self.model.to(dtype).eval()
        self.parameters = {
            name.removeprefix("base_model.model.").replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(list(self.parameters.values()), lr=1.0)

    def logprobs(self, tokens: np.ndarray, targets: np.ndarray) -> Tensor:
        """Log-probability of each target, [N] or [N, K]."""
        logits = self.model(input_ids=torch.tensor(tokens.astype(np.int64))[None]).logits[0]
        wanted = torch.tensor(targets)
        return logits.log_softmax(-1).gather(1, wanted.view(len(tokens), -1)).view(wanted.shape)

    def forward(self, data: Sequence[Any], loss_fn: str, **config: float) -> tuple[Tensor, list[np.ndarray]]:
        """The loss of all datums (anything with `tokens` and `inputs`), and their log-probabilities."""
        total, arrays = torch.zeros((), dtype=torch.float64), []
        self._told = []
        for datum in data:
            logprobs = self.logprobs(datum.tokens, datum.inputs["target_tokens"])
            self._told.append(logprobs)
            inputs = {name: torch.tensor(array) for name, array in datum.inputs.items()}
            total = total + loss(loss_fn, logprobs, inputs, **config).double()
            arrays.append(logprobs.detach().numpy())
        return total, arrays

    def forward_backward(self, data: Sequence[Any], loss_fn: str, **config: float) -> tuple[float, list[np.ndarray]]:
        """The same, its gradient added to what is there."""
        total, arrays = self.forward(data, loss_fn, **config)
        for logprobs in self._told:
            logprobs.retain_grad()
        total.backward()
        return total.item(), arrays

    def steepness(self) -> float:
        """How far the last loss moves where each log-probability is off by one nat, by chance up or down."""
        return math.sqrt(sum(float(logprobs.grad.square().sum()) for logprobs in self._told))

    def step(self, **changes: float) -> None:
        """One step of torch's AdamW with Tinker's defaults; clears the gradient."""
        hyper = ADAM | changes
        self._adamw.param_groups[0].update(
            lr=hyper["learning_rate"], betas=(hyper["beta1"], hyper["beta2"]), eps=hyper["eps"],
            weight_decay=hyper["weight_decay"],
        )  # fmt: skip
        norm = self.gradient_norm()
        if 0 < hyper["grad_clip_norm"] < norm:
            for parameter in self.parameters.values():
                parameter.grad *= hyper["grad_clip_norm"] / norm
        self._adamw.step()
        self._adamw.zero_grad()

    def gradients(self) -> dict[str, Tensor]:
        return {name: parameter.grad for name, parameter in self.parameters.items()}

    def gradient_norm(self) -> float:
        return float(torch.cat([grad.flatten() for grad in self.gradients().values()]).norm())

    def weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in self.parameters.items()}


def loss(
    name: str,
    lp: Tensor,
    inputs: Mapping[str, Tensor],
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    beta: float = 0.05,
) -> Tensor:
    """The loss of one sequence, written as plainly as possible."""
    if name == "cross_entropy":
        return -(inputs["weights"] * lp).sum()
    q, a = inputs["logprobs"], inputs["advantages"]
    r = (lp - q).exp()
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "cispo":
        return -(r.clamp(clip_low_threshold, clip_high_threshold).detach() * lp * a).sum()
    if name == "dro":
        return -(lp * a - 0.5 * beta * (lp - q) ** 2).sum()
    if name == "gspo":
        mean = (lp - q)[inputs["sequence_ratio_mask"] != 0].mean().detach()
        r = (mean + lp - lp.detach()).exp()
    return -torch.min(r * a, r.clamp(clip_low_threshold, clip_high_threshold) * a).sum()


def exported(directory: Path) -> dict[str, Tensor]:
    """The factors in an adapter's directory, named as `Plain.weights`."""
    tensors = load_file(directory / "adapter_model.safetensors")
    return {name.removeprefix("base_model.model."): tensor for name, tensor in tensors.items()}


def furthest(mine: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest ||a-b|| / ||b|| of all tensors, and its name; a zero tensor must be met exactly."""
    assert mine.keys() == expected.keys()
    errors = []
    for name, right in expected.items():
        gap, norm = float((mine[name] - right).norm()), float(right.norm())
        errors.append((gap / norm if norm else gap, name))
    return max(errors)
