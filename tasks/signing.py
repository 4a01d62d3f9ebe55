"""Signatures under what the service hands out and must recognise later: HMAC-SHA256, one secret an installation.

The secret is drawn when it is first needed and stays in the store, so that every API process signs alike, also
after a restart. It is never shown. Knows no HTTP.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

from openrl.tasks import keys
from openrl.tasks.store import Store, translated

_SECRET_BYTES = 32


class Signer:
    """Signs tuples of short texts, and tells whether a signature is its own."""

    def __init__(self, store: Store) -> None:
        self._redis = store.redis

    def sign(self, *parts: str) -> str:
        """Return the signature under `parts`, as 64 hexadecimal digits."""
        message = json.dumps(parts).encode()
        return hmac.new(self._secret(), message, hashlib.sha256).hexdigest()

    def verify(self, signature: str, *parts: str) -> bool:
        """Tell whether this is the signature under `parts`; how long that takes says nothing about it."""
        return hmac.compare_digest(signature.encode("utf-8", "replace"), self.sign(*parts).encode())

    @translated()
    def _secret(self) -> bytes:
        found = self._redis.get(keys.SIGNING)
        if found is None:
            self._redis.set(keys.SIGNING, secrets.token_hex(_SECRET_BYTES), nx=True)
            found = self._redis.get(keys.SIGNING)
        return bytes(found)
