"""The losses that are served: their inputs and settings, as a table.

The contract only: the API refuses by it, the trainer computes by it. The formulas are in
`openrl.workers.trainer.losses`. Names, defaults and meaning are Tinker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """One tensor of a datum, aligned with its tokens: [N], or [N, K] where `two_d` allows it."""

    dtype: str
    required: bool = True
    two_d: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingSpec:
    """One number of `loss_fn_config`: its default, and the closed range it must lie in."""

    default: float
    low: float
    high: float
    low_excluded: bool = False

    def allows(self, value: float) -> bool:
        """Say whether `value` lies in the range; NaN never does."""
        return self.low <= value <= self.high and not (self.low_excluded and value == self.low)

    def range_text(self) -> str:
        """Return the range in words, for errors."""
        return f"{'over' if self.low_excluded else 'at least'} {self.low:g} and at most {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """What one loss takes."""

    inputs: Mapping[str, InputSpec]
    config: Mapping[str, SettingSpec] = field(default_factory=dict)

    def settings(self, config: Mapping[str, float]) -> dict[str, float]:
        """Return every setting: as given, else its default."""
        return {name: config.get(name, spec.default) for name, spec in self.config.items()}


_POLICY_INPUTS = {
    "target_tokens": InputSpec(dtype="int64"),
    "logprobs": InputSpec(dtype="float32"),
    "advantages": InputSpec(dtype="float32"),
}

MAX_CLIP = 1e6
"""No ratio bound above this means anything in float32, and infinity is no number of the wire's JSON."""

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        inputs={
            "target_tokens": InputSpec(dtype="int64", two_d=True),
            # Any real number: custom losses send negative ones. Absent means one for each token.
            "weights": InputSpec(dtype="float32", required=False, two_d=True),
        },
    ),
    "importance_sampling": LossSpec(inputs=_POLICY_INPUTS),
    "ppo": LossSpec(
        inputs=_POLICY_INPUTS,
        config={
            # Bounds of the probability ratio itself, not distances from one.
            "clip_low_threshold": SettingSpec(default=0.8, low=0.0, high=1.0, low_excluded=True),
            "clip_high_threshold": SettingSpec(default=1.2, low=1.0, high=MAX_CLIP),
        },
    ),
}

FLOAT_INPUTS = frozenset(
    name for loss in LOSSES.values() for name, spec in loss.inputs.items() if spec.dtype == "float32"
)
"""Inputs that are real numbers under every loss: whole numbers sent for them are read as such."""
