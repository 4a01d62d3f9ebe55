"""From an API key, or a token that was given for one, to a tenant and what may be done: for every request.

While no key exists at all, a service that only its own machine can reach serves the tenant `local`. From
the first key on, a request without a valid one is refused, without a restart. What a key is, is remembered for
`OPENRL_REMEMBER_S`. A route's scopes are `openrl.app.scopes`' to say. Keys are never logged.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from flask import Flask, Response, g, request

from openrl.app import scopes
from openrl.app.context import services
from openrl.app.greenlets import beside
from openrl.tasks import audit
from openrl.tasks.errors import NotLocal, OutOfScope, Unauthorized
from openrl.tasks.loopback import is_loopback
from openrl.tasks.store import Store
from openrl.tasks.tenants import LOCAL, SCOPES, ApiKey

HEADER = "X-API-Key"
BEARER = "Bearer "


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and what may be done. `key` is None for this machine's own user, while there are no keys."""

    tenant: str
    scopes: tuple[str, ...]
    key: ApiKey | None = None
    until: float | None = None
    """The end of the token that was shown, in unix seconds; None: a key was."""

    @property
    def actor(self) -> str:
        """Return who it is, in the words of the audit log."""
        return f"key:{self.key.key_id}" if self.key else LOCAL


def register(app: Flask) -> None:
    """Identify every request before its view runs, and number it."""
    app.before_request(_identify)
    app.after_request(_number)


def caller() -> Caller:
    """Return who asks; set before any view with a key runs."""
    found = g.caller
    assert isinstance(found, Caller)
    return found


def identify(credential: str) -> Caller:
    """Return whose key or token this is.

    Raises:
        Unauthorized: it is nobody's, or its time is over.
        NotLocal: there are no keys yet, and the request was not made to this machine by its own name.
    """
    if credential.startswith(services().tokens.PREFIX):
        return _caller_of_token(credential)
    key, secured = services().known_keys.get(_digest(credential), lambda: services().tenants.look_up(credential))
    if key is not None:
        return _caller_of_key(key)
    if services().settings.loopback and not secured:
        return local_caller()
    if credential:
        _note_refusal("unknown")
    raise Unauthorized(f"{HEADER} holds no valid key: an operator makes one with `openrl keys create --tenant NAME`")


def require(found: Caller, needed: tuple[str, ...]) -> None:
    """Refuse a caller that has none of the scopes; ANY asks for none.

    Raises:
        OutOfScope: names the scope.
    """
    if needed and not set(needed) & set(found.scopes):
        key_id = found.key.key_id if found.key else ""
        raise OutOfScope(
            f"this needs an API key with the scope {' or '.join(needed)}; key {key_id} has {', '.join(found.scopes)}: "
            f"an operator makes one with `openrl keys create --tenant {found.tenant} --scope {needed[0]}`"
        )


def local_caller() -> Caller:
    """Return this machine's own user, who may do everything, after looking at how it asks.

    Raises:
        NotLocal: as `identify`.
    """
    _require_local()
    return Caller(tenant=LOCAL, scopes=tuple(SCOPES))


def _identify() -> None:
    g.request_id = uuid.uuid4().hex
    needed = scopes.needed(request.method, request.url_rule.rule) if request.url_rule else scopes.ANY
    if needed is scopes.OPEN:
        return
    g.caller = identify(_credential())
    g.tenant = g.caller.tenant
    assert needed is not None
    require(g.caller, needed)


def _credential() -> str:
    """Return what the client shows: the SDK's header, or the one of other clients."""
    shown = request.headers.get(HEADER, "")
    said = request.headers.get("Authorization", "")
    return said.removeprefix(BEARER) if not shown and said.startswith(BEARER) else shown


def _digest(credential: str) -> bytes:
    """Return what a credential is remembered by: no secret is kept longer than its request."""
    return hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()


def _caller_of_key(key: ApiKey, until: float | None = None) -> Caller:
    if key.expired:
        _note_refusal("expired", key)
        raise Unauthorized(
            f"API key {key.key_id} has expired: an operator makes another with `openrl keys rotate {key.key_id}`"
        )
    return Caller(tenant=key.tenant, scopes=key.scopes, key=key, until=until)


def _caller_of_token(token: str) -> Caller:
    tokens = services().tokens
    claims = tokens.read(token)
    if not claims.key_id:
        if services().settings.loopback and not services().tenants.any_keys():
            return local_caller()
        raise tokens.rejected()
    key, _ = services().known_keys.get(claims.key_id, lambda: (services().tenants.by_id(claims.key_id), True))
    if key is None:
        raise tokens.rejected()
    return _caller_of_key(key, until=claims.until)


def _note_refusal(reason: str, key: ApiKey | None = None) -> None:
    """Write a refused key into the audit log; the answer doesn't wait for it."""
    owner, key_id = (key.tenant, key.key_id) if key else ("", "")
    beside(_record_refusal, services().store, owner, reason, key_id, "" if key else request.remote_addr or "")


def _record_refusal(store: Store, owner: str, reason: str, key_id: str, address: str) -> None:
    audit.record_refusal(store, owner, reason, key_id=key_id, address=address)


def _require_local() -> None:
    """Keep web pages out of a service without keys.

    A page whose name was made to mean this machine (DNS rebinding) is told by the Host that its browser sends, any
    other page by its Origin. The Host also tells a proxy that would let everybody in.
    """
    named = {"Host": f"//{request.headers.get('Host', '')}", "Origin": request.headers.get("Origin", "//localhost")}
    for header, url in named.items():
        if not _is_local(url):
            raise NotLocal(
                f"{header} is {url.removeprefix('//')[:80]!r}: without API keys only this machine is served, by its "
                "own name (127.0.0.1, localhost, [::1]); `openrl keys create --tenant NAME` opens the service to others"
            )


@lru_cache(maxsize=64)
def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _number(response: Response) -> Response:
    response.headers["X-Request-Id"] = str(g.get("request_id", ""))
    return response
