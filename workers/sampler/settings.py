"""What an operator can set for a sampler, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from openrl.workers.sampler.places import SMALLEST

PREFIX = "OPENRL_SAMPLER_"

ENGINES = ("torch", "vllm")
BETWEEN_TURNS = ("stays", "sleeps")
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM takes as its largest."""
VLLM_HEADS = ("llama", "qwen3", "qwen3_moe")
"""Types of models on whose unembedding vLLM 0.32 and 0.33 put adapters: those whose classes name it for that."""
MOST_VLLM_HEAD = 258048
"""The largest vocabulary on whose unembedding vLLM 0.32 and 0.33 put adapters."""

MAY_BE_NONE = ("weights_copy_bytes",)
"""Settings that 0 turns off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerSettings:
    """Read from OPENRL_SAMPLER_<FIELD>; a value that makes no sense is refused at start-up."""

    slots: int = 64
    """Sequences that decode at the same time, shared between the tenants that have any; a CPU gains little from more.
    So many requests of a tenant are taken from the waiting set at a time."""

    kv_tokens: int = 65536
    """Positions of the cache, a power of two. It bounds the cache's memory (on a CPU untouched ones take none), the
    length of a sequence, and how many long ones run at once: each takes the power of two above what it has reached."""

    prefill_tokens: int = 512
    """Tokens of prompts, and of sequences that had given way, read per step beside the running sequences: what a long
    prompt may delay them by."""

    weights_copy_bytes: int = 1 << 30
    """On a CPU, what a second copy of the layers' weights may take, from which a few rows are multiplied a third
    faster: as many layers as fit have one. None where accelerators are shared, nor of full runs. 0 turns it off."""

    versions: int = 16
    """Adapters kept in memory beyond those in use; others are loaded again on demand. vLLM keeps no more than
    `max_cpu_loras` less `max_loras`."""

    version_turn_s: float = 2.0
    """Of a full run, one version is in memory at a time: how long it stays at least while others are asked for. Longer
    where a switch takes over a tenth of that, up to this and `version_drain_s` together."""

    version_drain_s: float = 10.0
    """How long, after that, what runs on it may take to end; what hasn't goes on when its version comes again, and then
    reads again what it had."""

    poll_s: float = 0.25
    """How often the waiting set is looked at when no doorbell rings."""

    stop_s: float = 5.0
    """How long a worker that is asked to stop lets a running step end before it leaves all the same."""

    engine: str = "torch"
    """What draws: torch or vllm. `openrl up --sampler` sets it."""

    full_engine: str = "torch"
    """What draws from the versions of full runs. vllm needs a GPU and --sampler vllm, and was not run on a GPU yet: run
    benchmarks/gpu_sampler.py there first."""

    max_loras: int = 8
    """vLLM: adapters in one batch; requests of more wait, and make way for each other by turns. Each takes its place in
    the device's memory, used or not. The torch engine has no such limit."""

    max_cpu_loras: int = 32
    """vLLM: adapters in host memory; others are read again from their files on demand. The torch engine: `versions`."""

    max_lora_rank: int = 64
    """vLLM: largest rank of an adapter, which every place for one is made for. A run with a larger one is refused when
    it is created. The torch engine takes any."""

    tensor_parallel_size: int = 1
    """vLLM: devices that one model is spread over; the worker must see as many."""

    gpu_memory_utilization: float = 0.9
    """vLLM on a GPU: share of its memory for weights and cache, where `kv_tokens` has no effect. A trainer on the same
    device needs the rest."""

    between_turns: str = "stays"
    """vLLM where accelerators are shared: with stays it has one alone; with sleeps it takes turns, and puts its weights
    into host memory between them. That needs a GPU, and was not run on one yet."""

    def __post_init__(self) -> None:
        for name, choices in (("engine", ENGINES), ("full_engine", ENGINES), ("between_turns", BETWEEN_TURNS)):
            if getattr(self, name) not in choices:
                raise ValueError(
                    f"{PREFIX}{name.upper()} must be {' or '.join(choices)}; it is {getattr(self, name)!r}"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if type(field.default) is str or value > 0 or (field.name in MAY_BE_NONE and value == 0):
                continue
            least = "0 or more" if field.name in MAY_BE_NONE else "above 0"
            raise ValueError(f"{PREFIX}{field.name.upper()} must be {least}; it is {value}")
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"{PREFIX}MAX_LORA_RANK must be one of {LORA_RANKS}; it is {self.max_lora_rank}")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"{PREFIX}MAX_CPU_LORAS must be at least {PREFIX}MAX_LORAS ({self.max_loras}); it is "
                f"{self.max_cpu_loras}"
            )
        if self.gpu_memory_utilization > 1:
            raise ValueError(f"{PREFIX}GPU_MEMORY_UTILIZATION must be at most 1; it is {self.gpu_memory_utilization}")
        if self.kv_tokens < SMALLEST or self.kv_tokens & (self.kv_tokens - 1):
            raise ValueError(f"{PREFIX}KV_TOKENS must be a power of two from {SMALLEST} on; it is {self.kv_tokens}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read every field that is set; the rest keep their defaults."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if environ.get(name):
                kind = type(field.default)
                values[field.name] = environ[name] if kind is str else _number(name, environ[name], kind)
        return cls(**values)

    def serves(self, model_type: str, vocab_size: int) -> tuple[int, bool]:
        """Return the largest rank of an adapter that is served on such a base, 0 meaning any.

        And whether adapters on its unembedding are, by the type of model and how many tokens there are.
        """
        if self.engine == "torch":
            return 0, True
        return self.max_lora_rank, model_type in VLLM_HEADS and vocab_size <= MOST_VLLM_HEAD


def _number(name: str, text: str, kind: type) -> int | float:
    try:
        return kind(text)
    except ValueError as failure:
        raise ValueError(f"{name} must be a number; it is {text!r}") from failure
