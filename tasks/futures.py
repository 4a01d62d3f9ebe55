"""Promises: how an operation ended, who waits for it, how long it is kept.

A promise is readable from the moment of its submission; it is written once by the journal's scripts.
Waiting is in memory: one subscriber thread a process wakes whoever watches. A wake-up means "read again", or brings
a short result along; a lost message costs a poll and never a result.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import redis

from openrl.tasks import keys
from openrl.tasks.errors import Gone, NotFound, OtherVersion
from openrl.tasks.schema import FUTURE
from openrl.tasks.spool import Apart, Spool, here
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)

PENDING = "pending"
DONE = "done"
FAILED = "failed"

_SWEEP_AT_ONCE = 1000
_SWEEP_MARGIN_S = 60.0
_RECONNECT_S = (0.1, 2.0)
_LISTEN_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Future:
    """A promise as it stands. `error` and `category` (user or server) say why it failed. Times in unix seconds."""

    tenant: str
    request_id: str
    state: str
    kind: str
    content_type: str
    result: bytes
    error: str
    category: str
    model_id: str
    submitted: float
    finished: float


class Futures:
    """Reads promises; one per process, safe to share between threads."""

    def __init__(self, store: Store, *, apart: Apart = here) -> None:
        self._store = store
        self._spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes, apart=apart)

    @translated()
    def get(self, tenant: str, request_id: str) -> Future:
        """Return a promise of this tenant.

        Raises:
            NotFound: nothing was ever promised under this id, to this tenant.
            Gone: it was kept and its result is no longer there.
            OtherVersion: a newer version kept it.
        """
        parts = keys.parse_request(request_id)
        row = self._row(tenant, request_id)
        if "state" not in row:
            if not self._existed(tenant, parts):
                raise NotFound(f"no future {request_id!r}")
            row = self._row(tenant, request_id)  # it may have been promised since the first look
            if "state" not in row:
                raise _gone(request_id)
        FUTURE.check(row.get("schema"))
        try:
            result = self._spool.load(row.get("result", b""))
        except FileNotFoundError as lost:
            raise _gone(request_id) from lost
        text = {name: value.decode() for name, value in row.items() if name != "result"}
        return _future(tenant, request_id, text, result)

    def deliver(self, tenant: str, request_id: str) -> None:
        """Note that the client was given the result; it is kept a while longer for a second try."""
        self.deliver_all([(tenant, request_id)])

    def deliver_all(self, given: Iterable[tuple[str, str]]) -> None:
        """Do so for several results at once, each named by tenant and request id."""
        self._store.script("deliver")(self._store.settings.result_ttl_s, *(part for pair in given for part in pair))

    @translated()
    def sweep(self) -> int:
        """Delete the files of expired results; called now and then by the beat. Returns how many."""
        swept = 0
        before = self._store.now() - _SWEEP_MARGIN_S
        while due := self._store.redis.zrange(keys.FILES, "-inf", before, byscore=True, offset=0, num=_SWEEP_AT_ONCE):
            for stowed in due:
                self._spool.discard(stowed)
            swept += self._store.script("swept")(*due)
        return swept

    def _row(self, tenant: str, request_id: str) -> dict[str, bytes]:
        """Return what is kept of a promise; nothing where it isn't."""
        [found] = self._store.together.ask(("HGETALL", keys.future(tenant, request_id)))
        return {name.decode(): value for name, value in found.items()}

    def _existed(self, tenant: str, parts: keys.RequestParts) -> bool:
        """Tell an id that was promised from one that never was, the result gone or not."""
        # What was refused or cancelled has ended before its turn came: the journal has it, whatever was applied.
        kept = keys.journal if parts.is_run else keys.sampler_ops
        return bool(self._store.redis.hexists(kept(tenant, parts.parent), parts.seq))


def told(tenant: str, request_id: str, said: bytes) -> Future | None:
    """Return a promise as the store told of its end; None if it said nothing of it, or not so that it is understood.

    The script that ends it publishes no earlier than what it wrote is on disk.
    """
    head, _, result = said.partition(b"\n")
    try:
        text = json.loads(head)
        FUTURE.check(text["schema"])
        return _future(tenant, request_id, text, result)
    except (ValueError, KeyError, TypeError, OtherVersion):
        return None


def _future(tenant: str, request_id: str, text: Mapping[str, str], result: bytes) -> Future:
    return Future(
        tenant=tenant,
        request_id=request_id,
        state=text["state"],
        kind=text.get("kind", ""),
        content_type=text.get("content_type", ""),
        result=result,
        error=text.get("error", ""),
        category=text.get("category", ""),
        model_id=text.get("model_id", ""),
        submitted=float(text.get("submitted") or 0.0),
        finished=float(text.get("finished") or 0.0),
    )


def _gone(request_id: str) -> Gone:
    return Gone(f"the result of {request_id!r} is no longer kept; submit the operation anew")


