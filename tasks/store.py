"""The store: one Redis or Valkey, reached through one bounded pool a process.

The only home of redis' exceptions: whatever goes wrong leaves as StoreUnavailable, and its text
never holds an address or a password. Knows scripts by name, not what they mean. Retries of a broken
connection are safe because every script gives the same answer when it is run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.settings import StoreSettings

MAX_CONNECTIONS = 32
SOCKET_TIMEOUT_S = 10.0
"""Longer than a slow fsync or a large script, shorter than a client's patience."""


@contextmanager
def translated() -> Iterator[None]:
    """Turn what redis raises into StoreUnavailable; serves as a decorator too."""
    try:
        yield
    except redis.ResponseError as error:
        raise StoreUnavailable(f"the store refused a command ({error}); an operator must look") from error
    except redis.RedisError as error:
        raise StoreUnavailable(f"the store does not answer ({type(error).__name__}); try again") from error


class Store:
    """A process's one way to the store. Threads may share it."""

    translated = staticmethod(translated)

    def __init__(self, client: redis.Redis, settings: StoreSettings) -> None:
        # Any: the client's types can't tell that nothing is decoded here, so that every answer is bytes.
        self.redis: Any = client
        self.settings = settings
        self._scripts: dict[str, Callable[..., Any]] = {}

    @classmethod
    def connect(cls, settings: StoreSettings) -> Store:
        """Build the pool; nothing is sent yet."""
        options: dict[str, Any] = {
            "socket_timeout": SOCKET_TIMEOUT_S,
            "health_check_interval": 30,
            # A connection that broke is tried anew; a store that hangs is reported after one timeout.
            "retry": Retry(ExponentialWithJitterBackoff(base=0.05, cap=0.5), 3, (redis.ConnectionError,)),
            # A client's text may hold half a surrogate pair; it is never worth an exception down here.
            "encoding_errors": "replace",
        }
        if not settings.redis_url.startswith("unix://"):
            options |= {"socket_connect_timeout": 5.0, "socket_keepalive": True}
        pool = redis.BlockingConnectionPool.from_url(
            settings.redis_url, max_connections=MAX_CONNECTIONS, timeout=SOCKET_TIMEOUT_S, **options
        )
        return cls(redis.Redis(connection_pool=pool), settings)

    def script(self, name: str) -> Callable[..., Any]:
        """Return `tasks/<name>.lua` as a function of its ARGV."""
        if name not in self._scripts:
            registered = self.redis.register_script(_source("keys") + _source("steps") + _source(name))

            @translated()
            def call(*args: str | bytes | int | float) -> Any:
                return registered(args=args)

            self._scripts[name] = call
        return self._scripts[name]

    @translated()
    def now(self) -> float:
        """Return the store's clock (unix seconds): the one that all workers share."""
        seconds, microseconds = self.redis.time()
        return float(seconds) + microseconds / 1e6

    def ready(self) -> bool:
        """Tell whether the store answers."""
        try:
            return bool(self.redis.ping())
        except redis.RedisError:
            return False

    def close(self) -> None:
        """Drop the connections."""
        self.redis.close()
        self.redis.connection_pool.disconnect()


@cache
def _source(name: str) -> str:
    return resources.files("openrl.tasks").joinpath(f"{name}.lua").read_text(encoding="ascii")
