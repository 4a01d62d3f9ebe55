"""The API under gunicorn: gevent workers that hold thousands of polls and leave at once when told to.

The master imports neither Flask nor redis; each worker builds its own application after gevent has
patched it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import gevent
from gunicorn.app.base import BaseApplication
from gunicorn.workers.ggevent import GeventWorker

from openrl.app.settings import AppSettings

GRACE_S = 5
"""Time that requests in hand have to end after SIGTERM."""

STUCK_S = 120
"""A worker whose event loop stands still for this long is replaced. Generous: trainers share the processor."""


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
        """Build the application, in a worker."""
        from openrl.app.factory import create_app  # only here: gevent has patched the process by now

        return create_app(self._settings)


class Worker(GeventWorker):
    """A gevent worker that ends as soon as its requests have: held polls answer, idle connections close."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._idle: dict[gevent.Greenlet, gevent.Timeout] = {}

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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to leave, on SIGTERM."""
        super().handle_exit(sig, frame)
        gevent.spawn(self._drain)

    def _drain(self) -> None:
        from openrl.app.context import EXTENSION

        self.wsgi.extensions[EXTENSION].polls.release()
        for waiting, timeout in list(self._idle.items()):
            waiting.kill(timeout, block=False)
