"""What a worker of each served pool needs, by its base model's config.json and the settings of the workers.

Reads each config once. A model whose size can't be told has none that is known, and bounds nothing; `openrl explain`
says why.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from openrl.scheduler.priorities import Priorities
from openrl.scheduler.resources import Need, Pool
from openrl.scheduler.shape import Shape
from openrl.scheduler.sizing import Size, full_trainer, lora_trainer, sampler, vllm_sampler
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.registry import BaseModel

log = logging.getLogger(__name__)

Value = TypeVar("Value")

ON_A_GPU_TOKENS = 16_384
"""Tokens of a pass where no setting says otherwise, as the trainer's own settings have it."""


COMPUTE_DTYPES = {"": "bfloat16", "auto": "bfloat16", "bfloat16": "bfloat16", "float32": "float32"}
"""What full trainers on a GPU compute in, by the setting."""
MOMENTS = {"": False, "device": False, "host": True}
"""Whether they keep their moments in host memory, by the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What workers are sized for; the workers read the same variables."""

    dtype: str = "bfloat16"
    token_budget: int = ON_A_GPU_TOKENS
    """OPENRL_TRAINER_TOKEN_BUDGET: tokens of a micro-batch."""
    compute_dtype: str = "bfloat16"
    """OPENRL_TRAINER_COMPUTE_DTYPE: what full fine-tuning computes in."""
    offloads: bool = False
    """OPENRL_TRAINER_MOMENTS=host: the moments of full fine-tuning lie in host memory."""
    rank: int = 32
    """Rank of the LoRA runs that a trainer is sized for."""
    parked_runs: int = 8
    """So many runs' adapters lie in host memory. On the device there must be room for one: the others are brought there
    as far as there is room, and otherwise when they are used."""
    kv_tokens: int = 65_536
    """OPENRL_SAMPLER_KV_TOKENS: positions of the sampler's cache."""
    versions: int = 16
    """OPENRL_SAMPLER_VERSIONS: adapters that a sampler keeps."""
    vllm: bool = False
    """OPENRL_SAMPLER_ENGINE=vllm: samplers of base models run on it."""
    full_vllm: bool = False
    """OPENRL_SAMPLER_FULL_ENGINE=vllm: so do those of full runs."""
    vllm_sleeps: bool = False
    """OPENRL_SAMPLER_BETWEEN_TURNS=sleeps: vLLM takes turns with others; else it has its accelerator alone."""
    loras: int = 8
    """OPENRL_SAMPLER_MAX_LORAS: places for adapters that vLLM makes on the device."""
    cpu_loras: int = 32
    """OPENRL_SAMPLER_MAX_CPU_LORAS: adapters that vLLM has in host memory."""
    lora_rank: int = 64
    """OPENRL_SAMPLER_MAX_LORA_RANK: the rank that each of those places is made for."""
    vllm_share: float = 0.9
    """OPENRL_SAMPLER_GPU_MEMORY_UTILIZATION: of a device that vLLM takes."""
    only_one: bool = False
    """OPENRL_ACCELERATORS=1: the machine's one device is shared even with vLLM, since a trainer would have none."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Budget:
        """Read what is set. Raises ValueError naming the variable that makes no sense."""
        return cls(
            token_budget=_integer(environ, "OPENRL_TRAINER_TOKEN_BUDGET", 0) or ON_A_GPU_TOKENS,
            compute_dtype=_word(environ, "OPENRL_TRAINER_COMPUTE_DTYPE", COMPUTE_DTYPES),
            offloads=_word(environ, "OPENRL_TRAINER_MOMENTS", MOMENTS),
            kv_tokens=_integer(environ, "OPENRL_SAMPLER_KV_TOKENS", 65_536),
            versions=_integer(environ, "OPENRL_SAMPLER_VERSIONS", 16),
            vllm=environ.get("OPENRL_SAMPLER_ENGINE", "") == "vllm",
            full_vllm=environ.get("OPENRL_SAMPLER_FULL_ENGINE", "") == "vllm",
            vllm_sleeps=environ.get("OPENRL_SAMPLER_BETWEEN_TURNS", "") == "sleeps",
            loras=_integer(environ, "OPENRL_SAMPLER_MAX_LORAS", 8),
            cpu_loras=_integer(environ, "OPENRL_SAMPLER_MAX_CPU_LORAS", 32),
            lora_rank=_integer(environ, "OPENRL_SAMPLER_MAX_LORA_RANK", 64),
            vllm_share=_share(environ, "OPENRL_SAMPLER_GPU_MEMORY_UTILIZATION", 0.9),
            only_one=environ.get("OPENRL_ACCELERATORS", "") == "1",
        )

    def is_vllm(self, pool: Pool) -> bool:
        """Tell whether the pool's workers are vLLM."""
        return pool.kind == "sampler" and (self.full_vllm if pool.is_full else self.vllm)


