"""What every process must know to reach the store: read from the environment once, then passed down.

Each other part of the service has its own settings beside its own code; these are the ones that all
of them share.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where the store and the files are, and how long things are kept."""

    redis_url: str = field(repr=False)
    """`redis://`, `rediss://` or `unix://PATH`: one Redis or Valkey, not a cluster. Never shown."""

    data_dir: Path
    """Absolute directory shared by every process: spooled bodies, results, checkpoints."""

    broker_url: str = field(default="", repr=False)
    """Celery's broker; empty means the same store."""

    lease_s: float = 30.0
    """A worker that hasn't renewed for this long owns nothing: longer than any pause of a healthy process."""

    gap_timeout_s: float = 330.0
    """A missing `seq_id` is closed as failed after this; the SDK retries a submission for 300 s."""

    result_ttl_s: float = 3600.0
    """A result is kept this long after its first delivery, for the client whose connection broke."""

    undelivered_ttl_s: float = 7 * 24 * 3600.0
    """A result that nobody fetched is kept this long: a weekend and some."""

    inline_bytes: int = 65536
    """Bodies and results up to this size live in the store, larger ones in files; memory is dearer than disk."""

    tenant_bytes: int = 4 << 30
    """Bodies that a tenant may have accepted and not finished; over it a submission is answered with 429. What a run
    can execute next is always taken. Wide enough for hours of work, narrow enough that one tenant can't fill a disk."""

    disk_reserve_bytes: int = 256 << 20
    """Nothing new is taken in (503) while the disk of the data directory has less left: a store whose disk is full
    ends, so the results of what was accepted need room. 0: until it is really full."""

    session_grace_s: float = 300.0
    """A session that wasn't heard of for this long has vanished: what it has in a worker's memory is written down and
    leaves, and comes back when it does. The SDK sends a heartbeat each 10 s; five minutes outlast a sleeping laptop's
    network, and are a third of the time after which an idle run leaves anyway."""

    quota_runs: int = 0
    """Runs that a tenant without a quota of its own may have at a time; 0: no limit, as for the next three. None is
    set: a service on one machine has one team, and whoever serves several knows what each is worth."""

    quota_operations: int = 0
    """Operations and samples that such a tenant may have unfinished at a time. Over it samples are answered with 429,
    and so are training operations that their run can't execute next anyway."""

    quota_stored_bytes: int = 0
    """Bytes of checkpoints, versions for samplers, results in files and waiting bodies that such a tenant may have."""

    quota_tokens_per_minute: int = 0
    """Tokens that such a tenant may train and sample in a minute; after a pause, a minute's worth at once. Samples over
    it are answered with 429; training waits in the journal."""

    doorbell_threads: int = 256
    """Celery threads of a worker: operations that show in Flower at a time. Progress never depends on them."""

    log_level: str = "INFO"
    """Of workers and scheduler: DEBUG, INFO, WARNING, ERROR or CRITICAL."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense before anything is started."""
        if not self.redis_url.startswith(SCHEMES):
            raise ValueError(f"OPENRL_REDIS_URL must start with one of {', '.join(SCHEMES)}")
        if not self.data_dir.is_absolute():
            raise ValueError(f"OPENRL_DATA_DIR must be an absolute path, not {str(self.data_dir)!r}")
        for name in ("lease_s", "gap_timeout_s", "result_ttl_s", "undelivered_ttl_s", "session_grace_s"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"OPENRL_{name.upper()} must be a positive number of seconds")
        if self.inline_bytes < 0:
            raise ValueError("OPENRL_INLINE_BYTES must not be negative")
        if self.disk_reserve_bytes < 0:
            raise ValueError("OPENRL_DISK_RESERVE_BYTES must not be negative")
        if self.tenant_bytes < 1:
            raise ValueError("OPENRL_TENANT_BYTES must be at least 1")
        for name in ("runs", "operations", "stored_bytes", "tokens_per_minute"):
            if not 0 <= getattr(self, f"quota_{name}") <= 2**53:
                raise ValueError(f"OPENRL_QUOTA_{name.upper()} must be 0 (no limit) to {2**53}")
        if self.doorbell_threads < 1:
            raise ValueError("OPENRL_DOORBELL_THREADS must be at least 1")
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"OPENRL_LOG_LEVEL must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}")
        if not self.broker_url:
            object.__setattr__(self, "broker_url", _kombu_url(self.redis_url))

    @property
    def broker_is_store(self) -> bool:
        """Tell whether Celery's broker is the store itself, so that one script can write to both."""
        return self.broker_url == _kombu_url(self.redis_url)

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> StoreSettings:
        """Read `OPENRL_*`. Raises ValueError that names the variable to mend."""
        for name in ("OPENRL_REDIS_URL", "OPENRL_DATA_DIR"):
            if not env.get(name):
                raise ValueError(f"{name} is not set; `openrl env` prints what a process needs")
        return cls(
            redis_url=env["OPENRL_REDIS_URL"],
            data_dir=Path(env["OPENRL_DATA_DIR"]),
            broker_url=env.get("OPENRL_BROKER_URL", ""),
            lease_s=_number(env, "OPENRL_LEASE_S", 30.0),
            gap_timeout_s=_number(env, "OPENRL_GAP_TIMEOUT_S", 330.0),
            result_ttl_s=_number(env, "OPENRL_RESULT_TTL_S", 3600.0),
            undelivered_ttl_s=_number(env, "OPENRL_UNDELIVERED_TTL_S", 604800.0),
            inline_bytes=_whole(env, "OPENRL_INLINE_BYTES", 65536),
            tenant_bytes=_whole(env, "OPENRL_TENANT_BYTES", 4 << 30),
            disk_reserve_bytes=_whole(env, "OPENRL_DISK_RESERVE_BYTES", 256 << 20),
            session_grace_s=_number(env, "OPENRL_SESSION_GRACE_S", 300.0),
            quota_runs=_whole(env, "OPENRL_QUOTA_RUNS", 0),
            quota_operations=_whole(env, "OPENRL_QUOTA_OPERATIONS", 0),
            quota_stored_bytes=_whole(env, "OPENRL_QUOTA_STORED_BYTES", 0),
            quota_tokens_per_minute=_whole(env, "OPENRL_QUOTA_TOKENS_PER_MINUTE", 0),
            doorbell_threads=_whole(env, "OPENRL_DOORBELL_THREADS", 256),
            log_level=(env.get("OPENRL_LOG_LEVEL") or "INFO").upper(),
        )


def broker_url(env: Mapping[str, str] = os.environ) -> str:
    """Return Celery's broker for this environment; a store on this machine when nothing is said."""
    return env.get("OPENRL_BROKER_URL") or _kombu_url(env.get("OPENRL_REDIS_URL") or "redis://localhost:6379/0")


def _kombu_url(redis_url: str) -> str:
    """Return the same store's address in kombu's spelling."""
    if redis_url.startswith("unix://"):
        return "redis+socket://" + redis_url.removeprefix("unix://")
    return redis_url


def _number(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        return float(text or default)
    except ValueError:
        raise ValueError(f"{name} must be a number, not {text!r}") from None


def _whole(env: Mapping[str, str], name: str, default: int) -> int:
    number = _number(env, name, default)
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number, not {env[name]!r}")
    return int(number)
