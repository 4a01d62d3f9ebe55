"""The store: one Redis or Valkey, reached through one bounded pool a process.

The only home of redis' exceptions: a store that can't serve now leaves as StoreUnavailable, a command that
it could not carry out as StoreFault, and neither text holds an address, a password or the store's own words.
Knows scripts by name, not what they mean. Retries of a broken connection are safe because every script gives
the same answer when it is run twice.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import resources
from typing import Any

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from openrl.tasks import disk
from openrl.tasks.errors import OpenRLError, StoreFault, StoreUnavailable
from openrl.tasks.settings import StoreSettings
from openrl.tasks.together import Together

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
SOCKET_TIMEOUT_S = 10.0
"""Longer than a slow fsync or a large script, shorter than a client's patience."""

_WRITE_BYTES = 6000
"""Arguments up to this size are sent in one piece with their neighbours."""

ADMITTING = frozenset({"append", "sample_append", "session_create", "sampler_create", "copy"})
"""The scripts that take something in. A full store or disk refuses these alone: what it holds can still be finished."""

_PASSING = {
    "OOM": "is full (maxmemory)",
    "MISCONF": "can't write to its disk",
    "LOADING": "is loading its data",
    "READONLY": "is read-only",
    "BUSY": "is busy with a long script",
}
"""What a store says that can't serve now, by the first word of its answer."""
_FIRST_WORD = re.compile(rf"(?:^|: )({'|'.join(_PASSING)})\b")
"""A pipeline puts the command before the answer."""


@contextmanager
def translated() -> Iterator[None]:
    """Turn what redis raises into an error of ours; serves as a decorator too.

    Raises:
        StoreUnavailable: the store doesn't answer, or says that it can't serve now.
        StoreFault: the command itself went wrong, and would again.
    """
    try:
        yield
    except redis.ResponseError as error:
        raise _refused(error) from error
    except redis.RedisError as error:
        raise StoreUnavailable(f"the store does not answer ({type(error).__name__}); try again") from error


def _refused(error: redis.ResponseError) -> OpenRLError:
    """Tell a store that can't serve now from a command that it can't carry out."""
    known = {redis.exceptions.OutOfMemoryError: "OOM", redis.exceptions.ReadOnlyError: "READONLY"}
    found = _FIRST_WORD.search(str(error))
    word = known.get(type(error)) or (found[1] if found else "")
    if word:
        return StoreUnavailable(f"the store {_PASSING[word]}; try again, an operator must look if it lasts")
    error_id = secrets.token_hex(4)
    log.error("error %s: the store refused a command: %s", error_id, error)
    return StoreFault(f"the store could not carry out a command (error id {error_id}); an operator finds it in the log")


class Store:
    """A process's one way to the store. Threads may share it."""

    translated = staticmethod(translated)

    def __init__(self, client: redis.Redis, settings: StoreSettings) -> None:
        # Any: the client's types can't tell that nothing is decoded here, so that every answer is bytes.
        self.redis: Any = client
        self.settings = settings
        self.together = Together(client)
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
        # hiredis reads answers for us; it can't write a text that holds half a pair.
        pool.connection_kwargs["command_packer"] = PythonRespSerializer(_WRITE_BYTES, pool.get_encoder().encode)
        return cls(redis.Redis(connection_pool=pool), settings)

    def script(self, name: str) -> Callable[..., Any]:
        """Return `tasks/<name>.lua` as a function of its ARGV."""
        if name not in self._scripts:
            flags = "" if name in ADMITTING else " flags=allow-oom"
            registered = self.redis.register_script(
                f"#!lua{flags}\n" + _source("keys") + _source("steps") + _source(name)
            )

            @translated()
            def call(*args: str | bytes | int | float) -> Any:
                if name in ADMITTING:
                    self.check_room()
                return registered(args=args)

            self._scripts[name] = call
        return self._scripts[name]

    @translated()
    def now(self) -> float:
        """Return the store's clock (unix seconds): the one that all workers share."""
        seconds, microseconds = self.redis.time()
        return float(seconds) + microseconds / 1e6

    def check_room(self) -> None:
        """Refuse to take more in while the disk of the data directory has no room for it.

        Raises:
            StoreUnavailable: it says what is wrong with the disk; nothing was changed.
        """
        disk.check_room(self.settings.data_dir, self.settings.disk_reserve_bytes)

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
