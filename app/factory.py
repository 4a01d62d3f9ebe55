"""Where the API is put together: settings, services, blueprints, errors, documentation.

Imports no torch, directly or not: a process that answers HTTP starts in a second and stays small.
"""

from __future__ import annotations

import html
import os
from importlib.metadata import version
from typing import Any

from flask import Flask, Response
from flask.json.provider import DefaultJSONProvider
from flask_smorest import Api

from openrl.app import (
    auth,
    checkpoints,
    creation,
    errors,
    exports,
    futures,
    runs,
    sampling,
    service,
    sessions,
    training,
    wire,
)
from openrl.app.context import EXTENSION, Services
from openrl.app.schemas import ErrorSchema
from openrl.app.settings import AppSettings
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

PREFIX = "/api/v1"


class StrictJSON(DefaultJSONProvider):
    """JSON as every parser reads it: no NaN, no infinity, small."""

    compact = True
    sort_keys = False

    def dumps(self, obj: Any, **options: Any) -> str:
        """Encode; ValueError for a number that JSON doesn't have."""
        return super().dumps(obj, **{"allow_nan": False, **options})


def create_app(settings: AppSettings | None = None, *, store: Store | None = None) -> Flask:
    """Build the API on a store; what isn't given is read from the environment.

    Raises:
        ValueError: a setting makes no sense.
    """
    settings = settings or AppSettings.from_env(os.environ)
    store = store or Store.connect(StoreSettings.from_env(os.environ))
    app = Flask(__name__)
    app.json = StrictJSON(app)
    app.config.update(
        API_TITLE="OpenRL",
        API_VERSION="v1",
        OPENAPI_VERSION="3.0.3",
        OPENAPI_URL_PREFIX=PREFIX,
        OPENAPI_JSON_PATH="openapi.json",
    )
    app.extensions[EXTENSION] = Services.on(store, settings)
    api = _Api(app)
    for noun in (service, sessions, creation, training, runs, checkpoints, exports, sampling, futures):
        api.register_blueprint(noun.blp, url_prefix=PREFIX)
    errors.register(app)
    auth.register(app)
    wire.register(app)
    app.add_url_rule(f"{PREFIX}/docs", "docs", lambda: Response(_page(api.spec.to_dict()), mimetype="text/html"))
    return app


class _Api(Api):
    ERROR_SCHEMA = ErrorSchema

    def _register_error_handlers(self) -> None:
        """Leave errors to `openrl.app.errors`."""


def _page(spec: dict[str, Any]) -> str:
    """Return the routes as one page that needs nothing from elsewhere."""
    rows = "\n".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('summary', ''))}</td></tr>"
        for path, methods in sorted(spec["paths"].items())
        for method, operation in methods.items()
        if isinstance(operation, dict)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>OpenRL API</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:60rem;padding:0 1rem}"
        "td{padding:.3rem 1rem .3rem 0;border-top:1px solid #ddd;vertical-align:top}</style>"
        f"<h1>OpenRL API</h1><p>openrl-service {version('openrl-service')}. The whole description: "
        f"<a href='{PREFIX}/openapi.json'>openapi.json</a>.</p><table>{rows}</table></html>"
    )
