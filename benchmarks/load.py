"""A light HTTP client, for what the SDK itself would never send so much of: long polls, heartbeats, large bodies.

The client must not be what is measured: each role is one thread of plain sockets in a process of its own, and a
heartbeat's time counts from when it was due. `python load.py ROLE ARGUMENTS` plays one; `polls` brings them together.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

JSON, PROTOBUF = "application/json", "application/x-protobuf"
SETUP_CONNECTIONS = 16
FILES_BESIDE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One HTTP answer."""

    status: int
    body: bytes


class Connection(asyncio.Protocol):
    """A kept-alive connection with one request in flight."""

    def __init__(self, on_answer: Callable[[Connection, Answer], None]) -> None:
        self._on_answer = on_answer
        self._said = b""
        self._transport: asyncio.Transport | None = None
        self.is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way out."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes) -> None:
        """Send one request; the answer goes to `on_answer`."""
        assert self._transport is not None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Collect an answer."""
        self._said += data
        head, found, body = self._said.partition(b"\r\n\r\n")
        if found and len(body) >= _content_length(head):
            self._said = b""
            self._on_answer(self, Answer(status=int(head[9:12]), body=body))

    def connection_lost(self, error: Exception | None) -> None:
        """Note that the server closed it."""
        self.is_lost = True

    def close(self) -> None:
        """Hang up."""
        assert self._transport is not None
        self._transport.abort()


def _content_length(head: bytes) -> int:
    return int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])


def request(path: str, body: bytes, content_type: str = JSON) -> bytes:
    """Return the bytes of a POST."""
    lines = (
        f"POST /api/v1{path} HTTP/1.1", "Host: localhost", "X-API-Key: tml-local", f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}", "", "",
    )  # fmt: skip
    return "\r\n".join(lines).encode() + body


def json_request(path: str, **content: Any) -> bytes:
    """Return the bytes of a POST with a JSON body."""
    return request(path, json.dumps(content).encode())


class Client:
    """Requests that are each waited for, over a few connections."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._waiting: dict[Connection, asyncio.Future[Answer]] = {}
        self._free: asyncio.Queue[Connection] = asyncio.Queue()

    async def open(self, num: int) -> None:
        """Open `num` connections."""
        for _ in range(num):
            await self._free.put(await connect(self._host, self._port, self._answered))

    async def post(self, sent: bytes) -> Answer:
        """Send a request on a free connection; return its answer."""
        connection = await self._free.get()
        self._waiting[connection] = asyncio.get_running_loop().create_future()
        connection.send(sent)
        try:
            return await self._waiting[connection]
        finally:
            await self._free.put(connection)

    def _answered(self, connection: Connection, answer: Answer) -> None:
        self._waiting.pop(connection).set_result(answer)


async def connect(host: str, port: int, on_answer: Callable[[Connection, Answer], None]) -> Connection:
    """Open one connection."""
    _, connection = await asyncio.get_running_loop().create_connection(lambda: Connection(on_answer), host, port)
    return connection


# The roles ---------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Held:
    """Polls that are sent again after each 408, as the SDK does, until every one has its result."""

    num: int
    asked: dict[Connection, bytes] = field(default_factory=dict)
    expired: int = 0
    answered: int = 0
    wrong: list[str] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def on_answer(self, connection: Connection, answer: Answer) -> None:
        """Ask again, or be done."""
        if answer.status == 408:
            self.expired += 1
            connection.send(self.asked[connection])
            return
        self.answered += 1
        if answer.status != 200:
            self.wrong.append(f"{answer.status} {answer.body[:200]!r}")
        if self.answered == self.num:
            self.done.set()


