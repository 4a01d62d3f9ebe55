"""The OpenAPI document of `/api/v1`, and the page of routes made from it.

flask-smorest reads fields and types off the schemas. Here is added what holds for every route: how a client proves
who it is, and each refusal by its status, so that an answer with any other status is a fault. Knows no route.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from flask import Flask, Response, jsonify
from flask_smorest import Api, Blueprint
from marshmallow import fields

from openrl.app import scopes
from openrl.app.auth import HEADER
from openrl.app.schemas import ErrorSchema
from openrl.tasks.operations import JSON

EXTENSION = "openrl-openapi"

REFUSALS = {
    400: "The body can't be read, or isn't what Content-Type says.",
    401: "No valid API key, or no signature.",
    403: "Not without an API key, or not with this one; or the link was altered.",
    404: "Unknown, or somebody else's.",
    408: "The body broke off or stopped arriving; nothing is used up.",
    410: "It existed, and is gone.",
    413: "Over a size limit.",
    422: "The request makes no sense; the text names the field.",
    429: "Too much at once; nothing is used up.",
    503: "The store doesn't answer, or the base model isn't served now; nothing is used up.",
}
"""What each refusal means; `openrl.app.errors` has the errors behind them."""

_NAMING = ("_id", "path", "model")
"""Ends of the names of fields that name a thing, which may not be there."""


class SmorestApi(Api):
    """flask-smorest, whose errors are `openrl.app.errors`' and whose document is written when somebody asks for it."""

    ERROR_SCHEMA = ErrorSchema

    def _register_error_handlers(self) -> None:
        """Leave errors to `openrl.app.errors`."""

    def init_app(self, app: Flask, **options: Any) -> None:
        """Begin the document."""
        super().init_app(app, **options)
        self.ma_plugin.converter.add_attribute_function(_constant)
        self._writing, self._written = threading.Lock(), dict[str, Any]()

    def register_blueprint(self, blp: Blueprint, **options: Any) -> None:
        """Serve a blueprint; it is described later, which takes longer than all the rest of building an API."""
        self._app.extensions["flask-smorest"]["blp_name_to_api"][blp.name] = self
        self._app.register_blueprint(blp, **options)

    def document(self) -> dict[str, Any]:
        """Return the document, which must not be changed; every blueprint is there by now."""
        with self._writing:
            if not self._written:
                for blp in self._app.blueprints.values():
                    if isinstance(blp, Blueprint):
                        blp.register_views_in_doc(self, self._app, self.spec, name=blp.name, parameters=None)
                        self.spec.tag({"name": blp.name, "description": blp.description})
                self._written = completed(self.spec.to_dict())
            return self._written


def register(app: Flask, api: SmorestApi, prefix: str) -> None:
    """Serve the document and the page."""
    where = f"{prefix}/openapi.json"
    app.extensions[EXTENSION] = api
    app.add_url_rule(where, "openapi.json", lambda: jsonify(api.document()))
    app.add_url_rule(f"{prefix}/docs", "docs", lambda: Response(_page(api.document(), where), mimetype="text/html"))


def completed(spec: dict[str, Any]) -> dict[str, Any]:
    """Return what flask-smorest wrote, with keys and refusals, and with answers that may grow."""
    components = spec["components"]
    components["securitySchemes"] = {
        "key": {"type": "apiKey", "in": "header", "name": HEADER},
        "bearer": {"type": "http", "scheme": "bearer"},
    }
    components["responses"] = {str(status): _refusal(text) for status, text in REFUSALS.items()}
    spec["security"] = [{"key": []}, {"bearer": []}]
    for methods in spec["paths"].values():
        for parameter in methods.pop("parameters", ()):
            for operation in methods.values():
                operation.setdefault("parameters", []).insert(0, parameter)
    for path, method, operation in operations(spec):
        if scopes.needed(method.upper(), path.replace("{", "<").replace("}", ">")) is scopes.OPEN:
            operation["security"] = []
        named = {status: {"$ref": f"#/components/responses/{status}"} for status in _statuses(spec, operation)}
        kept = {status: answer for status, answer in operation["responses"].items() if "$ref" not in answer}
        operation["responses"] = named | kept
        for parameter in operation.get("parameters", ()):
            _never_null(parameter["schema"])
    sent = set(_reached(spec, [operation.get("requestBody") for _, _, operation in operations(spec)]))
    for name, schema in components["schemas"].items():
        if name not in sent and schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
    return _nulls_beside_references(spec)


