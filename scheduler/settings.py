"""What an operator may decide about a service on one machine, and about its scheduler.

`openrl up` takes its own from the command line or the environment, and sets those of the scheduler
that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openrl.scheduler.priorities import Priorities
from openrl.scheduler.resources import Limit, Policy, Strategy
from openrl.tasks.process import api_processes

DEFAULT_IDLE_TIMEOUT_S = 900.0
DEFAULT_RESTART_MAX_S = 30.0
STRATEGIES: tuple[Strategy, ...] = ("spread", "binpack")
RESIDUE_BYTES = 768 << 20
"""What a parked worker still has on its accelerator: a CUDA context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """The settings of `openrl up`; the command's help says what each means."""

    host: str
    port: int
    data_dir: Path
    models: tuple[str, ...]
    """NAME or NAME=PATH, at least one."""
    devices: tuple[str, ...] = ()
    """One entry of CUDA_VISIBLE_DEVICES for each accelerator, "" for one that is simulated on the CPU. None at all:
    workers share the CPU, and take no turns."""
    redis_url: str = ""
    """Empty means the embedded store."""
    broker_url: str = ""
    """Empty means the store."""
    sampler: str = "auto"
    """torch, vllm, or auto: vLLM where there is a GPU and vLLM, else torch."""
    sampler_python: str = ""
    """The interpreter of the samplers of base models; empty means our own."""
    sampler_replicas: int = 1
    """Samplers of one pool at most."""
    idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S
    api_workers: int = field(default_factory=api_processes)
    restart_max_s: float = DEFAULT_RESTART_MAX_S
    verbose: bool = False
    as_json: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSettings:
    """The scheduler's settings."""

    accelerators: int = 0
    """OPENRL_ACCELERATORS: devices to place workers on; 0 means the CPU, which all workers share."""

    strategy: Strategy = "spread"
    """OPENRL_STRATEGY: `spread` gives each worker a free accelerator first, `binpack` fills those that have workers
    already. Packed workers take turns, so spread is faster and packing cheaper."""

    sampler_replicas: int = 1
    """OPENRL_SAMPLER_REPLICAS: samplers of one pool at most; another one comes for each 256 unfinished samples."""

    tenant_seats: Mapping[str, int] = field(default_factory=dict)
    """OPENRL_TENANT_WORKERS: tenant=number, separated by commas: how many workers of full runs a tenant may have at
    once. One that isn't named has no bound, but its share when others wait too."""

    priorities: Priorities = field(default_factory=Priorities)
    """OPENRL_TENANT_PRIORITY: tenant=number, separated by commas, -1000 to 1000: the workers of a tenant's own full
    runs are placed before those of a lower one, and idle workers of a lower one or the same give way to them. Nobody
    who computes is stopped. OPENRL_MODEL_PRIORITY: model=number, likewise, for the workers of a base model; a tenant's
    number comes first. 0 where neither is named."""

    tier_host_bytes: int = 0
    """OPENRL_TIER_HOST_GIB: memory that a node which an autoscaler adds has for each of its accelerators, so that no
    more workers wait for one than it will have room for. 0: not known, and bounds nothing. No effect on one machine."""

    tiers: tuple[int, ...] = ()
    """OPENRL_TIERS_GIB: sizes of accelerator that claims ask for, ascending, separated by commas: the smallest that
    suffices is preferred. Empty asks for any that suffices. It has no effect on one machine."""

    idle_timeout_s: float = DEFAULT_IDLE_TIMEOUT_S
    """OPENRL_IDLE_TIMEOUT_S: seconds without work after which a worker is stopped. A quarter of an hour
    outlasts a pause between experiments, and loading a model again costs less than holding its memory all night."""

    orphan_age_s: float = 24 * 3600.0
    """OPENRL_ORPHAN_AGE_S: files that nothing names are deleted when they are older. A day outlasts any write under
    way, and gives an operator time to look after a crash."""

    version_ttl_s: float = 24 * 3600.0
    """OPENRL_VERSION_TTL_S: a version that was saved for one sampling client is kept for this long after its last use.
    A day, so that a client which pauses over night finds its weights."""

    version_last: int = 8
    """OPENRL_VERSION_LAST: of each run the newest versions, this many, are kept whether they are used or not."""

    version_bytes: int = 16 << 30
    """OPENRL_VERSION_BYTES: what a run's versions may take; over it the ones that were not used for longest go, but for
    the last and those with unfinished samples. Five hundred steps in a day must not fill a disk."""

    cluster: str = "local"
    """OPENRL_CLUSTER: `local`, where `openrl up` runs workers as processes of its machine, or `kubernetes`, where they
    are pods; what that needs is in docs/kubernetes.md."""

    beat_dir: str = ""
    """OPENRL_BEAT_DIR: where this process keeps the beat's schedule, which may be lost; empty means `scheduler` in the
    data directory. No two schedulers may share one, and it should be a local disk."""

    metrics_port: int = 0
    """OPENRL_METRICS_PORT: where Prometheus may ask for what pools have before them and which workers are there, on all
    addresses and without a key; no tenant is named. 0, the default: nowhere."""

    def __post_init__(self) -> None:
        if not 0 < self.version_ttl_s < float("inf"):
            raise ValueError("OPENRL_VERSION_TTL_S must be more than 0 seconds")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"OPENRL_STRATEGY={self.strategy!r} must be one of {', '.join(STRATEGIES)}")
        if self.sampler_replicas < 1:
            raise ValueError("OPENRL_SAMPLER_REPLICAS must be at least 1")
        if min(self.tenant_seats.values(), default=0) < 0:
            raise ValueError("OPENRL_TENANT_WORKERS: a number must be 0 or more")
        if self.tier_host_bytes < 0:
            raise ValueError("OPENRL_TIER_HOST_GIB must be 0 (not known) or more")
        if list(self.tiers) != sorted(set(self.tiers)) or min(self.tiers, default=1) <= 0:
            raise ValueError("OPENRL_TIERS_GIB must name sizes above 0, ascending")
        if self.version_last < 1:
            raise ValueError("OPENRL_VERSION_LAST must be at least 1")
        if self.version_bytes < 0:
            raise ValueError("OPENRL_VERSION_BYTES must be 0 or more")
        if self.cluster not in ("local", "kubernetes"):
            raise ValueError(f"OPENRL_CLUSTER must be local or kubernetes, not {self.cluster!r}")
        if self.accelerators < 0:
            raise ValueError("OPENRL_ACCELERATORS must be 0 or more")
        if not self.idle_timeout_s > 0:
            raise ValueError("OPENRL_IDLE_TIMEOUT_S must be more than 0 seconds")
        if self.beat_dir and not Path(self.beat_dir).is_absolute():
            raise ValueError(f"OPENRL_BEAT_DIR must be an absolute path, not {self.beat_dir!r}")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError("OPENRL_METRICS_PORT must be 0 (none) to 65535")
        if not 600 <= self.orphan_age_s < float("inf"):
            raise ValueError("OPENRL_ORPHAN_AGE_S must be at least 600 seconds")

    def policy(self, *, version: str = "") -> Policy:
        """Return what decisions go by. `version`: of the workers that are to run, where that can change."""
        return Policy(
            strategy=self.strategy,
            idle_timeout_s=self.idle_timeout_s,
            tiers=self.tiers,
            tier_host_bytes=self.tier_host_bytes,
            residue_bytes=RESIDUE_BYTES,
            sampler_replicas=self.sampler_replicas,
            limits={tenant: Limit(seats=seats) for tenant, seats in self.tenant_seats.items()},
            version=version,
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> SchedulerSettings:
        """Read the settings. Raises ValueError naming the variable that makes no sense."""
        return cls(
            accelerators=int(_number(environ, "OPENRL_ACCELERATORS", 0)),
            idle_timeout_s=_number(environ, "OPENRL_IDLE_TIMEOUT_S", DEFAULT_IDLE_TIMEOUT_S),
            orphan_age_s=_number(environ, "OPENRL_ORPHAN_AGE_S", 24 * 3600.0),
            version_ttl_s=_number(environ, "OPENRL_VERSION_TTL_S", 24 * 3600.0),
            version_last=int(_number(environ, "OPENRL_VERSION_LAST", 8)),
            version_bytes=int(_number(environ, "OPENRL_VERSION_BYTES", 16 << 30)),
            cluster=environ.get("OPENRL_CLUSTER") or "local",
            strategy=environ.get("OPENRL_STRATEGY") or "spread",  # type: ignore[arg-type]  # checked as it is made
            sampler_replicas=int(_number(environ, "OPENRL_SAMPLER_REPLICAS", 1)),
            tenant_seats=_seats(environ.get("OPENRL_TENANT_WORKERS", "")),
            priorities=Priorities.from_env(environ),
            tier_host_bytes=int(_number(environ, "OPENRL_TIER_HOST_GIB", 0) * (1 << 30)),
            tiers=_tiers(environ.get("OPENRL_TIERS_GIB", "")),
            beat_dir=environ.get("OPENRL_BEAT_DIR", ""),
            metrics_port=int(_number(environ, "OPENRL_METRICS_PORT", 0)),
        )


def _seats(text: str) -> dict[str, int]:
    parts = [part.strip().partition("=") for part in text.split(",") if part.strip()]
    for tenant, _, number in parts:
        if not (tenant and number.isdecimal()):
            raise ValueError(f"OPENRL_TENANT_WORKERS: {tenant}={number!r} must be a tenant and a number, as alice=4")
    return {tenant: int(number) for tenant, _, number in parts}


def _tiers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(float(part) * (1 << 30)) for part in text.split(",") if part.strip())
    except ValueError:
        raise ValueError(f"OPENRL_TIERS_GIB={text!r} must be numbers separated by commas, as 24,80") from None


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
