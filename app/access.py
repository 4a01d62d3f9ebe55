"""In whose name a checkpoint is read: one's own, or that of the account whose key was sent along.

The SDK calls such a key a weights access token. It must be allowed to read, and opens nothing but that one checkpoint.
"""

from __future__ import annotations

from flask import request

from openrl.app.auth import identify, require
from openrl.app.context import registry, tenant
from openrl.tasks.errors import Forbidden, InvalidRequest, Unauthorized
from openrl.tasks.registry import Checkpoint
from openrl.tasks.tenants import READ

FIELD = "weights_access_token"
HEADER = "X-Tinker-Weights-Access-Token"


def readable(uri: str, token: str | None) -> tuple[str, Checkpoint]:
    """Return the checkpoint at an address, and whose it is, as seen by whoever asks or whose key `token` is.

    Raises:
        Forbidden: the token is no valid key.
        OutOfScope: it isn't allowed to read.
    """
    return registry().readable_by_uri(_reader(token), uri)


def token_of(sent: str | None) -> str | None:
    """Return the token of a request that may bring it in its body or in its header."""
    header = request.headers.get(HEADER) or None
    if sent and header and sent != header:
        raise InvalidRequest(f"{FIELD} and {HEADER} differ; send one of them")
    return sent or header


def _reader(token: str | None) -> str:
    if not token:
        return tenant()
    try:
        other = identify(token)
    except Unauthorized:
        raise Forbidden(
            f"{FIELD} is no valid API key of this service; ask the owner of the checkpoint for one"
        ) from None
    require(other, (READ,))
    return other.tenant
