"""The losses: from log-probabilities to a token sum and its metrics. Pure functions.

Every loss is a sum over tokens, never a mean, so that the pieces of a batch add up and one run's tokens
never change the weight of another's. The formulas are Tinker's (https://tinker-docs.thinkingmachines.ai/losses).
Element-wise in float32, summed in float64. What a caller may send is checked long before.

All tensors of one call have one shape: [T] or [T, K], where T counts tokens and K targets a position.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrl.tasks.losses import LOSSES as SERVED
from openrl.tasks.losses import SEQUENCE_MASK

_MAX_LOG_RATIO = 80.0
"""exp of this is the order of the largest float32; far above any clip bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Whole sequences, one behind another, with all that a loss is computed from."""

    logprobs: Tensor
    """The learner's, float32, differentiable."""
    inputs: Mapping[str, Tensor]
    settings: Mapping[str, float]
    lengths: Sequence[int]
    """Tokens of each sequence; together T."""

    @property
    def log_ratio(self) -> Tensor:
        """log(learner / sampler) of each token."""
        return self.logprobs - self.inputs["logprobs"]

    @property
    def active(self) -> Tensor:
        """Which tokens count: those whose advantage isn't 0."""
        return self.inputs["advantages"] != 0


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of each token (float32, differentiable) and metrics named `name:reduction`, 0-dimensional."""

    per_token: Tensor
    metrics: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """The token sum, float64."""
        return self.per_token.sum(dtype=torch.float64)

    def numbers(self) -> dict[str, float]:
        """Return all metrics as numbers, `loss:sum` and `tokens:sum` among them; one copy from the device."""
        metrics = {"loss:sum": self.total, **self.metrics}
        values = torch.stack([value.detach().double() for value in metrics.values()]).tolist()
        return dict(zip(metrics, values, strict=True)) | {"tokens:sum": float(self.per_token.numel())}


def compute(
    loss_fn: str, logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float], lengths: Sequence[int]
) -> Loss:
    """Compute the served loss `loss_fn`; settings that `config` lacks have their defaults."""
    settings = SERVED[loss_fn].settings(config)
    return LOSSES[loss_fn](Batch(logprobs=logprobs, inputs=inputs, settings=settings, lengths=lengths))


def cross_entropy(batch: Batch) -> Loss:
    """Return `-sum(weights * logprobs)`; the weights are any real numbers, ones where absent."""
    weights = batch.inputs.get("weights")
    weights = torch.ones_like(batch.logprobs) if weights is None else weights
    return Loss(-batch.logprobs * weights, {"active_tokens:sum": (weights != 0).sum()})


def importance_sampling(batch: Batch) -> Loss:
    """Return `-sum(ratio * advantages)` with the gradient through the ratio; no clip, no KL term."""
    ratio = _or_zero(batch.active, batch.log_ratio).exp()
    return Loss(-ratio * batch.inputs["advantages"], _ratio_metrics(batch, ratio, batch.active))


def ppo(batch: Batch) -> Loss:
    """Return `-sum(min(ratio * A, clip(ratio, low, high) * A))`; the bounds are absolute ratios."""
    return _clipped(batch, batch.log_ratio)


def cispo(batch: Batch) -> Loss:
    """Return `-sum(clip(ratio, low, high) * logprobs * A)`, the clipped ratio being a constant weight."""
    ratio = _bounded(_or_zero(batch.active, batch.log_ratio.detach())).exp()
    weight = ratio.clamp(*_bounds(batch))
    metrics = _ratio_metrics(batch, ratio, batch.active)
    metrics["clipped_tokens:sum"] = ((weight != ratio) & batch.active).sum()
    return Loss(-weight * batch.logprobs * batch.inputs["advantages"], metrics)


def dro(batch: Batch) -> Loss:
    """Return `-sum(logprobs * A - beta / 2 * log_ratio^2)`. The penalty counts everywhere, whatever the advantage."""
    log_ratio = batch.log_ratio
    gain = batch.logprobs * batch.inputs["advantages"] - 0.5 * batch.settings["beta"] * log_ratio.square()
    return Loss(-gain, _ratio_metrics(batch, _bounded(log_ratio).exp(), torch.ones_like(gain, dtype=torch.bool)))


def gspo(batch: Batch) -> Loss:
    """Return ppo's loss with one ratio a sequence, the geometric mean of those of its masked tokens.

    Each token carries that value with the gradient of its own log-probability (Zheng et al. 2025, "Group
    Sequence Policy Optimization", GSPO-token).
    """
    parts = batch.log_ratio.detach().split(list(batch.lengths))
    masks = (batch.inputs[SEQUENCE_MASK] != 0).split(list(batch.lengths))
    means = torch.cat([_masked_mean(part, mask).expand_as(part) for part, mask in zip(parts, masks, strict=True)])
    return _clipped(batch, means + (batch.logprobs - batch.logprobs.detach()))


LOSSES: dict[str, Callable[[Batch], Loss]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}


_RULES: dict[str, Callable[[float, float], float]] = {"sum": operator.add, "min": min, "max": max}


def merge(metrics: dict[str, float], more: Mapping[str, float]) -> None:
    """Fold the metrics of another piece of the same operation into `metrics`."""
    for name, value in more.items():
        rule = _RULES[name.rpartition(":")[2]]
        metrics[name] = rule(metrics[name], value) if name in metrics else value


def _clipped(batch: Batch, log_ratio: Tensor) -> Loss:
    advantages = batch.inputs["advantages"]
    log_ratio = _or_zero(batch.active, log_ratio)
    # A ratio this high is clipped where the advantage is positive: bounding it first changes no value, and
    # keeps 0 * inf out of the gradient. A negative advantage is not clipped there, so it stays as it is.
    ratio = torch.where(advantages > 0, _bounded(log_ratio), log_ratio).exp()
    gain, clipped_gain = ratio * advantages, ratio.clamp(*_bounds(batch)) * advantages
    metrics = _ratio_metrics(batch, ratio, batch.active)
    metrics["clipped_tokens:sum"] = (clipped_gain < gain).sum()
    return Loss(-torch.minimum(gain, clipped_gain), metrics)


def _bounds(batch: Batch) -> tuple[float, float]:
    return batch.settings["clip_low_threshold"], batch.settings["clip_high_threshold"]


def _bounded(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(max=_MAX_LOG_RATIO)


def _or_zero(counted: Tensor, values: Tensor) -> Tensor:
    """Return `values`, 0 where they don't count: a log-ratio there may be anything."""
    return torch.where(counted, values, 0.0)


def _masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean where `mask` holds, summed in float64; 0 where it holds nowhere."""
    total = _or_zero(mask, values).sum(dtype=torch.float64)
    return (total / mask.sum().clamp(min=1)).to(values.dtype)


def _ratio_metrics(batch: Batch, ratio: Tensor, active: Tensor) -> dict[str, Tensor]:
    """Describe the ratios, which are 1 where a token doesn't count. `kl:sum` estimates KL(sampler || learner) (k1)."""
    return {
        "active_tokens:sum": active.sum(),
        "ratio:sum": _or_zero(active, ratio).sum(dtype=torch.float64),
        "ratio:min": ratio.min(),
        "ratio:max": ratio.max(),
        "kl:sum": _or_zero(active, -batch.log_ratio).sum(dtype=torch.float64),
    }
