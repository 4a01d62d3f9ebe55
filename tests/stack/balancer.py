"""One address before several API processes: a tiny TCP balancer that can make one of them die at a chosen moment."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal, Self

import httpx

from tests.stack.conftest import free_port

Moment = Literal["asked", "answered"]
"""When a replica dies: while it works at a request, or when its answer is under way and before the client has it."""

_REQUEST = re.compile(rb"POST /api/v1/([a-z_]+) HTTP")


@dataclass
class Replica:
    """One API of its own: a gunicorn master and its worker, in one process group."""

    port: int
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, env: dict[str, str]) -> Self:
        port = free_port()
        environ = {**os.environ, **env, "OPENRL_PORT": str(port), "OPENRL_API_WORKERS": "1"}
        process = subprocess.Popen([sys.executable, "-m", "openrl.app"], env=environ, start_new_session=True)
        return cls(port, process)

    def until_it_answers(self) -> None:
        for _ in range(600):
            assert self.process.poll() is None
            with suppress(httpx.TransportError):
                assert httpx.get(f"http://127.0.0.1:{self.port}/api/v1/healthz").status_code == 200
                return
            time.sleep(0.05)
        raise AssertionError("the replica did not start")

    def kill(self) -> None:
        """Kill master and worker at once, as a machine that is switched off."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


@dataclass
class Balancer:
    """Hands each new connection to the next replica that takes it."""

    replicas: list[Replica]
    listener: socket.socket = field(default_factory=lambda: socket.create_server(("127.0.0.1", 0)))
    killed: threading.Event = field(default_factory=threading.Event)
    _doomed: tuple[str, Moment] | None = None
    _turn: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def kill_at(self, route: str, moment: Moment) -> None:
        """Let the replica die that next gets a request of this route."""
        self.killed.clear()
        self._doomed = (route, moment)

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client:
            for _ in range(len(self.replicas)):
                with self._lock:
                    self._turn += 1
                    replica = self.replicas[self._turn % len(self.replicas)]
                with suppress(OSError), socket.create_connection(("127.0.0.1", replica.port), timeout=60) as backend:
                    dies = threading.Event()
                    back = threading.Thread(target=self._back, args=(backend, client, replica, dies), daemon=True)
                    back.start()
                    self._forth(client, backend, replica, dies)
                    back.join()
                    return

    def _forth(self, client: socket.socket, backend: socket.socket, replica: Replica, dies: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                found = _REQUEST.search(data)
                moment = self._claim(found[1].decode()) if found else None
                if moment == "answered":
                    dies.set()
                backend.sendall(data)
                if moment == "asked":
                    time.sleep(0.3)  # the replica has it in hand by now
                    self._kill(replica)
        with suppress(OSError):
            backend.shutdown(socket.SHUT_WR)

    def _back(self, backend: socket.socket, client: socket.socket, replica: Replica, dies: threading.Event) -> None:
        with suppress(OSError):
            while data := backend.recv(65536):
                if dies.is_set():
                    self._kill(replica)
                    break
                client.sendall(data)
        with suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _claim(self, route: str) -> Moment | None:
        with self._lock:
            if self._doomed is None or self._doomed[0] != route:
                return None
            moment, self._doomed = self._doomed[1], None
            return moment

    def _kill(self, replica: Replica) -> None:
        replica.kill()
        self.killed.set()


@contextmanager
def balanced(env: dict[str, str], number: int) -> Iterator[Balancer]:
    """Yield a balancer before so many replicas; all of it is gone afterwards."""
    replicas = [Replica.start(env) for _ in range(number)]
    balancer = Balancer(replicas)
    try:
        for replica in replicas:
            replica.until_it_answers()
        threading.Thread(target=balancer.serve, daemon=True).start()
        yield balancer
    finally:
        balancer.listener.close()
        for replica in replicas:
            replica.kill()
