"""What all schemas share: strict fields, requests that refuse what they don't know, and clear refusals.

JSON null stands for "absent" wherever a field is optional (old SDKs send nulls). Nothing is coerced: "3"
is not a number here, nor is true.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import marshmallow
from marshmallow import RAISE, ValidationError, fields, pre_load, validate

from openrl.tasks.errors import shown

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1

MAX_METADATA_BYTES = 64 << 10
MAX_LISTED = 1000

OF_NULL = "must be a finite number; NaN and infinity are sent as null"

_NAME_CHARS = 80
"""What is repeated of a field's name, which may be one that nobody knows."""


class Text(fields.String):
    """A string of valid Unicode."""

    default_error_messages = {"invalid": "must be a string"}

    def __init__(self, *, most_chars: int = 4096, **options: Any) -> None:
        super().__init__(
            validate=validate.Length(max=most_chars, error="must have at most {max} characters"), **options
        )

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> str:
        if not isinstance(value, str):
            raise self.make_error("invalid")
        try:
            value.encode()
        except UnicodeEncodeError:
            raise self.make_error("invalid") from None
        return value


class Whole(fields.Integer):
    """An integer between two bounds, both included."""

    default_error_messages = {"invalid": "must be a whole number", "too_large": "must be a whole number"}

    def __init__(self, *, least: int = 0, most: int = INT32_MAX, **options: Any) -> None:
        rule = validate.Range(min=least, max=most, error="must be {min} to {max}")
        super().__init__(strict=True, validate=rule, **options)

    def _validated(self, value: Any) -> int:
        if type(value) is not int:
            raise self.make_error("invalid")
        return value


class Number(fields.Float):
    """A finite number. Its bounds belong to `openrl.app.checks`."""

    default_error_messages = {"invalid": "must be a finite number"}

    def _validated(self, value: Any) -> float:
        if type(value) not in (int, float) or not _is_finite(value):
            raise self.make_error("invalid")
        return float(value)


class Definite(Number):
    """A number that may be left out and not null: as null, every SDK sends a NaN or an infinity.

    The document of /api/v1 calls it nullable, as it did when null was taken for absent.
    """

    def deserialize(self, value: Any, attr: str | None = None, data: Any = None, **options: Any) -> Any:
        """Refuse null, and read a number.

        Raises:
            ValidationError: it is null, or no finite number.
        """
        if value is None:
            raise ValidationError(OF_NULL)
        return super().deserialize(value, attr, data, **options)


class Flag(fields.Boolean):
    """true or false."""

    default_error_messages = {"invalid": "must be true or false"}

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> bool:
        if not isinstance(value, bool):
            raise self.make_error("invalid")
        return value


class Metadata(fields.Dict):
    """Any JSON object of moderate size, without NaN and infinity."""

    default_error_messages = {
        "invalid": "must be an object",
        "size": f"must take at most {MAX_METADATA_BYTES} bytes as JSON",
        "content": "must hold finite numbers and valid Unicode only",
    }

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.make_error("invalid")
        try:
            size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
        except (ValueError, RecursionError):
            raise self.make_error("content") from None
        if size > MAX_METADATA_BYTES:
            raise self.make_error("size")
        return value


class Time(fields.Field[float]):
    """Seconds since the epoch, written as ISO 8601 with its zone."""

    def __init__(self, **options: Any) -> None:
        described = {"type": "string", "format": "date-time", "nullable": True}
        super().__init__(**{"metadata": described, **options})

    def _serialize(self, value: float | None, attr: str | None, obj: Any, **options: Any) -> str | None:
        return None if value is None else datetime.fromtimestamp(value, UTC).isoformat()


TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
"""How the document describes `as_strings`."""


BINARY = {"type": "string", "format": "binary"}
"""How it describes a file, and protobuf."""