class Needs:
    """Sizes of workers, each model's config read once, and who comes first."""

    def __init__(self, budget: Budget, priorities: Priorities | None = None) -> None:
        self._budget = budget
        self._priorities = priorities or Priorities()
        self._shapes: dict[str, Shape | str] = {}

    def of(self, pools: Iterable[Pool], models: Iterable[BaseModel], owners: Mapping[str, str]) -> dict[Pool, Need]:
        """Return what a worker of each pool needs. `owners`: the tenant of each pool of a full run."""
        by_name = {model.name: model for model in models}
        return {pool: self._need(pool, by_name[pool.base], owners) for pool in pools if pool.base in by_name}

    def size(self, pool: Pool, model: BaseModel, *, on_bytes: int = 0) -> Size | str:
        """Return the size of a worker of the pool, or why it can't be told. `on_bytes`: the device it would have."""
        shape = self._shape(model)
        if isinstance(shape, str):
            return shape
        budget = self._budget
        if budget.is_vllm(pool):
            loras, cpu_loras = (0, 0) if pool.is_full else (budget.loras, budget.cpu_loras)
            return vllm_sampler(shape, dtype=budget.dtype, longest=model.max_context, share=budget.vllm_share,
                                rank=budget.lora_rank, loras=loras, cpu_loras=cpu_loras,
                                sleeps=budget.vllm_sleeps)  # fmt: skip
        if pool.kind == "sampler":
            versions = 0 if pool.is_full else budget.versions
            return sampler(shape, dtype=budget.dtype, kv_tokens=budget.kv_tokens, rank=budget.rank, versions=versions)
        if pool.is_full:
            return full_trainer(shape, dtype=budget.dtype, token_budget=budget.token_budget,
                                compute_dtype=budget.compute_dtype, offloads=budget.offloads)  # fmt: skip
        return lora_trainer(shape, dtype=budget.dtype, rank=budget.rank, token_budget=budget.token_budget,
                            parked_runs=budget.parked_runs, on_bytes=on_bytes)  # fmt: skip

    def _need(self, pool: Pool, model: BaseModel, owners: Mapping[str, str]) -> Need:
        owner, size = owners.get(pool.slug, ""), self.size(pool, model)
        priority = self._priorities.of(owner, model.name)
        alone = self._budget.is_vllm(pool) and not (self._budget.only_one or self._budget.vllm_sleeps)
        if isinstance(size, str):
            return Need(owner=owner, words=size, exclusive=alone, priority=priority)
        return Need(
            device_bytes=size.device_bytes, host_bytes=size.host_bytes, exclusive=alone, priority=priority, owner=owner,
            words=size.words,
        )  # fmt: skip

    def ranks(self, pools: Iterable[Pool], owners: Mapping[str, str]) -> dict[Pool, Need]:
        """Return whose workers have a number, where sizes don't matter."""
        ranked = {pool: self._priorities.of(owners.get(pool.slug, ""), pool.base) for pool in pools}
        return {pool: Need(owner=owners.get(pool.slug, ""), priority=rank) for pool, rank in ranked.items() if rank}

    def _shape(self, model: BaseModel) -> Shape | str:
        if model.path not in self._shapes:
            self._shapes[model.path] = _read(model)
        return self._shapes[model.path]


def _read(model: BaseModel) -> Shape | str:
    try:
        return Shape.of(json.loads((Path(model.path) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, InvalidRequest) as unknown:
        log.warning("the size of %s isn't known: %s", model.name, unknown)
        return f"its size isn't known: {unknown}"


def _integer(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        number = int(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a whole number") from None
    if number < 0:
        raise ValueError(f"{name}={text!r} must be 0 or more")
    return number


def _word(environ: Mapping[str, str], name: str, meanings: Mapping[str, Value]) -> Value:
    text = environ.get(name, "")
    if text not in meanings:
        raise ValueError(f"{name}={text!r} must be one of {', '.join(filter(None, meanings))}")
    return meanings[text]


def _share(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        share = float(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
    if not 0 < share <= 1:
        raise ValueError(f"{name}={text!r} must be above 0 and at most 1")
    return share
