"""The real server on a free port: held polls, compressed bodies, a quick end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import pytest
import zstandard

from openrl.tasks.operations import Outcome
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from tests.app.conftest import MODEL, PROTOBUF, Worker, forward_backward


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    http: httpx.Client


@pytest.fixture
def server(store: Store) -> Iterator[Running]:
    Registry(store).add_model(MODEL)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OPENRL_PORT": str(port),
        "OPENRL_API_WORKERS": "1",
        "OPENRL_BODY_TIMEOUT_S": "2",
        "OPENRL_POLL_MIN_S": "40",
        "OPENRL_POLL_MAX_S": "40",
        "OPENRL_REDIS_URL": store.settings.redis_url,
        "OPENRL_DATA_DIR": str(store.settings.data_dir),
    }
    process = subprocess.Popen([sys.executable, "-m", "openrl.app"], env=environment)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=60, limits=limits) as http:
        try:
            _until_it_answers(process, http)
            yield Running(process, http)
        finally:
            process.kill()
            process.wait()


def _until_it_answers(process: subprocess.Popen[bytes], http: httpx.Client) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            assert http.get("/healthz").status_code == 200
            return
        except httpx.TransportError:
            time.sleep(0.05)
    raise AssertionError("the server did not start")


def test_the_server_holds_polls_wakes_them_and_leaves_at_once(server: Running, worker: Worker, store: Store) -> None:
    http = server.http
    session = http.post("/create_session", json={"tags": []}).json()["session_id"]
    lora = {"session_id": session, "model_seq_id": 0, "base_model": "tiny/random", "lora_config": {"rank": 8}}
    run = http.post("/create_model", json=lora).json()["model_id"]
    body = zstandard.compress(forward_backward(run, 1) * 1 + b"")
    sent = http.post("/forward_backward", content=body, headers={**PROTOBUF, "Content-Encoding": "zstd"})
    assert sent.json() == {"request_id": f"{run}:1", "model_id": run}

    def poll(_: int) -> httpx.Response:
        return http.post("/retrieve_future", json={"request_id": f"{run}:1"})

    with ThreadPoolExecutor(100) as pool:
        # Many more polls wait than the process has connections to the store.
        held = [pool.submit(poll, number) for number in range(100)]
        time.sleep(1.0)
        assert not any(each.done() for each in held)
        assert http.get("/healthz").status_code == 200
        assert len(store.redis.client_list()) < 45
        worker.step({"forward_backward": Outcome(error="no", category="user")})
        assert [each.result(60).json()["error"] for each in held] == ["no"] * 100

        late = http.post("/optim_step", json={"model_id": run, "seq_id": 3, "adam_params": {}}).json()["request_id"]
        held = [pool.submit(http.post, "/retrieve_future", json={"request_id": late}) for _ in range(5)]
        time.sleep(0.5)
        assert http.get("/healthz").status_code == 200  # behind those that came before it
        server.process.send_signal(signal.SIGTERM)
        assert [each.result(30).status_code for each in held] == [408] * 5, "well before their time"
    assert server.process.wait(30) == 0


def answer_to(server: Running, path: str, *lines: str, body: bytes) -> tuple[int, bytes]:
    """Send a request as these bytes and nothing after them; return the status and all that comes until the end."""
    host, port = str(server.http.base_url.host), server.http.base_url.port
    with socket.create_connection((host, port), timeout=20) as client:
        head = "\r\n".join([f"POST /api/v1{path} HTTP/1.1", f"Host: {host}", *lines, "", ""])
        client.sendall(head.encode() + body)
        said = b""
        while b'"detail"' not in said and (part := client.recv(65536)):
            said += part
    return int(said.split()[1]), said


def test_an_answer_comes_whole_in_one_piece_and_the_next_on_the_same_connection(server: Running) -> None:
    host, port = str(server.http.base_url.host), server.http.base_url.port
    with socket.create_connection((host, port), timeout=20) as client:
        for method, body in (("GET", b'{"status":"ok"}'), ("HEAD", b""), ("GET", b'{"status":"ok"}')):
            client.sendall(f"{method} /api/v1/healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            head, _, found = client.recv(65536).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK") and b"Content-Length: " in head, head
            assert found.strip() == body


def test_a_body_that_never_comes_or_is_broken_is_answered_in_json_and_holds_nobody(server: Running) -> None:
    json = "Content-Type: application/json"
    for status, word, lines, body in (
        (400, b"chunked", (json, "Transfer-Encoding: chunked"), b"ZZZ\r\n{}\r\n"),
        (400, b"chunked", (json, "Transfer-Encoding: chunked"), b"2\r\n{}ZZ"),
        (408, b"stopped arriving for 2 s", (json, "Content-Length: 500"), b'{"model_id":'),
        (408, b"stopped arriving for 2 s", (json, "Transfer-Encoding: chunked"), b"5\r\nab"),
        (413, b"OPENRL_MAX_BODY_BYTES", (json, "Content-Length: 99999999999999"), b""),
        (413, b"OPENRL_MAX_BODY_BYTES", (json, "Content-Length: 99999999999999"), b"abc"),
    ):
        found, said = answer_to(server, "/optim_step", *lines, body=body)
        assert found == status, said
        assert word in said and b"application/json" in said
    assert server.http.get("/healthz").status_code == 200
