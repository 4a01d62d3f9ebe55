"""How many parts a protobuf body has, counted before it is parsed.

Two bytes can be a message of its own, which costs fifty once parsed: a compressed body of a few kilobytes could fill
the memory of the process. So a large body is walked first, part by part, and no further than a limit. What the parts
mean is `requests`' to say; here is only where messages lie in messages.
"""

from __future__ import annotations

from typing import Any

from openrl.tasks.errors import TooLarge, Undecodable

UNWALKED_BYTES = 8 << 20
"""Bodies up to this are parsed as they are, at a cost of 250 MiB at worst; the SDK sends 5 MB at once."""

MAX_PARTS = 1 << 19
"""Fields of one body, in all messages together. 8192 datums, as many as there may be, have about 20 each."""

_OPAQUE: dict[int, Any] = {}
_PACKED = None
_TENSOR = {2: _OPAQUE, 4: _PACKED}
_CHUNK = {1: _OPAQUE, 2: {4: _OPAQUE}, 3: _OPAQUE}
_SPAN = {1: _OPAQUE, 2: _OPAQUE}
_EXAMPLE = {1: _CHUNK, 2: {2: _TENSOR}, 3: _SPAN, 4: _SPAN}
_CALL: dict[int, Any] = {3: _EXAMPLE, 5: _OPAQUE, 7: {2: _OPAQUE}}
"""The fields of each message that are messages themselves, or numbers one after the other."""


def refuse_crowd_of_parts(body: bytes) -> None:
    """Refuse a large body with more parts than any that makes sense.

    Raises:
        TooLarge: it has more than `MAX_PARTS`.
        Undecodable: it has a kind of field that is never used, or breaks off.
    """
    if len(body) <= UNWALKED_BYTES:
        return
    try:
        num_parts = _counted(body)
    except (IndexError, ValueError) as broken:
        raise Undecodable(f"the body is no forward_backward protobuf message: {broken}") from broken
    if num_parts > MAX_PARTS:
        raise TooLarge(f"the request has over {MAX_PARTS} parts in {len(body)} bytes: send fewer datums at once")


def _counted(body: bytes) -> int:
    """Return how many fields there are, or any number over the limit where there are more."""
    num_parts = 0
    waiting: list[tuple[int, int, dict[int, Any]]] = [(0, len(body), _CALL)]
    while waiting:
        position, end, messages = waiting.pop()
        while position < end and num_parts <= MAX_PARTS:
            num_parts += 1
            tag, position = varint(body, position)
            if tag & 7 != 2:
                position = skipped(tag & 7, body, position)
                continue
            length, position = varint(body, position)
            inner = messages.get(tag >> 3, position)
            if inner is _PACKED:
                num_parts += length
            elif isinstance(inner, dict):
                waiting.append((position, min(position + length, end), inner))
            position += length
    return num_parts


def varint(body: bytes, position: int) -> tuple[int, int]:
    """Return the number at `position`, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a varint has at most ten bytes")


def skipped(wire_type: int, body: bytes, position: int) -> int:
    """Return where the value at `position` ends."""
    match wire_type:
        case 0:
            return varint(body, position)[1]
        case 1:
            return position + 8
        case 2:
            length, position = varint(body, position)
            return position + length
        case 5:
            return position + 4
    raise ValueError(f"wire type {wire_type} is not used")
