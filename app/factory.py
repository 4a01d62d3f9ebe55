"""Where the API is put together: settings, services, blueprints, errors, documentation.

Imports no torch, directly or not: a process that answers HTTP starts in a second and stays small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flask import Flask
from flask.json.provider import DefaultJSONProvider

from openrl.app import (
    auth,
    books,
    checkpoints,
    copies,
    creation,
    errors,
    exports,
    futures,
    identity,
    openapi,
    runs,
    sampling,
    search,
    service,
    sessions,
    traces,
    training,
    unloading,
    wire,
)
from openrl.app.context import EXTENSION, Services
from openrl.app.openai import views as openai
from openrl.app.settings import AppSettings
from openrl.tasks import upgrade
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

PREFIX = "/api/v1"
OPENAI_PREFIX = "/v1"


class StrictJSON(DefaultJSONProvider):
    """JSON as every parser reads it: no NaN, no infinity, small."""

    compact = True
    sort_keys = False

    def dumps(self, obj: Any, **options: Any) -> str:
        """Encode; ValueError for a number that JSON doesn't have."""
        return super().dumps(obj, **{"allow_nan": False, **options})


class Service(Flask):
    """Flask for views that are all plain functions: it asks of each, on each request, whether it is a coroutine."""

    def ensure_sync(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function itself."""
        return func


def create_app(settings: AppSettings | None = None, *, store: Store | None = None) -> Flask:
    """Build the API on a store; what isn't given is read from the environment.

    Raises:
        ValueError: a setting makes no sense.
        OtherVersion: another version wrote the data; nothing was changed. Not looked at while the store is away.
    """
    settings = settings or AppSettings.from_env(os.environ)
    store = store or Store.connect(StoreSettings.from_env(os.environ))
    with suppress(StoreUnavailable):
        upgrade.check(store)
    app = Service(__name__, static_folder=None)
    app.json = StrictJSON(app)
    app.url_map.merge_slashes = False  # else a doubled slash is answered with a redirect, in HTML
    app.config.update(
        API_TITLE="OpenRL",
        API_VERSION="v1",
        OPENAPI_VERSION="3.0.3",
    )
    app.extensions[EXTENSION] = Services.on(store, settings)
    api = openapi.SmorestApi(app)
    for noun in (
        service, sessions, search, traces, creation, training, runs, checkpoints, exports, sampling, futures, identity,
        books, copies, unloading,
    ):  # fmt: skip
        api.register_blueprint(noun.blp, url_prefix=PREFIX)
    errors.register(app)
    auth.register(app)
    wire.register(app)
    openapi.register(app, api, PREFIX)
    app.register_blueprint(openai.blp, url_prefix=OPENAI_PREFIX)
    return app
