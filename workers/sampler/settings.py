"""What an operator can set for a sampler, read once from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from openrl.workers.sampler.places import SMALLEST

PREFIX = "OPENRL_SAMPLER_"


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

    versions: int = 16
    """Adapters kept in memory beyond those in use; others are loaded again on demand."""

    poll_s: float = 0.25
    """How often the waiting set is looked at when no doorbell rings."""

    stop_s: float = 5.0
    """How long a worker that is asked to stop lets a running step end before it leaves all the same."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise ValueError(f"{PREFIX}{field.name.upper()} must be above 0; it is {getattr(self, field.name)}")
        if self.kv_tokens < SMALLEST or self.kv_tokens & (self.kv_tokens - 1):
            raise ValueError(f"{PREFIX}KV_TOKENS must be a power of two from {SMALLEST} on; it is {self.kv_tokens}")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Read every field that is set; the rest keep their defaults."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            name = PREFIX + field.name.upper()
            if environ.get(name):
                values[field.name] = _number(name, environ[name], type(field.default))
        return cls(**values)


def _number(name: str, text: str, kind: type) -> int | float:
    try:
        return kind(text)
    except ValueError as failure:
        raise ValueError(f"{name} must be a number; it is {text!r}") from failure
