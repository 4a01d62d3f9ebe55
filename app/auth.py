"""From an API key to a tenant, for every request but the health check and the files behind signed links.

While no key exists at all, a service that only its own machine can reach serves the tenant `local`. From
the first key on, a request without a valid one is refused at once, without a restart. Keys are never logged.
"""

from __future__ import annotations

import uuid
from urllib.parse import urlsplit

from flask import Flask, Response, g, request

from openrl.app.context import services
from openrl.tasks.errors import NotLocal, Unauthorized
from openrl.tasks.loopback import is_loopback
from openrl.tasks.tenants import LOCAL

HEADER = "X-API-Key"
OPEN_ENDPOINTS = frozenset({"service.HealthView", "exports.FileView"})


def register(app: Flask) -> None:
    """Identify every request before its view runs, and number it."""
    app.before_request(_identify)
    app.after_request(_number)


def _identify() -> None:
    g.request_id = uuid.uuid4().hex
    if request.endpoint not in OPEN_ENDPOINTS:
        g.tenant = tenant_of(request.headers.get(HEADER, ""))


def tenant_of(key: str) -> str:
    """Return the tenant whose key this is.

    Raises:
        Unauthorized: it is nobody's.
        NotLocal: there are no keys yet, and the request was not made to this machine by its own name.
    """
    known, secured = services().tenants.look_up(key)
    if known:
        return known
    if services().settings.loopback and not secured:
        _require_local()
        return LOCAL
    raise Unauthorized(f"{HEADER} holds no valid key: an operator makes one with `openrl keys create --tenant NAME`")


def _require_local() -> None:
    """Keep web pages out of a service without keys.

    A page whose name was made to mean this machine (DNS rebinding) is told by the Host that its browser sends, any
    other page by its Origin. The Host also tells a proxy that would let everybody in.
    """
    named = {"Host": f"//{request.headers.get('Host', '')}", "Origin": request.headers.get("Origin", "//localhost")}
    for header, url in named.items():
        if not is_loopback(_hostname(url)):
            raise NotLocal(
                f"{header} is {url.removeprefix('//')[:80]!r}: without API keys only this machine is served, by its "
                "own name (127.0.0.1, localhost, [::1]); `openrl keys create --tenant NAME` opens the service to others"
            )


def _hostname(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _number(response: Response) -> Response:
    response.headers["X-Request-Id"] = str(g.get("request_id", ""))
    return response
