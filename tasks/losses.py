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

    def allows(self, value: float) -> bool:
        """Say whether `value` lies in the range; NaN never does."""
        return self.low <= value <= self.high

    def range_text(self) -> str:
        """Return the range in words, for errors."""
        return f"at least {self.low:g} and at most {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """What one loss takes."""

    inputs: Mapping[str, InputSpec]
    config: Mapping[str, SettingSpec] = field(default_factory=dict)

    def settings(self, config: Mapping[str, float]) -> dict[str, float]:
        """Return every setting: as given, else its default."""
        return {name: config.get(name, spec.default) for name, spec in self.config.items()}


SEQUENCE_MASK = "sequence_ratio_mask"
"""gspo's input that says which tokens make up a sequence's ratio: those where it isn't 0."""

_POLICY_INPUTS = {
    "target_tokens": InputSpec(dtype="int64"),
    "logprobs": InputSpec(dtype="float32"),
    "advantages": InputSpec(dtype="float32"),
}

MAX_SETTING = 1e6
"""No ratio bound or penalty above this means anything in float32, and infinity is no number of the wire's JSON."""

_CLIP = {
    # Bounds of the probability ratio itself, not distances from one. A lower bound of 0 is none.
    "clip_low_threshold": SettingSpec(default=0.8, low=0.0, high=1.0),
    "clip_high_threshold": SettingSpec(default=1.2, low=1.0, high=MAX_SETTING),
}

LOSSES: dict[str, LossSpec] = {
    "cross_entropy": LossSpec(
        inputs={
            "target_tokens": InputSpec(dtype="int64", two_d=True),
            # Any real number: custom losses send negative ones. Absent means one for each token.
            "weights": InputSpec(dtype="float32", required=False, two_d=True),
        },
    ),
    "importance_sampling": LossSpec(inputs=_POLICY_INPUTS),
    "ppo": LossSpec(inputs=_POLICY_INPUTS, config=_CLIP),
    "cispo": LossSpec(inputs=_POLICY_INPUTS, config=_CLIP),
    "dro": LossSpec(inputs=_POLICY_INPUTS, config={"beta": SettingSpec(default=0.05, low=0.0, high=MAX_SETTING)}),
    "gspo": LossSpec(inputs=_POLICY_INPUTS | {SEQUENCE_MASK: InputSpec(dtype="float32")}, config=_CLIP),
}

INSTEAD = {
    "stable_reinforce": "its formula is not public; use importance_sampling, ppo, cispo or gspo",
    "custom": "losses are not run on the server; use the SDK's forward_backward_custom with a Python function",
}
"""Losses that Tinker's SDK knows and that aren't served, with what to use."""

FLOAT_INPUTS = frozenset(
    name for loss in LOSSES.values() for name, spec in loss.inputs.items() if spec.dtype == "float32"
)
"""Inputs that are real numbers under every loss: whole numbers sent for them are read as such."""