def operations(spec: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, method and description of each operation of a document."""
    for path, methods in sorted(spec["paths"].items()):
        for method, operation in methods.items():
            if method in ("get", "post", "put", "delete", "patch"):
                yield path, method, operation


def _statuses(spec: Mapping[str, Any], operation: Mapping[str, Any]) -> list[str]:
    """Name the refusals of one operation: what it takes decides what can be wrong with it."""
    body = operation.get("requestBody")
    places = {parameter["in"] for parameter in operation.get("parameters", ())}
    found = {503}
    signed = any(parameter["name"] == "signature" for parameter in operation.get("parameters", ()))
    if signed or operation.get("security") != []:
        found |= {401, 403}
    if body is not None:
        found |= {400, 408, 413, 422, 429}
    if "query" in places:
        found |= {422}
    if "path" in places or any(name.endswith(_NAMING) for name in _fields(spec, body)):
        found |= {404, 410, 422}
    return sorted(map(str, found))


def _fields(spec: Mapping[str, Any], body: Any) -> Iterator[str]:
    for name in _reached(spec, body):
        yield from spec["components"]["schemas"][name].get("properties", ())


def _reached(spec: Mapping[str, Any], start: Any) -> Iterator[str]:
    """Yield the names of the schemas that `start` refers to, directly or not."""
    waiting, seen = [start], set()
    while waiting:
        value = waiting.pop()
        waiting.extend(value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ())
        name = value.get("$ref", "").rpartition("/")[2] if isinstance(value, Mapping) else ""
        if name in spec["components"]["schemas"] and name not in seen:
            seen.add(name)
            waiting.append(spec["components"]["schemas"][name])
            yield name


def _never_null(schema: dict[str, Any]) -> None:
    """Take back that a parameter may be null: an address has no word for it."""
    if schema.pop("nullable", False) and None in schema.get("enum", ()):
        schema["enum"].remove(None)


def _nulls_beside_references(value: Any) -> Any:
    """Write "this schema, or null" so that it doesn't mean "any object": apispec's way in OpenAPI 3.0 does."""
    if isinstance(value, list):
        return [_nulls_beside_references(each) for each in value]
    if not isinstance(value, dict):
        return value
    kinds = value.get("anyOf", ())
    if len(kinds) == 2 and kinds[0] == {"type": "object", "nullable": True}:
        rest = {key: each for key, each in value.items() if key != "anyOf"}
        return rest | {"allOf": [kinds[1]], "nullable": True}
    return {key: _nulls_beside_references(each) for key, each in value.items() if key != "readOnly"}


def _refusal(text: str) -> dict[str, Any]:
    return {"description": text, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _constant(_converter: Any, field: fields.Field[Any], **_options: Any) -> dict[str, Any]:
    """Describe a field that always holds the same."""
    if not isinstance(field, fields.Constant):
        return {}
    kinds = {str: "string", bool: "boolean", int: "integer", dict: "object"}
    return {"type": kinds[type(field.constant)], "enum": [field.constant]}


def _page(document: Mapping[str, Any], whole: str) -> str:
    """Return the routes as one page that needs nothing from elsewhere."""
    rows = "\n".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(operation.get('summary', ''))}</td></tr>"
        for path, method, operation in operations(document)
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>OpenRL API</title>"
        "<style>body{font:16px/1.5 system-ui;margin:2rem auto;max-width:60rem;padding:0 1rem}"
        "td{padding:.3rem 1rem .3rem 0;border-top:1px solid #ddd;vertical-align:top}</style>"
        f"<h1>OpenRL API</h1><p>openrl-service {version('openrl-service')}. The whole description: "
        f"<a href='{whole}'>openapi.json</a>.</p><table>{rows}</table></html>"
    )
