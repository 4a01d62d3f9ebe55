"""API keys: which tenant a secret belongs to, what it may do, and until when.

A key is `tml-` and 256 random bits, shown once. Only its SHA-256 is stored: a secret that long can't be
guessed from it, so neither salt nor a slow hash is needed. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from openrl.tasks import audit, keys
from openrl.tasks.errors import InvalidRequest, NotFound, shown
from openrl.tasks.schema import API_KEY
from openrl.tasks.store import Store, translated

LOCAL = "local"
"""The tenant of a service without keys, on loopback only."""

READ, TRAIN, SAMPLE, ADMIN = "read", "train", "sample", "admin"
SCOPES = {
    READ: "see sessions, runs, checkpoints and results, and download exports",
    TRAIN: "create, train, save and change runs and checkpoints",
    SAMPLE: "create samplers and draw samples",
    ADMIN: "see usage and the audit log of the tenant",
}
"""What a key may do. None of them includes another."""

DEFAULT_SCOPES = (READ, TRAIN, SAMPLE)
"""What a researcher needs; and what a key may do that was made before there were scopes."""

MAX_NOTE_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """What may be shown of a key. Times in unix seconds; `expires` None means: when it is revoked."""

    key_id: str
    tenant: str
    name: str
    created: float
    note: str = ""
    expires: float | None = None
    scopes: tuple[str, ...] = DEFAULT_SCOPES

    @property
    def number(self) -> int:
        """The key's id for clients that want a number."""
        return int(self.key_id, 16)

    @property
    def expired(self) -> bool:
        """Tell whether its time is over."""
        return self.expires is not None and self.expires <= time.time()


class Tenants:
    """Creates, lists, rotates, revokes and recognises keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    @translated()
    def create_key(
        self,
        tenant: str,
        name: str = "",
        *,
        note: str = "",
        scopes: Iterable[str] = DEFAULT_SCOPES,
        expires: float | None = None,
    ) -> str:
        """Return a new secret of `tenant`; it can't be shown again.

        Raises:
            InvalidRequest: a name, scope or time that makes no sense; nothing was changed.
        """
        key = ApiKey(
            key_id=secrets.token_hex(6),
            tenant=keys.check_tenant(tenant),
            name=_short("name", name),
            note=_short("note", note),
            created=time.time(),
            expires=_later("expires", expires),
            scopes=check_scopes(scopes),
        )
        with self._redis.pipeline() as pipe:
            secret = self._add(pipe, key)
            pipe.execute()
        audit.record(self._store, tenant, "key_created", actor="", **_told(key))
        return secret

    @translated()
    def list_keys(self) -> list[ApiKey]:
        """Return the keys that aren't revoked, oldest first."""
        rows = (_api_key(row) for row in self._redis.hvals(keys.KEYS))
        return sorted(rows, key=lambda key: (key.created, key.key_id))

    @translated()
    def revoke_key(self, key_id: str, *, actor: str = "") -> ApiKey:
        """Make a key invalid, and its tokens with it; a process may remember it for a moment. Returns what it was."""
        digest, key = self._find(key_id)
        with self._redis.pipeline() as pipe:
            pipe.hdel(keys.KEYS, digest)
            pipe.hdel(keys.KEY_IDS, key_id)
            pipe.execute()
        audit.record(self._store, key.tenant, "key_revoked", actor=actor, key_id=key_id, name=key.name)
        return key

    @translated()
    def rotate_key(self, key_id: str, *, grace_s: float, expires: float | None = None) -> tuple[str, ApiKey]:
        """Return a new secret in place of a key, which goes on for `grace_s` at most; and what the new one is.

        The new one has the same tenant, name, note and scopes. Its `expires` is the time given, else as long after
        now as the old one's was after it was made.
        """
        now = time.time()

        def swap(pipe: Any) -> tuple[str, ApiKey, ApiKey]:
            digest, old = self._find(key_id)
            lifetime = None if old.expires is None else now + (old.expires - old.created)
            fresh = replace(
                old,
                key_id=secrets.token_hex(6),
                created=now,
                expires=_later("expires", expires) if expires else lifetime,
            )
            ended = replace(old, expires=min(now + grace_s, old.expires or float("inf")))
            pipe.multi()
            pipe.hset(keys.KEYS, digest, _row(ended))
            return self._add(pipe, fresh), fresh, ended

        # Watched: a key that is revoked meanwhile must not come back.
        secret, fresh, old = self._redis.transaction(swap, keys.KEYS, value_from_callable=True)
        audit.record(
            self._store, old.tenant, "key_rotated", key_id=key_id, new_key_id=fresh.key_id, old_until=old.expires
        )
        return secret, fresh

    def tenant_of(self, secret: str) -> str | None:
        """Return whose key this is, or None for a key that isn't valid."""
        key = self.look_up(secret)[0]
        return None if key is None or key.expired else key.tenant

    @translated()
    def look_up(self, secret: str) -> tuple[ApiKey | None, bool]:
        """Return a key, expired or not, and `any_keys`, in one trip to the store: every request asks for both."""
        row, secured = self._store.together.ask(("HGET", keys.KEYS, _hash(secret)), ("EXISTS", keys.SECURED))
        return None if row is None else _api_key(row), bool(secured)

    @translated()
    def by_id(self, key_id: str) -> ApiKey | None:
        """Return a key that isn't revoked, expired or not."""
        try:
            return self._find(key_id)[1]
        except NotFound:
            return None

    @translated()
    def any_keys(self) -> bool:
        """Tell whether a key was ever created; revoking the last one doesn't open the service again."""
        return bool(self._redis.exists(keys.SECURED))

    @staticmethod
    def _add(pipe: Any, key: ApiKey) -> str:
        """Lay a key into a transaction; return its secret."""
        secret = f"tml-{secrets.token_urlsafe(32)}"
        pipe.hset(keys.KEYS, _hash(secret), _row(key))
        pipe.hset(keys.KEY_IDS, key.key_id, _hash(secret))
        pipe.sadd(keys.TENANTS, key.tenant)
        pipe.set(keys.SECURED, 1)
        return secret

    def _find(self, key_id: str) -> tuple[bytes, ApiKey]:
        """Return the hash of a key and the key."""
        digest = self._redis.hget(keys.KEY_IDS, key_id)
        row = digest and self._redis.hget(keys.KEYS, digest)
        if row:
            return digest, _api_key(row)
        raise NotFound(f"no API key {shown(key_id)}; `openrl keys list` shows them")


