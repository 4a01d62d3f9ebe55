"""What an operator may decide about a service on one machine, and about its scheduler.

`openrl up` takes its own from the command line or the environment, and sets those of the scheduler
that it starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openrl.tasks.process import api_processes

DEFAULT_IDLE_TIMEOUT_S = 900.0
DEFAULT_RESTART_MAX_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UpSettings:
    """The settings of `openrl up`; the command's help says what each means."""

    host: str
    port: int
    data_dir: Path
    models: tuple[str, ...]
    """NAME or NAME=PATH, at least one."""
    devices: tuple[str, ...] = ()
    """One entry of CUDA_VISIBLE_DEVICES for each accelerator; empty means the CPU."""
    redis_url: str = ""
    """Empty means the embedded store."""
    broker_url: str = ""
    """Empty means the store."""
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

    def __post_init__(self) -> None:
        if not 0 < self.version_ttl_s < float("inf"):
            raise ValueError("OPENRL_VERSION_TTL_S must be more than 0 seconds")
        if self.version_last < 1:
            raise ValueError("OPENRL_VERSION_LAST must be at least 1")
        if self.version_bytes < 0:
            raise ValueError("OPENRL_VERSION_BYTES must be 0 or more")
        if self.accelerators < 0:
            raise ValueError("OPENRL_ACCELERATORS must be 0 or more")
        if not self.idle_timeout_s > 0:
            raise ValueError("OPENRL_IDLE_TIMEOUT_S must be more than 0 seconds")
        if not 600 <= self.orphan_age_s < float("inf"):
            raise ValueError("OPENRL_ORPHAN_AGE_S must be at least 600 seconds")

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
        )


def _number(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ValueError(f"{name}={text!r} is not a number") from None
