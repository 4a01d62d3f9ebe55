"""The API under gunicorn: gevent workers that hold thousands of polls and leave at once when told to.

The master imports neither Flask nor redis; each worker builds its own application after gevent has
patched it.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import gevent
from gunicorn.app.base import BaseApplication
from gunicorn.errors import AppImportError
from gunicorn.http import wsgi
from gunicorn.workers.ggevent import GeventWorker

from openrl.app.settings import AppSettings
from openrl.tasks.process import keep_freed_memory

GRACE_S = 5
"""Time that requests in hand have to end after SIGTERM."""

STUCK_S = 120
"""A worker whose event loop stands still for this long is replaced. Generous: trainers share the processor."""

SWITCH_S = 0.0001
"""How long the event loop waits for the interpreter's lock while a native thread decodes. It gives the lock up with
each system call, so Python's own 5 ms would add up to a tenth of a second for one heartbeat."""

YOUNG_OBJECTS, YOUNG_ROUNDS = 1000, 2
"""When the garbage collector looks at the newest objects, and at those that outlived so many looks: often, at few."""

FULL_SWEEP_S = 600.0
"""How often it looks at all, which stops the loop for tens of milliseconds when thousands of polls wait. By itself it
would do so several times a minute; requests leave hardly anything for it, so little gathers in between."""

JOINED_BYTES = 64 << 10
"""A piece of a body up to this size is copied behind the head; a larger one is sent after it."""

KEPT_BYTES = 64 << 20
"""Freed memory that a process keeps: bodies of some MiB come again and again."""


class Server(BaseApplication):
    """Gunicorn, configured by our settings and nothing else."""

    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        super().__init__()

    def load_config(self) -> None:
        """Hand our settings to gunicorn."""
        host = f"[{self._settings.host}]" if ":" in self._settings.host else self._settings.host
        given = self._settings.listen_fd >= 0
        for name, value in {
            "bind": f"fd://{self._settings.listen_fd}" if given else f"{host}:{self._settings.port}",
            "workers": self._settings.api_workers,
            "worker_class": Worker,
            "worker_connections": self._settings.worker_connections,
            "keepalive": self._settings.keepalive_s,
            "graceful_timeout": GRACE_S,
            "timeout": STUCK_S,
            "accesslog": "-" if self._settings.access_log else None,
            "errorlog": "-",
            "control_socket_disable": True,
            "proc_name": "openrl-api",
        }.items():
            self.cfg.set(name, value)

    def load(self) -> Any:
        """Build the application, in a worker.

        Raises:
            AppImportError: data of another version lies here. It ends all of gunicorn, with APP_LOAD_ERROR.
        """
        from openrl.app.factory import create_app  # only here: gevent has patched the process by now
        from openrl.tasks.errors import OtherVersion

        try:
            return create_app(self._settings)
        except OtherVersion as other:
            raise AppImportError(f"openrl.app: {other}") from other


class Answer(wsgi.Response):
    """An answer whose head leaves together with what comes first of its body: the client wakes up once, not twice."""

    headers_sent: bool
    _head = b""

    @property
    def nothing_left(self) -> bool:
        """Tell whether another answer can still be given in place of this one."""
        return not self.headers_sent or bool(self._head)

    def send_headers(self) -> None:
        """Write the head, to be sent with the body."""
        if not self.headers_sent:
            lines = [*self.default_headers(), *(f"{name}: {value}\r\n" for name, value in self.headers), "\r\n"]
            self._head, self.headers_sent = "".join(lines).encode("latin-1"), True

    def sendfile(self, respiter: Any) -> bool:
        """Send a file by way of the system, which knows no head."""
        self.send_headers()
        self._send(b"")
        return bool(super().sendfile(respiter))

    def close(self) -> None:
        """End the answer, and send what is left of it."""
        self.send_headers()
        self._send(b"")
        super().close()

    def _emit_body(self, data: bytes) -> None:
        self._send(b"%X\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def _send(self, data: bytes) -> None:
        head, self._head = self._head, b""
        if len(data) > JOINED_BYTES:
            self.sock.sendall(head)
            self.sock.sendall(data)
        elif head or data:
            self.sock.sendall(head + data)


class Worker(GeventWorker):
    """A gevent worker that ends as soon as its requests have: held polls answer, idle connections close."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wsgi: Any = None
        self._idle: dict[gevent.Greenlet, gevent.Timeout] = {}
        self._swept = time.monotonic()

    def load_wsgi(self) -> None:
        """Build the application, and set the process up so that its event loop never stands still for long."""
        super().load_wsgi()
        # Gunicorn searches its settings some thirty times for each request; from here on they are plain attributes.
        self.cfg.__dict__.update({name: setting.get() for name, setting in self.cfg.settings.items()})
        keep_freed_memory(KEPT_BYTES)
        sys.setswitchinterval(SWITCH_S)
        gc.collect()
        gc.freeze()  # what is there now stays for ever: no need to look at it again
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_ROUNDS, 2**31 - 1)

    def notify(self) -> None:
        """Show that the loop runs, once a second; now and then collect what is old."""
        super().notify()
        if time.monotonic() - self._swept > FULL_SWEEP_S:
            gc.collect()
            self._swept = time.monotonic()

    @contextmanager
    def timeout_ctx(self) -> Iterator[None]:
        """Wait for a connection's next request: for the keep-alive time, or not at all once we are leaving."""
        waiting = gevent.getcurrent()
        with gevent.Timeout(self.cfg.keepalive if self.alive else 0, False) as timeout:
            self._idle[waiting] = timeout
            try:
                yield
            finally:
                del self._idle[waiting]

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> None:
        """Serve one request.

        Raises:
            StopIteration: the connection is to be closed.
        """
        began = datetime.now()
        answer, environ = wsgi.create(req, sock, addr, listener_name, self.cfg, response_class=Answer)
        environ["wsgi.multithread"] = True
        if not self.alive:
            answer.force_close()
        try:
            self._serve(answer, environ)
        except (gevent.GreenletExit, SystemExit):
            raise StopIteration from None
        except OSError:
            raise
        except Exception:
            if answer.nothing_left:
                raise
            self.log.exception("an answer broke off")
            answer.force_close()
        finally:
            self.log.access(answer, req, environ, datetime.now() - began)
        if answer.should_close():
            raise StopIteration

    def _serve(self, answer: Answer, environ: dict[str, Any]) -> None:
        parts = self.wsgi(environ, answer.start_response)
        try:
            if isinstance(parts, wsgi.FileWrapper):
                answer.write_file(parts)
            else:
                for part in parts:
                    answer.write(part)
            answer.close()
        finally:
            if hasattr(parts, "close"):
                parts.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to leave, on SIGTERM."""
        super().handle_exit(sig, frame)
        gevent.spawn(self._drain)

    def _drain(self) -> None:
        from openrl.app.context import EXTENSION

        if self.wsgi is not None:  # asked to leave before the application was there
            self.wsgi.extensions[EXTENSION].polls.release()
        for waiting, timeout in list(self._idle.items()):
            waiting.kill(timeout, block=False)
