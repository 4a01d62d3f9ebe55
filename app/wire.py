"""What arrives in a request's body: its size, its compression, JSON or protobuf by its content type.

Bodies are read once, against two caps (as sent, and after zstd) and a budget that all requests of the process
share, and large ones are decoded in a native thread so that the polls of the same process keep their pace. Knows
no operation: blueprints bring their schema, `openrl.tasks.wire.codec` the protobuf.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import flask_smorest
import marshmallow
import zstandard
from flask import Flask, Request, g, request
from gunicorn.http.errors import ParseException
from webargs.flaskparser import FlaskParser

from openrl.app.context import services
from openrl.app.greenlets import Budget, breathe, off_loop, within
from openrl.app.schemas import explain
from openrl.tasks.errors import Incomplete, InvalidRequest, Overloaded, TooLarge, Undecodable, shown
from openrl.tasks.operations import JSON, PROTOBUF
from openrl.tasks.wire import codec

LARGE_BYTES = 128 << 10
"""A body over this size (or a compressed one) is decoded off the event loop; under it, the hop costs more."""

HEAD_BYTES = 64 << 10
"""What is kept of a body that is refused for its size: enough to find whose turn it uses up."""

HEAD_WAIT_S = 1.0
"""How long those first bytes are waited for."""

MAX_DEPTH = 32
"""Objects and lists inside each other in JSON. The deepest that an SDK sends is under 10; whatever looks into a value
later can do so by recursion."""

MAX_JSON_BYTES = 32 << 20
"""Largest JSON body, whatever the caps on other bodies are: once parsed it takes up to twelve times as much. Older
SDKs send 10 MB at most."""

MAX_CONTAINERS = 1 << 19
"""Objects and lists of one JSON body; an empty one takes thirty times its two bytes."""

_CHUNK_BYTES = 1 << 20
_ZSTD_STEP_BYTES = 1 << 10
"""Input given to zstd at a time. A step can grow 32,768-fold, and the cap is looked at between steps."""

_ZSTD_WINDOW_BYTES = 1 << 27
"""What one decoder may hold; zstd's own default."""

MAX_FRAMES = 16
"""Frames of one zstd body. The SDK sends one; each costs a decoder, however empty it is."""

T = TypeVar("T")


class Share:
    """What the body of one request takes from the budget of all; a native thread may take too."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._taken = 0

    def take(self, size: int) -> None:
        """Take `size` bytes more, or raise Overloaded."""
        if not self._budget.take(size):
            raise Overloaded("too many bodies are being read at once: send this one again in a moment")
        self._taken += size

    def give_back(self) -> None:
        """Give back all of it."""
        self._budget.give_back(self._taken)
        self._taken = 0


def register(app: Flask) -> None:
    """Give back what a request's body took from the budget when the request ends."""
    app.teardown_request(lambda _: g.share.give_back() if "share" in g else None)


def is_protobuf() -> bool:
    """Tell whether the body is protobuf; anything but JSON and protobuf is Undecodable.

    That JSON must call itself JSON also keeps web pages from posting to a service on this machine.
    """
    if request.mimetype not in (JSON, PROTOBUF):
        raise Undecodable(f"Content-Type is {shown(request.mimetype)}; it must be {JSON} or {PROTOBUF}")
    return bool(request.mimetype == PROTOBUF)


def body() -> bytes:
    """Return the request's body, decompressed.

    Raises:
        TooLarge: over a cap; the first bytes are still known to `address`.
        Overloaded: the process holds enough bodies already; nothing is used up.
        Incomplete: it did not arrive whole; nothing is used up.
        Undecodable: the compression is broken.
    """
    if "body" not in g:
        g.share = Share(services().bodies)
        g.body = _decompressed(_received(services().settings.max_body_bytes))
    return bytes(g.body)


def json_object() -> dict[str, Any]:
    """Return the body as a JSON object; an absent body is an empty one.

    Raises:
        Undecodable: it isn't JSON, or not an object.
        InvalidRequest: it is nested too deep.
    """
    if not body() and not request.mimetype:
        return {}
    if is_protobuf():
        raise Undecodable(f"Content-Type is {shown(request.mimetype)}; this route takes {JSON}")
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
    read = codec.peek_forward_backward if request.mimetype == PROTOBUF else _peek_json
    return off_loop(read, data, large=len(data) > LARGE_BYTES)


def digest(prefix: bytes) -> bytes:
    """Return what tells this body, as far as it was read, from any other."""
    data = seen()
    return off_loop(lambda: hashlib.sha256(prefix + data).digest(), large=len(data) > LARGE_BYTES)


def _peek_json(data: bytes) -> tuple[str, int] | None:
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

    def arguments(self, schema: Any, **options: Any) -> Any:
        """Load arguments by a schema, which is built here and not again for each request."""
        return super().arguments(schema() if isinstance(schema, type) else schema, **options)


