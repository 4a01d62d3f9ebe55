"""Short-lived tokens (JWT, HS256) that a client may show in place of its API key.

A token names the key that it was given for, and nothing is allowed by it that the key doesn't allow in that moment:
revoking the key ends its tokens. They are signed with a secret of the installation. The only home of PyJWT.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jwt

from openrl.tasks.errors import TokenRejected
from openrl.tasks.signing import Signer
from openrl.tasks.tenants import ApiKey

ALGORITHM = "HS256"
ISSUER = "openrl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What a valid token says: for which key ("" while there are none), and until when (unix seconds)."""

    key_id: str
    until: float


class Tokens:
    """Gives tokens and reads them; one per process."""

    PREFIX = "eyJ"
    """How every JWT begins, and no API key."""

    def __init__(self, signer: Signer, *, ttl_s: int) -> None:
        self._signer = signer
        self._ttl_s = ttl_s

    def give(self, tenant: str, key: ApiKey | None, *, until: float | None = None) -> str:
        """Return a token for a key, which ends by `until`, and never after the key does.

        `email` is empty where the key is named otherwise: keys belong to no person here.
        """
        now = int(time.time())
        ends = [now + self._ttl_s, *(end for end in (until, key.expires if key else None) if end is not None)]
        claims = {
            "iss": ISSUER,
            "sub": f"openrl:key:{key.key_id if key else 'none'}",
            "org_id": tenant,
            "email": email_of(key),
            "iat": now,
            "exp": int(min(ends)),
            "key_id": key.key_id if key else "",
        }
        return jwt.encode(claims, self._secret(), algorithm=ALGORITHM)

    def read(self, token: str) -> Claims:
        """Return what a token says.

        Raises:
            TokenRejected: it isn't one of this service, or its time is over.
        """
        try:
            claims = jwt.decode(
                token,
                self._secret(),
                algorithms=[ALGORITHM],
                issuer=ISSUER,
                # When it was given says nothing: another machine that serves the same API may be a second ahead.
                options={"require": ["exp", "iat", "iss", "sub"], "verify_iat": False},
            )
        except jwt.ExpiredSignatureError as late:
            raise TokenRejected("the token has expired: POST /api/v1/auth/token gives a new one for the key") from late
        except jwt.InvalidTokenError as wrong:
            raise self.rejected() from wrong
        return Claims(key_id=str(claims.get("key_id", "")), until=float(claims["exp"]))

    @staticmethod
    def rejected() -> TokenRejected:
        """Return the refusal of a token that isn't valid, which says no more than that."""
        return TokenRejected("the token is not valid: POST /api/v1/auth/token gives one for a valid API key")

    def _secret(self) -> str:
        return self._signer.sign("token secret")


def email_of(key: ApiKey | None) -> str:
    """Return a key's name where it is an address."""
    return key.name if key and "@" in key.name else ""
