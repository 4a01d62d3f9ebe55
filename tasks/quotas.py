"""Quotas: what a tenant may have at a time, what it has, and what is said to whoever wants more.

The scripts that take something in enforce them, by what stands in the store in that moment, so that two at once can't
share the last place. A quota that isn't set is the service's, which its settings say; 0 is no limit. Knows no HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Self

from openrl.tasks import audit, keys
from openrl.tasks.errors import InvalidRequest, OpenRLError, Overloaded, QuotaExceeded
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store, translated

RUN_SILENT_S = 3600.0
"""A run leaves its tenant's quota when its session is finished, or has sent no heartbeat for this long."""

MOST = 2**53
"""The largest quota; the scripts' numbers are exact up to here."""

REMEDY = {
    "runs": "finish a session whose runs you no longer train (ServiceClient.close)",
    "operations": "send it again when some of them are done",
    "stored_bytes": "delete checkpoints, or give them a ttl",
    "tokens_per_minute": "send it again in a moment",
}
"""What a client can do by itself, by the quota's name."""

ASK = "or ask whoever runs this service for more (`openrl quota set`)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Of each quota, how much; 0 as a limit is none."""

    runs: int = 0
    operations: int = 0
    stored_bytes: int = 0
    tokens_per_minute: int = 0

    @classmethod
    def of(cls, settings: StoreSettings) -> Self:
        """Return what the settings say of tenants without quotas of their own."""
        return cls(**{name: getattr(settings, f"quota_{name}") for name in NAMES})


NAMES = tuple(field.name for field in fields(Amounts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A tenant's limits, those of them that are its own, and what it has now."""

    tenant: str
    limits: Amounts
    own: tuple[str, ...]
    use: Amounts


class Quotas:
    """Reads and sets quotas; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    @translated()
    def publish(self, defaults: Amounts) -> None:
        """Say what tenants without quotas of their own may have, to every process; done at each start."""
        self._redis.hset(keys.QUOTAS, mapping=asdict(defaults))

    @translated()
    def standing(self, tenant: str) -> Standing:
        """Return what a tenant may have and has."""
        defaults, own = (_numbers(self._redis.hgetall(key)) for key in (keys.QUOTAS, keys.quota(tenant)))
        runs, operations, stored, tokens = self._store.script("quota_use")(tenant, RUN_SILENT_S)
        use = Amounts(runs=runs, operations=operations, stored_bytes=int(stored), tokens_per_minute=int(tokens))
        limits = Amounts(**{name: (defaults | own).get(name, 0) for name in NAMES})
        return Standing(tenant=tenant, limits=limits, own=tuple(sorted(own)), use=use)

    @translated()
    def set(self, tenant: str, limits: Mapping[str, int], *, actor: str = "") -> None:
        """Give a tenant quotas of its own, at once; the others stay.

        Raises:
            InvalidRequest: there is no such quota, or it can't be so large.
        """
        for name, limit in limits.items():
            if name not in NAMES:
                raise InvalidRequest(f"{name!r} is no quota; there are {', '.join(NAMES)}")
            if not 0 <= limit <= MOST:
                raise InvalidRequest(f"{name} must be 0 (no limit) to {MOST}, not {limit}")
        if limits:
            self._redis.hset(keys.quota(tenant), mapping=dict(limits))
            self._redis.sadd(keys.TENANTS, tenant)
            audit.record(self._store, tenant, "quota_set", actor=actor, **limits)

    @translated()
    def reset(self, tenant: str, *, actor: str = "") -> None:
        """Let the service's quotas count for a tenant again."""
        if self._redis.delete(keys.quota(tenant)):
            audit.record(self._store, tenant, "quota_reset", actor=actor)

    def seconds_to_wait(self, tenant: str) -> float:
        """Return how long a tenant that has used all its tokens has to wait; 0 if it needn't."""
        return int(self._store.script("quota_tokens")(tenant)) / 1000


def refusal(answer: bytes) -> OpenRLError:
    """Return the error for what a script says that is over a quota: `QUOTA name most use more`."""
    _, name, *numbers = answer.decode().split()
    most, use, more = map(int, numbers)
    wants = f", and this is {more} more" if name == "stored_bytes" and more > 1 else ""
    text = f"quota {name}: {most} are allowed and {use} in use{wants}; {REMEDY[name]}, {ASK}"
    if name in ("runs", "stored_bytes"):
        return QuotaExceeded(text)
    error = Overloaded(text)
    if name == "tokens_per_minute":
        error.retry_after_s = max(1.0, _wait_s(most, use))
    return error


def _wait_s(most: int, use: int) -> float:
    return max(0, use - most) * 60 / most if most else 0.0


def _numbers(row: Mapping[bytes, bytes]) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in row.items()}
