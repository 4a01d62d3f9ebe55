"""The store: one Redis or Valkey, reached through one bounded pool a process.

The only home of redis' exceptions: a store that can't serve now leaves as StoreUnavailable, a command that
it could not carry out as StoreFault, and neither text holds an address, a password or the store's own words.
Knows scripts by name, not what they mean. Retries of a broken connection are safe because every script gives
the same answer when it is run twice.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
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
from openrl.tasks.pool import Pool
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
    "NOSCRIPT": "was started anew in the midst of a call",
}
"""What a store says that can't serve now, by the first word of its answer."""
_FIRST_WORD = re.compile(rf"(?:^|: )({'|'.join(_PASSING)})\b")
"""A pipeline puts the command before the answer."""


Argument = str | bytes | int | float


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
    known = {
        redis.exceptions.OutOfMemoryError: "OOM",
        redis.exceptions.ReadOnlyError: "READONLY",
        redis.exceptions.NoScriptError: "NOSCRIPT",  # a script is sent where it lacks, then called: gone again
    }
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
        pool = Pool.from_url(settings.redis_url, max_connections=MAX_CONNECTIONS, timeout=SOCKET_TIMEOUT_S, **options)
        # hiredis reads answers for us; it can't write a text that holds half a pair.
        pool.connection_kwargs["command_packer"] = PythonRespSerializer(_WRITE_BYTES, pool.get_encoder().encode)
        return cls(redis.Redis(connection_pool=pool), settings)

    def script(self, name: str) -> Callable[..., Any]:
        """Return `tasks/<name>.lua` as a function of its ARGV."""
        if name not in self._scripts:
            registered = self.redis.register_script(_whole(name))

            @translated()
            def call(*args: Argument) -> Any:
                if name in ADMITTING:
                    self.check_room()
                try:  # without redis-py's own wrapping, which takes a quarter of a script's time here
                    return self.redis.execute_command("EVALSHA", _digest(name), 0, *args)
                except redis.exceptions.NoScriptError:
                    return registered(args=args)

            self._scripts[name] = call
        return self._scripts[name]

    def scripts(self, calls: Sequence[tuple[str, Sequence[Argument]]]) -> list[Any]:
        """Run several scripts, each by name and ARGV, in one trip and in order; none of those that take something in.

        In the place of an answer is the error that its script ended in; the others are not undone by it. From the first
        script that the store doesn't know, all are run once more: each gives the same answer when it is run twice, and
        none must come before one that it follows.
        """
        if len(calls) < 2:
            return [self._answer(*call) for call in calls]
        try:
            with translated(), self.redis.pipeline(transaction=False) as pipe:
                for name, args in calls:
                    pipe.execute_command("EVALSHA", _digest(name), 0, *args)
                answers = pipe.execute(raise_on_error=False)
        except OpenRLError as error:
            return [error] * len(calls)
        unknown = [isinstance(answer, redis.exceptions.NoScriptError) for answer in answers]
        done = unknown.index(True) if any(unknown) else len(calls)
        return [*map(_or_error, answers[:done]), *(self._answer(*call) for call in calls[done:])]

    def _answer(self, name: str, args: Sequence[Argument]) -> Any:
        try:
            return self.script(name)(*args)
        except OpenRLError as error:
            return error

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


def _or_error(answer: Any) -> Any:
    """Return the answer of one command of a pipeline, an error as one of ours."""
    return _refused(answer) if isinstance(answer, redis.ResponseError) else answer


@cache
def _whole(name: str) -> str:
    flags = "" if name in ADMITTING else " flags=allow-oom"
    return f"#!lua{flags}\n" + _source("keys") + _source("steps") + _source(name)


@cache
def _digest(name: str) -> str:
    """Return what the store knows a script by."""
    return hashlib.sha1(_whole(name).encode(), usedforsecurity=False).hexdigest()


@cache
def _source(name: str) -> str:
    return resources.files("openrl.tasks").joinpath(f"{name}.lua").read_text(encoding="ascii")
