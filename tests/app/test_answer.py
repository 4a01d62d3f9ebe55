"""Answers as they leave: the head with what comes first of the body, whatever kind of body it is."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from gunicorn.config import Config
from gunicorn.http.wsgi import FileWrapper

from openrl.app.gunicorn import JOINED_BYTES, Answer

Write = Callable[[Answer], object]


@pytest.fixture
def said(tmp_path: Path) -> Iterator[Callable[..., list[bytes]]]:
    """Let something be answered; return the pieces that were sent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def answered(write: Write, *headers: tuple[str, str], method: str = "GET") -> list[bytes]:
        request = SimpleNamespace(version=(1, 1), method=method, should_close=lambda: False)
        answer = Answer(request, ours, Config())
        answer.start_response("200 OK", list(headers))
        write(answer)
        answer.close()
        ours.shutdown(socket.SHUT_WR)
        return list(iter(lambda: theirs.recv(1 << 20), b""))

    yield answered
    ours.close()
    theirs.close()


def test_head_and_body_are_one_piece(said: Callable[..., list[bytes]]) -> None:
    (piece,) = said(lambda answer: answer.write(b"body"), ("Content-Length", "4"), ("X-A", "b"))
    assert piece.startswith(b"HTTP/1.1 200 OK\r\n") and b"\r\nX-A: b\r\n" in piece
    assert piece.endswith(b"\r\n\r\nbody")


def test_a_body_in_chunks_goes_on_after_its_head(said: Callable[..., list[bytes]]) -> None:
    def write(answer: Answer) -> None:
        answer.write(b"first")
        answer.write(b"second")

    first, second, end = said(write)
    assert b"Transfer-Encoding: chunked" in first and first.endswith(b"\r\n\r\n5\r\nfirst\r\n")
    assert (second, end) == (b"6\r\nsecond\r\n", b"0\r\n\r\n")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_without_a_body_is_its_head(said: Callable[..., list[bytes]], method: str) -> None:
    length = "0" if method == "GET" else "9"
    (piece,) = said(lambda answer: answer.write(b""), ("Content-Length", length), method=method)
    assert piece.endswith(b"\r\n\r\n") and piece.count(b"\r\n\r\n") == 1


def test_a_large_body_is_not_copied(said: Callable[..., list[bytes]]) -> None:
    body = b"x" * (JOINED_BYTES + 1)
    head, rest = said(lambda answer: answer.write(body), ("Content-Length", str(len(body))))
    assert head.endswith(b"\r\n\r\n") and rest == body


def test_a_file_comes_after_its_head(said: Callable[..., list[bytes]], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"the file")
    with (tmp_path / "file").open("rb") as file:
        head, body = said(lambda answer: answer.write_file(FileWrapper(file)), ("Content-Length", "8"))
    assert head.endswith(b"\r\n\r\n") and body == b"the file"