class Watch(threading.Event):
    """An event that is clear again after each successful `wait`, so that a loop of read and wait doesn't spin."""

    said: bytes = b""
    """How the promise ended, for `told`; empty as long as that isn't known here."""

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the promise may have changed; False after `timeout` seconds."""
        woken = super().wait(timeout)
        if woken:
            self.clear()
        return woken


class Completions:
    """Wakes those who wait for promises: one subscription a process, whatever their number.

    The thread starts with the first watcher (so not before a server forks) and reconnects by itself;
    after each subscription everybody is woken, since a message may have passed in between.
    """

    def __init__(self, store: Store) -> None:
        self._redis = store.redis
        self._lock = threading.Lock()
        self._waiting: dict[bytes, set[Watch]] = defaultdict(set)
        self._wakes: dict[str, Callable[[], None]] = {}
        self._told: dict[str, Callable[[bytes], None]] = {}
        """Both by channel: nobody is woken for what concerns others."""
        self._is_watched = False
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._stopped = threading.Event()

    @contextmanager
    def watch(self, tenant: str, request_id: str, event: Watch | None = None) -> Iterator[Watch]:
        """Register for the body of the `with`: read the promise, wait, read again. `event` None: a new one."""
        with self._watch(f"{tenant} {request_id}", event or Watch()) as event:
            yield event

    @contextmanager
    def watch_clone(self, tenant: str, sampler_id: str, clone: int) -> Iterator[Watch]:
        """Do so for all samples of one clone of a sampling client."""
        with self._watch(keys.target(tenant, sampler_id, clone), Watch()) as event:
            yield event

    @contextmanager
    def _watch(self, watched: str, event: Watch) -> Iterator[Watch]:
        self._begin(watched.encode(), event)
        try:
            yield event
        finally:
            self._end(watched.encode(), event)

    def begin(self, tenant: str, request_id: str) -> Watch:
        """Watch a promise until `end`."""
        event = Watch()
        self._begin(f"{tenant} {request_id}".encode(), event)
        return event

    def end(self, tenant: str, request_id: str, event: Watch) -> None:
        """End what `begin` began."""
        self._end(f"{tenant} {request_id}".encode(), event)

    def _begin(self, name: bytes, event: Watch) -> None:
        with self._lock:
            self._waiting[name].add(event)
        self._is_watched = True
        try:
            self._ensure_thread()  # not before: its first subscription wakes those who wait by then
        except BaseException:
            self._end(name, event)
            raise

    def _end(self, name: bytes, event: Watch) -> None:
        with self._lock:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]

    def wait(self, tenant: str, request_id: str, timeout_s: float) -> bool:
        """Wait until the promise may have changed; False after `timeout_s`. What changed before isn't noticed."""
        with self.watch(tenant, request_id) as event:
            return event.wait(timeout_s)

    def call_on_wake(self, worker_id: str, wake: Callable[[], None]) -> None:
        """Call `wake` whenever something was submitted for `worker_id`. It must return at once."""
        with self._lock:
            self._wakes[keys.wake(worker_id)] = wake
        self._ensure_thread()

    def call_with(self, name: str, tell: Callable[[bytes], None]) -> None:
        """Call `tell` with what is said to `name`, in place of what `call_on_wake` names. It must return at once."""
        with self._lock:
            self._told[keys.wake(name)] = tell
        self._ensure_thread()

    def close(self) -> None:
        """End the subscription."""
        self._stopped.set()
        if self._thread is not None:
            with suppress(redis.RedisError):
                self._redis.publish(self._channels()[0], b"")  # ends the read in flight, which would last a second
            self._thread.join(5.0)

    def _ensure_thread(self) -> None:
        # Outside of the lock: on gevent the question gives others their turn, and they would all wait for the lock.
        thread, pid = self._thread, os.getpid()
        if thread is not None and self._pid == pid and thread.is_alive():
            return
        with self._lock:
            if self._thread is thread:
                started = threading.Thread(target=self._listen, name="completions", daemon=True)
                started.start()
                self._thread, self._pid = started, pid

    def _channels(self) -> list[str]:
        """Return what has to be heard. A worker whose engine ends everything itself isn't told of each end."""
        with self._lock:
            return [*([keys.DONE] if self._is_watched else []), *self._wakes, *self._told]

    def _listen(self) -> None:
        delay_s, longest_s = _RECONNECT_S
        while not self._stopped.is_set():
            try:
                with self._redis.pubsub() as subscription:
                    heard: set[str] = set()
                    while not self._stopped.is_set():
                        if new := [channel for channel in self._channels() if channel not in heard]:
                            subscription.subscribe(*new)
                            heard.update(new)
                        delay_s = _RECONNECT_S[0]
                        self._hear(subscription.get_message(timeout=_LISTEN_S))
                continue
            except (redis.RedisError, OSError) as error:
                log.warning("completions: the store does not answer (%s); trying again", type(error).__name__)
            except Exception:  # whatever a message or a wake-up does, those who wait must not wait for ever
                log.exception("completions: the subscription failed; trying again")
            self._stopped.wait(delay_s)
            delay_s = min(2 * delay_s, longest_s)

    def _hear(self, message: dict | None) -> None:
        if message is None:
            return
        channel, begins = message["channel"].decode(), message["type"] == "subscribe"
        wake, tell = self._wakes.get(channel), self._told.get(channel)
        with self._lock:
            events: list[Watch] = []
            if channel == keys.DONE and begins:
                events = [event for group in self._waiting.values() for event in group]
            elif channel == keys.DONE:
                events = self._ended(message["data"])
        for event in events:
            event.set()
        if tell is not None and not begins:
            tell(message["data"])
        elif wake is not None:
            wake()

    def _ended(self, data: bytes) -> list[Watch]:
        """Return who waits for what has ended, those told how it did who wait for it by name."""
        name, _, said = data.partition(b"\n")
        by_name = self._waiting.get(name, ())
        for event in by_name:
            event.said = said
        return [*by_name, *(event for target in _targets(name) for event in self._waiting.get(target, ()))]


def _targets(done: bytes) -> tuple[bytes, ...]:
    """Return whom a sample's end concerns beside those who wait for it by name."""
    if b":sample:" not in done:
        return ()
    tenant, _, request_id = done.decode().partition(" ")
    sampler_id, _, seq = request_id.rpartition(":")
    return (keys.target(tenant, sampler_id, keys.clone(seq)).encode(),)
