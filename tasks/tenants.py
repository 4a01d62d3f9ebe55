"""API keys: which tenant a secret belongs to.

A key is `tml-` and 256 random bits, shown once. Only its SHA-256 is stored: a secret that long can't be
guessed from it, so neither salt nor a slow hash is needed. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from dataclasses import dataclass

from openrl.tasks import keys
from openrl.tasks.errors import NotFound
from openrl.tasks.store import Store, translated

LOCAL = "local"
"""The tenant of a service without keys, on loopback only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What may be shown of a key. `created` in unix seconds."""

    key_id: str
    tenant: str
    name: str
    created: float


class Tenants:
    """Creates, lists, revokes and recognises keys."""

    def __init__(self, store: Store) -> None:
        self._redis = store.redis

    @translated()
    def create_key(self, tenant: str, name: str = "") -> str:
        """Return a new secret of `tenant`; it can't be shown again."""
        keys.check_tenant(tenant)
        secret = f"tml-{secrets.token_urlsafe(32)}"
        row = {"schema": 1, "key_id": secrets.token_hex(6), "tenant": tenant, "name": name, "created": time.time()}
        with self._redis.pipeline() as pipe:
            pipe.hset(keys.KEYS, _hash(secret), json.dumps(row))
            pipe.sadd(keys.TENANTS, tenant)
            pipe.set(keys.SECURED, 1)
            pipe.execute()
        return secret

    @translated()
    def list_keys(self) -> list[ApiKey]:
        """Return the valid keys, oldest first."""
        rows = (json.loads(row) for row in self._redis.hvals(keys.KEYS))
        return sorted((_api_key(row) for row in rows), key=lambda key: (key.created, key.key_id))

    @translated()
    def revoke_key(self, key_id: str) -> None:
        """Make a key invalid, for every process at once."""
        for digest, row in self._redis.hgetall(keys.KEYS).items():
            if json.loads(row)["key_id"] == key_id:
                self._redis.hdel(keys.KEYS, digest)
                return
        raise NotFound(f"no API key {key_id!r}; `openrl keys list` shows them")

    @translated()
    def tenant_of(self, secret: str) -> str | None:
        """Return whose key this is, or None for a key that isn't valid."""
        row = self._redis.hget(keys.KEYS, _hash(secret))
        return None if row is None else json.loads(row)["tenant"]

    @translated()
    def look_up(self, secret: str) -> tuple[str | None, bool]:
        """Return `tenant_of` and `any_keys`, in one trip to the store: every request asks for both."""
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.hget(keys.KEYS, _hash(secret))
            pipe.exists(keys.SECURED)
            row, secured = pipe.execute()
        return None if row is None else json.loads(row)["tenant"], bool(secured)

    @translated()
    def any_keys(self) -> bool:
        """Tell whether a key was ever created; revoking the last one doesn't open the service again."""
        return bool(self._redis.exists(keys.SECURED))


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _api_key(row: dict) -> ApiKey:
    return ApiKey(key_id=row["key_id"], tenant=row["tenant"], name=row["name"], created=row["created"])
