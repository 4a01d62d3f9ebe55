"""The trainer's settings: read from the environment once, in `__main__`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Self

PREFIX = "OPENRL_TRAINER_"

_MAY_BE_0 = ("torch_threads", "token_budget", "runs_per_pass", "device_runs", "device_bytes")
_TYPES = ("auto", "float32", "bfloat16")
_WORDS = {
    "gradient_checkpointing": ("auto", "on", "off"),
    "entropy": ("on", "off"),
    "grouped_mm": ("auto", "on", "off"),
    "moments": ("device", "host"),
    "compute_dtype": _TYPES,
    "publish_dtype": _TYPES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Each field is read from OPENRL_TRAINER_<NAME>, but `torch_threads` from OPENRL_TORCH_THREADS."""

    token_budget: int = 0
    """Tokens of one micro-batch and of one pass: bounds activation memory, and how long others wait for a pass.

    0 means 1024 on a CPU, where more is no faster (1.8 MB of activations a token for a model of 135M parameters),
    and 16384 on a GPU.
    """

    torch_threads: int = 0
    """Threads of torch on a CPU; 0 means all cores. Fewer where a sampler shares the machine."""

    poll_s: float = 0.25
    """How often an idle trainer looks into the journal when no doorbell has rung, in seconds."""

    max_runs: int = 256
    """Runs looked at in one go."""

    max_operations: int = 8
    """Operations of one run looked at in one go, without their bodies."""

    doubt_s: float = 5.0
    """Pause before rebuilding again a run that couldn't be rebuilt, in seconds; it doubles four times."""

    runs_per_pass: int = 0
    """Runs that share one forward and backward at most; 0: as many as the budget has room for. With 1 a run's weights
    don't depend, not by a bit, on who else trains; passes are smaller and dearer."""

    device_runs: int = 0
    """Runs whose adapter, moments and gradient lie on the device at a time; 0: no bound. The least recently used ones
    move to host memory, and come back with the same bits. It bounds the runs of a pass as well. On a CPU, where the
    device is the host, moving saves nothing: it is there to be tried."""

    device_bytes: int = 0
    """... or so many bytes of them; a run counts with two moments and a gradient. It bounds the runs of a pass too, and
    a run that is larger by itself is refused. 0: a quarter of what a GPU has left beside the base model, no bound on a
    CPU."""

    gradient_checkpointing: str = "auto"
    """Whether a layer keeps its input alone and computes the rest again in backward: a third more work, a tenth of the
    memory, the same bits. `auto`: in those micro-batches for which memory would not suffice; `on`; `off`."""

    grouped_mm: str = "auto"
    """Whether the adapters of a pass are multiplied in groups, in place of one after another: `auto`: on a GPU whose
    torch can, in bfloat16; `on`: on a CPU too; `off`."""

    entropy: str = "off"
    """`on`: the metrics of a forward have `entropy:sum`, of what its active tokens are predicted from. No pass more,
    but one walk more over each chunk of logits."""

    moments: str = "device"
    """Full fine-tuning: where AdamW's moments lie. `host`: in host memory (page-locked beside a GPU); a step then takes
    them to the device piece by piece, and 8 bytes a parameter less lie there. No effect on LoRA runs."""

    compute_dtype: str = "auto"
    """Full fine-tuning: the type that the model computes in, beside float32 masters. `auto`: bfloat16 on a GPU, float32
    on a CPU. No effect on LoRA runs."""

    publish_dtype: str = "auto"
    """Full fine-tuning: the type of versions for samplers. `auto`: the one that each tensor of the base model has on
    disk. In float32 nearly all values change with each step, so that nothing is saved by sending changes alone."""

    snapshot_operations: int = 256
    """A recovery snapshot follows after this many operations, once no gradient is pending: bounds what a takeover
    repeats."""

    snapshot_bytes: int = 256 << 20
    """... or after this many bytes of operations: bounds what the journal keeps."""

    snapshot_s: float = 5.0
    """... or after operations that took this long to carry out, in seconds: so long does a takeover repeat."""

    snapshot_share: float = 0.04
    """... but not before the last one's time is this share of that, whatever else is due: bounds what snapshots cost.

    A snapshot writes three times the adapter; a large one on a slow disk comes rarely, and a takeover repeats more.
    """

    snapshots_at_once: int = 1
    """Snapshots that are written beside the training at the same time. Each holds a copy of adapter and moments in
    memory; what is due meanwhile waits for its turn."""

    resident_bytes: int = 8 << 30
    """Above this, runs that nothing waits for are handed back, longest idle first."""

    idle_s: float = 900.0
    """A run without operations for this long is handed back, in seconds."""

    stop_s: float = 8.0
    """When stopping, no further run is handed back after this many seconds; takeover rebuilds those left."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense before anything is loaded."""
        for spec in fields(self):
            if spec.name in _WORDS:
                _check_word(spec.name, getattr(self, spec.name))
                continue
            least = 0 if spec.name in _MAY_BE_0 else 1 if spec.type == "int" else 1e-3
            value = getattr(self, spec.name)
            if not least <= value < float("inf"):
                raise ValueError(f"{_variable(spec.name)} must be at least {least}, not {value}")

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Self:
        """Read the settings. Raises ValueError naming the variable to mend."""
        values: dict[str, float | str] = {}
        for spec in fields(cls):
            text = env.get(_variable(spec.name), "")
            if not text or spec.name in _WORDS:
                values |= {spec.name: text} if text else {}
                continue
            try:
                values[spec.name] = int(text) if spec.type == "int" else float(text)
            except ValueError:
                raise ValueError(f"{_variable(spec.name)} must be a number, not {text!r}") from None
        return cls(**values)  # type: ignore[arg-type]  # each value was read as its field's own type


def _check_word(name: str, value: object) -> None:
    if value not in _WORDS[name]:
        raise ValueError(f"{_variable(name)} must be one of {', '.join(_WORDS[name])}, not {value!r}")


def _variable(name: str) -> str:
    return "OPENRL_TORCH_THREADS" if name == "torch_threads" else PREFIX + name.upper()
