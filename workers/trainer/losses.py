"""The losses: from log-probabilities to a token sum and its metrics. Pure functions.

Every loss is a sum over tokens, never a mean, so that the pieces of a batch add up and one run's tokens
never change the weight of another's. The formulas are Tinker's (https://tinker-docs.thinkingmachines.ai/losses).
Element-wise in float32, summed in float64. What a caller may send is checked long before.

All tensors of one call have one shape: [T] or [T, K], where T counts tokens and K targets a position.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.tasks.losses import LOSSES as SERVED

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float]

_MAX_LOG_RATIO = 80.0
"""exp of this is the order of the largest float32; far above any clip bound."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of each token (float32, differentiable) and metrics named `name:reduction`."""

    per_token: Tensor
    metrics: dict[str, float]

    @property
    def total(self) -> Tensor:
        """The token sum, float64."""
        return self.per_token.sum(dtype=torch.float64)


def cross_entropy(logprobs: Tensor, inputs: Inputs, _: Config) -> Loss:
    """Return `-sum(weights * logprobs)`; the weights are any real numbers, ones where absent."""
    weights = inputs.get("weights")
    per_token = -logprobs if weights is None else -logprobs * weights
    return Loss(per_token, {"tokens:sum": float(logprobs.numel())})


def importance_sampling(logprobs: Tensor, inputs: Inputs, _: Config) -> Loss:
    """Return `-sum(ratio * advantages)` with the gradient through the ratio; no clip, no KL term."""
    advantages = inputs["advantages"]
    log_ratio = _log_ratio(logprobs, inputs["logprobs"], advantages)
    ratio = log_ratio.exp()
    return Loss(-(ratio * advantages), _ratio_metrics(ratio, log_ratio, advantages))


def ppo(logprobs: Tensor, inputs: Inputs, config: Config) -> Loss:
    """Return `-sum(min(ratio * A, clip(ratio, low, high) * A))`; the bounds are absolute ratios."""
    advantages = inputs["advantages"]
    settings = SERVED["ppo"].settings(config)
    low, high = settings["clip_low_threshold"], settings["clip_high_threshold"]
    log_ratio = _log_ratio(logprobs, inputs["logprobs"], advantages)
    # A ratio this high is clipped where the advantage is positive: bounding it first changes no value, and
    # keeps 0 * inf out of the gradient. A negative advantage is not clipped there, so it stays as it is.
    log_ratio = torch.where(advantages > 0, log_ratio.clamp(max=_MAX_LOG_RATIO), log_ratio)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(low, high)
    gain, clipped_gain = ratio * advantages, clipped * advantages
    metrics = _ratio_metrics(ratio, log_ratio, advantages)
    metrics["clipped_tokens:sum"] = float((clipped_gain < gain).sum())
    return Loss(-torch.minimum(gain, clipped_gain), metrics)


LOSSES: dict[str, Callable[[Tensor, Inputs, Config], Loss]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
}


_RULES: dict[str, Callable[[float, float], float]] = {"sum": operator.add, "min": min, "max": max}


def merge(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    """Fold the metrics of another piece of the same operation into `metrics`."""
    for name, value in more.items():
        rule = _RULES[name.rpartition(":")[2]]
        metrics[name] = rule(metrics[name], value) if name in metrics else value


def _log_ratio(logprobs: Tensor, sampled: Tensor, advantages: Tensor) -> Tensor:
    """Return log(learner / sampler), 0 where the advantage is 0: such a token adds nothing, whatever its ratio."""
    return torch.where(advantages != 0, logprobs - sampled, torch.zeros_like(logprobs))


def _ratio_metrics(ratio: Tensor, log_ratio: Tensor, advantages: Tensor) -> dict[str, float]:
    """Describe the ratios of the tokens that count. `kl:sum` estimates KL(sampler || learner) (k1)."""
    counted = advantages != 0
    ratios = ratio.detach()[counted]
    return {
        "tokens:sum": float(ratio.numel()),
        "active_tokens:sum": float(ratios.numel()),
        "ratio:sum": float(ratios.sum(dtype=torch.float64)),
        "ratio:min": float(ratios.min()) if ratios.numel() else 1.0,
        "ratio:max": float(ratios.max()) if ratios.numel() else 1.0,
        "kl:sum": -float(log_ratio.detach().sum(dtype=torch.float64)),
    }
