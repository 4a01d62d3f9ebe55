"""What arrives in a request's body: its size, its compression, JSON or protobuf by its content type.

Bodies are read once, against two caps (as sent, and after zstd), and large ones are decoded in a native
thread so that the polls of the same process keep their pace. Knows no operation: blueprints bring their
schema, `openrl.tasks.wire.codec` the protobuf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import flask_smorest
import marshmallow
import zstandard
from flask import Request, g, request
from webargs.flaskparser import FlaskParser

from openrl.app.context import services
from openrl.app.greenlets import off_loop
from openrl.app.schemas import explain
from openrl.tasks.errors import InvalidRequest, TooLarge, Undecodable
from openrl.tasks.wire import codec

JSON = "application/json"
PROTOBUF = "application/x-protobuf"

LARGE_BYTES = 128 << 10
"""A body over this size (or a compressed one) is decoded off the event loop; under it, the hop costs more."""

HEAD_BYTES = 64 << 10
"""What is kept of a body that is refused for its size: enough to find whose turn it uses up."""

_CHUNK_BYTES = 1 << 20
_ZSTD_STEP_BYTES = 1 << 10
"""Input given to zstd at a time. A step can grow 32,768-fold, and the cap is looked at between steps."""

_ZSTD_WINDOW_BYTES = 1 << 27
"""What one decoder may hold; zstd's own default."""

T = TypeVar("T")


def is_protobuf() -> bool:
    """Tell whether the body is protobuf; anything but JSON and protobuf is Undecodable.

    That JSON must call itself JSON also keeps web pages from posting to a service on this machine.
    """
    if request.mimetype not in (JSON, PROTOBUF):
        raise Undecodable(f"Content-Type is {request.mimetype!r}; it must be {JSON} or {PROTOBUF}")
    return bool(request.mimetype == PROTOBUF)


def body() -> bytes:
    """Return the request's body, decompressed.

    Raises:
        TooLarge: over a cap; the first bytes are still known to `address`.
        Undecodable: the compression is broken.
    """
    if "body" not in g:
        g.body = _decompressed(_received(services().settings.max_body_bytes))
    return bytes(g.body)


def json_object() -> dict[str, Any]:
    """Return the body as a JSON object; an absent body is an empty one.

    Raises:
        Undecodable: it isn't JSON, or not an object.
    """
    if not body() and not request.mimetype:
        return {}
    if is_protobuf():
        raise Undecodable(f"Content-Type is {request.mimetype!r}; this route takes {JSON}")
    found = decoded(_parse_json)
    if not isinstance(found, dict):
        raise Undecodable(f"the body is JSON, but a {type(found).__name__} where an object belongs")
    return found


def decoded(decode: Callable[[bytes], T]) -> T:
    """Decode the body, off the event loop when it is large."""
    return off_loop(decode, body(), large=len(body()) > LARGE_BYTES)


def address() -> tuple[str, int] | None:
    """Return the (model_id, seq_id) of the body as far as it can be read, also when the rest can't."""
    data = seen()
    if request.mimetype == PROTOBUF:
        return codec.peek_forward_backward(data)
    try:
        found = json.loads(data)
        run_id, seq_id = found["model_id"], found["seq_id"]
    except (ValueError, RecursionError, TypeError, KeyError):
        run_id, seq_id = _searched(data)
    if isinstance(run_id, str) and type(seq_id) is int and 1 <= seq_id < 2**31:
        return run_id, seq_id
    return None


def seen() -> bytes:
    """Return what could be read of the body: all of it, or its first bytes, or nothing."""
    return bytes(g.get("body") or g.get("head") or b"")


class WireParser(FlaskParser):
    """Loads arguments from the body (`wire`) or the query; a refused one is an `InvalidRequest`."""

    DEFAULT_UNKNOWN_BY_LOCATION = {**FlaskParser.DEFAULT_UNKNOWN_BY_LOCATION, "wire": None, "query": None}
    __location_map__ = {**FlaskParser.__location_map__, "wire": "load_wire"}

    def load_wire(self, _request: Request, _schema: marshmallow.Schema) -> dict[str, Any]:
        """Return the body's JSON object."""
        return json_object()

    def handle_error(self, error: marshmallow.ValidationError, *_args: object, **_options: object) -> NoReturn:
        """Raise what the schema found as one line that names each field, its value and what is right."""
        raise InvalidRequest(explain(error)) from error


class Blueprint(flask_smorest.Blueprint):
    """A blueprint whose arguments come through `WireParser`."""

    ARGUMENTS_PARSER = WireParser()
    DEFAULT_LOCATION_CONTENT_TYPE_MAPPING = {"wire": JSON}


def _received(limit: int) -> bytes:
    """Read the body as it was sent, no more than `limit` bytes of it."""
    announced = request.content_length or 0
    parts: list[bytes] = []
    size = 0
    while announced <= limit and (part := request.stream.read(_CHUNK_BYTES)):
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    if max(announced, size) > limit:
        g.head = _head(parts[0] if parts else request.stream.read(HEAD_BYTES))
        raise TooLarge(f"the body is over {limit} bytes: send less at once, or have OPENRL_MAX_BODY_BYTES raised")
    return b"".join(parts)


def _decompressed(data: bytes) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding != "zstd":
        raise Undecodable(f"Content-Encoding is {encoding!r}; it must be zstd, or absent")
    limit = services().settings.max_decoded_bytes
    try:
        return off_loop(unpack, data, limit, large=True)
    except TooLarge:
        g.head = _head(data)
        raise


def unpack(data: bytes, limit: int) -> bytes:
    """Decompress zstd frames, never holding much more than `limit` bytes.

    Raises:
        TooLarge: there is more than `limit`.
        Undecodable: the frames are broken or cut short.
    """
    parts: list[bytes] = []
    size = 0
    stream = None
    try:
        for start in range(0, len(data), _ZSTD_STEP_BYTES):
            rest = data[start : start + _ZSTD_STEP_BYTES]
            while rest:
                stream = stream or zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
                parts.append(stream.decompress(rest))
                size += len(parts[-1])
                if size > limit:
                    raise TooLarge(f"the body is over {limit} bytes after zstd: send less at once")
                rest = stream.unused_data if stream.eof else b""
                stream = None if stream.eof else stream
    except zstandard.ZstdError as broken:
        raise Undecodable(f"the body says zstd, and isn't: {broken}") from broken
    if stream is not None or not parts:
        raise Undecodable("the zstd body ends before its frame does")
    return b"".join(parts)


def _head(data: bytes) -> bytes:
    """Return the first bytes of a body that is refused, decompressed where they are compressed."""
    data = data[:HEAD_BYTES]
    if request.headers.get("Content-Encoding", "").strip().lower() != "zstd":
        return data
    try:
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).stream_reader(data).read(HEAD_BYTES)
    except zstandard.ZstdError:
        return b""


def _parse_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError as deep:
        raise Undecodable("the body's JSON is nested too deep") from deep
    except ValueError as broken:
        raise Undecodable(f"the body isn't JSON: {broken}") from broken


def _searched(data: bytes) -> tuple[str | None, int | None]:
    """Find the two keys in text that isn't JSON as a whole."""
    run = re.search(rb'"model_id"\s*:\s*"([\w:.-]{1,200})"', data)
    seq = re.search(rb'"seq_id"\s*:\s*(\d{1,10})\b', data)
    return (run[1].decode() if run else None), (int(seq[1]) if seq else None)


def accepts_protobuf() -> bool:
    """Tell whether the client wants protobuf where there is a choice."""
    return PROTOBUF in request.headers.get("Accept", "")