def unicode_only(value: Any) -> None:
    """Refuse text that isn't valid Unicode anywhere in a JSON value."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ValidationError("must hold valid Unicode only") from None


def tag(name: str) -> Text:
    """Return the field `type`, which says again what the route says already."""
    field = Text()
    field.validators = [validate.Equal(name, error="must be {other!r} on this route")]
    return field


class Sent(marshmallow.Schema):
    """A request's body or query: what it doesn't know, it refuses by name."""

    class Meta:
        unknown = RAISE

    error_messages = {"unknown": "is unknown here", "type": "must be an object"}

    def on_bind_field(self, field_name: str, field_obj: fields.Field[Any]) -> None:
        """Give every field the same words for a missing value; an optional one may be null."""
        field_obj.allow_none = not field_obj.required
        field_obj.error_messages["required"] = "is required"
        field_obj.error_messages["null"] = "is required"
        super().on_bind_field(field_name, field_obj)

    @pre_load
    def nulls_are_absent(self, data: Any, **_options: Any) -> Any:
        """Drop nulls of the fields we know."""
        if not isinstance(data, Mapping):
            return data
        return {key: value for key, value in data.items() if value is not None or key not in self._nullable}

    @cached_property
    def _nullable(self) -> frozenset[str]:
        found = self.load_fields.items()
        return frozenset(field.data_key or name for name, field in found if not isinstance(field, Definite))


class PageSchema(Sent):
    """Which part of a list."""

    limit = fields.Integer(
        load_default=20,
        validate=validate.Range(min=1, max=MAX_LISTED, error="must be {min} to {max}"),
        error_messages={"invalid": "must be a whole number"},
    )
    offset = fields.Integer(
        load_default=0,
        validate=validate.Range(min=0, max=INT32_MAX, error="must be {min} to {max}"),
        error_messages={"invalid": "must be a whole number"},
    )
    access_scope = fields.String(
        load_default="owned", validate=validate.OneOf(["owned", "accessible"], error="must be owned or accessible")
    )


class CursorSchema(marshmallow.Schema):
    """Where in a list its part lies."""

    offset = fields.Integer(required=True)
    limit = fields.Integer(required=True)
    total_count = fields.Integer(required=True)


class PromiseSchema(marshmallow.Schema):
    """The answer to a slow operation: what to poll, and whose it is."""

    request_id = fields.String(required=True)
    model_id = fields.String(attribute="run_id")


class ErrorBody(marshmallow.Schema):
    """What went wrong and what to do."""

    code = fields.String(required=True)
    message = fields.String(required=True)
    request_id = fields.String(required=True)


class ErrorSchema(marshmallow.Schema):
    """The answer to a refused request."""

    error = fields.Nested(ErrorBody, required=True)
    detail = fields.String(required=True)


def as_strings(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return metadata as the SDK reads it: values that aren't strings become their JSON."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()}


def explain(error: ValidationError) -> str:
    """Say in one line which fields were refused, what they held and what is right."""
    messages = error.messages if isinstance(error.messages, dict) else {"": error.messages}
    inner = messages.get("wire", messages.get("query", messages))
    return "; ".join(f"{_shown(path, error.data)} {rule}" for path, rule in _rules(inner, ()))


def _rules(messages: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(messages, Mapping):
        for key, inner in messages.items():
            yield from _rules(inner, path if key == "_schema" else (*path, key))
    else:
        for rule in messages:
            yield path, str(rule)


def _shown(path: tuple[Any, ...], data: Any) -> str:
    """Return `lora_config.rank = 'x'`; without the value where it is absent."""
    name = ""
    for step in path:
        named = _cut(str(step))
        name += f"[{named}]" if isinstance(step, int) else f".{named}" if name else named
        try:
            data = data[step]
        except (TypeError, KeyError, IndexError):
            return name
    return f"{name} = {shown(data)}" if name else "the body"


def _cut(name: str) -> str:
    return name if len(name) <= _NAME_CHARS else name[:_NAME_CHARS] + "..."


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
