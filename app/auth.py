"""From an API key to a tenant, for every request but the health check.

While no key exists at all, a service that only its own machine can reach serves the tenant `local`. From
the first key on, a request without a valid one is refused at once, without a restart. Keys are never logged.
"""

from __future__ import annotations

import uuid

from flask import Flask, Response, g, request

from openrl.app.context import services
from openrl.tasks.errors import Unauthorized
from openrl.tasks.tenants import LOCAL

HEADER = "X-API-Key"
OPEN_ENDPOINTS = frozenset({"service.HealthView"})


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
    """
    tenants = services().tenants
    if key and (known := tenants.tenant_of(key)):
        return known
    if services().settings.loopback and not tenants.any_keys():
        return LOCAL
    raise Unauthorized(f"{HEADER} holds no valid key: an operator makes one with `openrl keys create --tenant NAME`")


def _number(response: Response) -> Response:
    response.headers["X-Request-Id"] = str(g.get("request_id", ""))
    return response