def check_scopes(scopes: Iterable[str]) -> tuple[str, ...]:
    """Return scopes in their order, each once.

    Raises:
        InvalidRequest: one of them doesn't exist, or there is none.
    """
    asked = set(scopes)
    if unknown := sorted(asked - set(SCOPES)):
        raise InvalidRequest(f"{shown(unknown[0])} is no scope; there are {', '.join(SCOPES)}")
    if not asked:
        raise InvalidRequest(f"a key needs a scope; there are {', '.join(SCOPES)}")
    return tuple(scope for scope in SCOPES if scope in asked)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _row(key: ApiKey) -> str:
    return json.dumps(API_KEY.numbered(asdict(key)))


def _api_key(row: bytes) -> ApiKey:
    """Read a row. One of schema 1 has neither scopes nor an end."""
    stored: dict[str, Any] = API_KEY.current(json.loads(row))
    known = {name: stored[name] for name in ApiKey.__dataclass_fields__ if name in stored}
    return ApiKey(**known | {"scopes": tuple(stored.get("scopes", DEFAULT_SCOPES))})


def _told(key: ApiKey) -> dict[str, str]:
    expires = "" if key.expires is None else str(key.expires)
    return {"key_id": key.key_id, "name": key.name, "scopes": ",".join(key.scopes), "expires": expires}


def _short(field: str, text: str) -> str:
    if len(text) > MAX_NOTE_CHARS or not text.isprintable():
        raise InvalidRequest(f"{field} must be one line of at most {MAX_NOTE_CHARS} characters")
    return text


def _later(field: str, at: float | None) -> float | None:
    if at is not None and not time.time() < at < 1e11:
        raise InvalidRequest(f"{field} must be a time to come")
    return at
