"""Tokens on their way to whoever waits for them, before the sample that they belong to has ended.

A sample may name a listener: the process that its client is connected to. Its sampler publishes each token there as it
is drawn. Nothing is stored, so a message may be lost, or come twice when the sample is drawn anew: each token tells its
place, and the sample's result says them all again. Publishing has a thread of its own, so that a slow store holds up
no step. Knows neither HTTP nor models.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import redis

from openrl.tasks import keys
from openrl.tasks.operations import SampleJob
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

MAX_QUEUED = 1 << 16
"""Tokens that wait to be published; while the store doesn't answer, later ones are left out."""

_LISTEN_S = 1.0
_RECONNECT_S = 0.5


class Draft(NamedTuple):
    """One drawn token: `position` within continuation `sequence`, and the likeliest in its place (ids, logprobs).

    `ended` is "stop" or "length" with the last token of a continuation, else empty.
    """

    sequence: int
    position: int
    token: int
    logprob: float
    top: Sequence[tuple[int, float]]
    ended: str


class Ear(Protocol):
    """Takes the tokens of one sample; must return at once."""

    def hear(self, drafts: Sequence[Draft]) -> None: ...


class Publisher:
    """Publishes what a sampler draws. Its thread starts with the first token that anybody waits for."""

    def __init__(self, store: Store) -> None:
        self._redis = store.redis
        self._queue: queue.Queue[tuple[str, str, Draft]] = queue.Queue(MAX_QUEUED)
        self._thread: threading.Thread | None = None

    def to_listener(self, job: SampleJob) -> Callable[[Draft], None]:
        """Return what sends a token of this sample on its way, without waiting."""
        channel, name = keys.drafts(job.message.listener), f"{job.tenant} {job.request_id}"

        def send(draft: Draft) -> None:
            with suppress(queue.Full):
                self._queue.put_nowait((channel, name, draft))

        if self._thread is None:
            self._thread = threading.Thread(target=self._publish_all, name="drafts", daemon=True)
            self._thread.start()
        return send

    def _publish_all(self) -> None:
        while True:
            waiting = [self._queue.get()]
            with suppress(queue.Empty):
                while len(waiting) < MAX_QUEUED:
                    waiting.append(self._queue.get_nowait())
            try:
                self._publish(waiting)
            except redis.RedisError as error:
                log.warning(
                    "%d tokens went unheard: the store does not answer (%s)", len(waiting), type(error).__name__
                )

    def _publish(self, waiting: Sequence[tuple[str, str, Draft]]) -> None:
        """Send one message for each sample, in one trip."""
        by_sample: dict[tuple[str, str], list[Draft]] = defaultdict(list)
        for channel, name, draft in waiting:
            by_sample[channel, name].append(draft)
        with self._redis.pipeline(transaction=False) as pipe:
            for (channel, name), drafts in by_sample.items():
                pipe.publish(channel, json.dumps([name, drafts]))
            pipe.execute()


class Listener:
    """Hears the tokens of the samples that name it, on one subscription, from the first that is waited for."""

    def __init__(self, store: Store) -> None:
        self.name = secrets.token_hex(8)
        """What a sample must name to be heard here."""
        self._redis = store.redis
        self._lock = threading.Lock()
        self._ears: dict[str, Ear] = {}
        self._thread: threading.Thread | None = None
        self._subscribed = threading.Event()
        self._stopped = threading.Event()

    @contextmanager
    def listen(self, tenant: str, request_id: str, ear: Ear) -> Iterator[None]:
        """Give `ear` the tokens of a sample during the body of the `with`; submit it there."""
        name = f"{tenant} {request_id}"
        with self._lock:
            self._ears[name] = ear
            if self._thread is None:
                self._thread = threading.Thread(target=self._listen, name="drafts", daemon=True)
                self._thread.start()
        # Tokens drawn before the subscription would come with the result: late, not lost.
        self._subscribed.wait(_LISTEN_S)
        try:
            yield
        finally:
            with self._lock:
                del self._ears[name]

    def close(self) -> None:
        """End the subscription."""
        self._stopped.set()
        if self._thread is not None:
            with suppress(redis.RedisError):
                self._redis.publish(keys.drafts(self.name), b"")  # ends the read in flight
            self._thread.join(5.0)

    def _listen(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._redis.pubsub() as subscription:
                    subscription.subscribe(keys.drafts(self.name))
                    while not self._stopped.is_set():
                        if message := subscription.get_message(timeout=_LISTEN_S):
                            self._hear(message)
            except (redis.RedisError, OSError) as error:
                log.warning("drafts: the store does not answer (%s); trying again", type(error).__name__)
            except Exception:  # whatever one message holds, the streams of all others must go on
                log.exception("drafts: the subscription failed; trying again")
            self._subscribed.clear()
            self._stopped.wait(_RECONNECT_S)

    def _hear(self, message: dict) -> None:
        if message["type"] == "subscribe":
            self._subscribed.set()
        elif message["data"]:
            name, drafts = json.loads(message["data"])
            with self._lock:
                ear = self._ears.get(name)
            if ear is not None:
                ear.hear([Draft(*draft) for draft in drafts])