async def hold(host: str, port: int, run_id: str, first: int, num: int) -> None:
    """Poll for `num` promises of a run at once. Says when all are sent, and, at the end, how it went."""
    held = Held(num=num)
    for seq in range(first, first + num):
        connection = await connect(host, port, held.on_answer)
        held.asked[connection] = json_request("/retrieve_future", request_id=f"{run_id}:{seq}")
        connection.send(held.asked[connection])
    say(open=num)
    while not held.done.is_set():
        lost = sum(connection.is_lost for connection in held.asked)
        if lost:
            sys.exit(f"{lost} of {num} polls were cut off")
        await asyncio.sleep(0.5)
    say(expired=held.expired, answered=held.answered, wrong=held.wrong[:3])


async def beat(host: str, port: int, sessions: list[str], seconds: float, interval_s: float) -> None:
    """Send heartbeats when they are due, whether or not the last ones are answered; say how long each took (ms)."""
    client = Client(host, port)
    await client.open(len(sessions))
    requests = [json_request("/session_heartbeat", session_id=session) for session in sessions]
    loop = asyncio.get_running_loop()
    began, took_ms = loop.time(), []

    async def one(due: float, sent: bytes) -> None:
        answer = await client.post(sent)
        took_ms.append(1e3 * (loop.time() - due))
        if answer.status != 200:
            sys.exit(f"a heartbeat was answered {answer.status}: {answer.body!r}")

    beats = []
    for number in range(int(seconds / interval_s)):
        due = began + number * interval_s
        await asyncio.sleep(max(0.0, due - loop.time()))
        beats.append(asyncio.ensure_future(one(due, requests[number % len(requests)])))
    await asyncio.gather(*beats)
    say(took_ms=[round(each, 2) for each in took_ms])


async def submit(host: str, port: int, run_id: str, body: str, first: int, seconds: float, every_s: float) -> None:
    """Submit a large body under one `seq_id` after another, one at a time; say how long each took (ms)."""
    client = Client(host, port)
    await client.open(1)
    rest = read(body)
    took_ms, ends = [], time.monotonic() + seconds
    seq = first
    while time.monotonic() < ends:
        sent = request("/forward_backward", addressed(run_id, seq) + rest, PROTOBUF)
        began = time.monotonic()
        answer = await client.post(sent)
        took_ms.append(1e3 * (time.monotonic() - began))
        if answer.status != 200:
            sys.exit(f"a body was answered {answer.status}: {answer.body!r}")
        await asyncio.sleep(max(0.0, began + every_s - time.monotonic()))
        seq += 1
    say(took_ms=[round(each, 2) for each in took_ms])


def read(path: str) -> bytes:
    """Return a file's bytes."""
    return Path(path).read_bytes()


async def post_all(host: str, port: int, requests: Iterable[bytes], allowed: tuple[int, ...] = (200,)) -> list[Answer]:
    """Send requests over a few connections; return the answers, in order."""
    client = Client(host, port)
    await client.open(SETUP_CONNECTIONS)
    answers = await asyncio.gather(*(client.post(sent) for sent in requests))
    wrong = next((answer for answer in answers if answer.status not in allowed), None)
    if wrong is not None:
        sys.exit(f"bench: the service answered {wrong.status}: {wrong.body[:300]!r}")
    return answers


def addressed(run_id: str, seq: int) -> bytes:
    """Return the two protobuf fields that tell a forward_backward's place; the rest of the message may follow."""
    varint, left = bytearray(), seq
    while left >= 0x80:
        varint.append(left & 0x7F | 0x80)
        left >>= 7
    return b"\x0a" + bytes([len(run_id)]) + run_id.encode() + b"\x10" + bytes(varint) + bytes([left])


def say(**found: Any) -> None:
    """Tell the bench, in one line of JSON."""
    print(json.dumps(found), flush=True)


def main(role: str, *words: str) -> None:
    """Play a role."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    given = json.loads(words[0])
    if role == "hold" and given["num"] + FILES_BESIDE > hard:
        sys.exit(f"{given['num']} polls need as many open files, and {hard} are allowed: raise ulimit -Hn")
    asyncio.run({"hold": hold, "beat": beat, "submit": submit}[role](**given))


if __name__ == "__main__":
    main(*sys.argv[1:])