def _received(limit: int) -> bytes:
    """Read the body as it was sent, no more than `limit` bytes of it; only its head where it says that it has more.

    Raises:
        Incomplete: it stopped arriving, or broke off; nothing is used up, and the client sends it again.
    """
    announced = request.content_length or 0
    if announced > limit:
        with suppress(Incomplete, Undecodable):
            g.head = _head(_read(HEAD_BYTES, HEAD_WAIT_S))
        raise _over(limit)
    parts: list[bytes] = []
    size, whole = 0, announced or limit + 1
    while size < whole and (part := _read(min(_CHUNK_BYTES, whole - size), services().settings.body_timeout_s)):
        parts.append(part)
        size += len(part)
        g.share.take(len(part))
        if size > limit:
            g.head = _head(parts[0])
            raise _over(limit)
        if len(part) > LARGE_BYTES:
            breathe()
    if size < announced:
        raise Incomplete(f"the body broke off after {size} of {announced} bytes: send it again")
    return b"".join(parts)


def _over(limit: int) -> TooLarge:
    return TooLarge(f"the body is over {limit} bytes: send less at once, or have OPENRL_MAX_BODY_BYTES raised")


def _read(size: int, timeout_s: float) -> bytes:
    """Read the next bytes of the body; after an error the server closes the connection."""
    try:
        return bytes(within(timeout_s, request.stream.read, size))
    except ParseException as broken:
        raise Undecodable("the body's chunked encoding is broken: send it whole, with a Content-Length") from broken
    except TimeoutError as stalled:
        raise Incomplete(f"the body stopped arriving for {timeout_s:g} s: send it again") from stalled
    except OSError as gone:
        raise Incomplete("the body broke off: send it again") from gone


def _decompressed(data: bytes) -> bytes:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return data
    if encoding != "zstd":
        raise Undecodable(f"Content-Encoding is {shown(encoding)}; it must be zstd, or absent")
    limit = services().settings.max_decoded_bytes
    try:
        return off_loop(unpack, data, limit, g.share.take, large=True)
    except TooLarge:
        g.head = _head(data)
        raise


def unpack(data: bytes, limit: int, take: Callable[[int], None] = lambda size: None) -> bytes:
    """Decompress zstd frames, never holding much more than `limit` bytes, nor than `take` grants.

    Raises:
        TooLarge: there is more than `limit`.
        Undecodable: the frames are broken, cut short, or too many.
    """
    parts: list[bytes] = []
    size = frames = 0
    stream = None
    try:
        for start in range(0, len(data), _ZSTD_STEP_BYTES):
            rest = data[start : start + _ZSTD_STEP_BYTES]
            while rest:
                if stream is None:
                    frames += 1
                    if frames > MAX_FRAMES:
                        raise Undecodable(f"the body has over {MAX_FRAMES} zstd frames: send one")
                    stream = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()
                parts.append(stream.decompress(rest))
                size += len(parts[-1])
                if size > limit:
                    raise TooLarge(f"the body is over {limit} bytes after zstd: send less at once")
                take(len(parts[-1]))
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
    """Read JSON within bounds of size, depth and number of parts, and in which no key is there twice."""
    if len(data) > MAX_JSON_BYTES:
        raise TooLarge(f"the body is JSON of {len(data)} bytes, over {MAX_JSON_BYTES}: send less at once, or protobuf")
    if (num_containers := data.count(b"[") + data.count(b"{")) > MAX_CONTAINERS:
        raise TooLarge(f"the body's JSON opens {num_containers} brackets, over {MAX_CONTAINERS}: send less at once")
    try:
        found = json.loads(data.decode(), object_pairs_hook=_without_doubles)
    except RecursionError as deep:
        raise _too_deep() from deep
    except ValueError as broken:
        raise Undecodable(f"the body isn't JSON: {str(broken).partition('; use sys.')[0]}") from broken
    if _is_deep(found):
        raise _too_deep()
    return found


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise InvalidRequest(f"the body's JSON has the key {shown(doubled)} twice")
    return found


def _is_deep(value: Any) -> bool:
    """Tell whether containers lie in each other more than `MAX_DEPTH` deep. Looks level by level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        children = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def _too_deep() -> InvalidRequest:
    return InvalidRequest(f"the body's JSON is nested too deep: at most {MAX_DEPTH} objects and lists in each other")


def _searched(data: bytes) -> tuple[str | None, int | None]:
    """Find the two keys in text that isn't JSON as a whole."""
    run = re.search(rb'"model_id"\s*:\s*"([\w:.-]{1,200})"', data)
    seq = re.search(rb'"seq_id"\s*:\s*(\d{1,10})\b', data)
    return (run[1].decode() if run else None), (int(seq[1]) if seq else None)


def accepts_protobuf() -> bool:
    """Tell whether the client wants protobuf where there is a choice."""
    return PROTOBUF in request.headers.get("Accept", "")
