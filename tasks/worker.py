"""Serving: a Celery worker around an engine.

The engine runs operations in its own thread; the Celery worker's threads only ring for it and wait, so
that every operation shows by name, latency and failure in Flower and the `celery` CLI. Knows neither
torch nor what an engine does.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from celery import Task, bootsteps
from celery.signals import worker_shutting_down
from celery.worker.control import Panel
from kombu.message import Message
from kombu.messaging import Consumer

from openrl.tasks import keys, revoking, turn_events
from openrl.tasks.celery import celery, notice_queue, queue_name
from openrl.tasks.errors import OperationFailed, StoreUnavailable
from openrl.tasks.queues import note_pool
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

SWITCH_S = 0.0005
"""How long a thread keeps the interpreter when another wants it. The engine gives it up at each operation of torch,
and must not wait Python's 5 ms for it while a doorbell is looked at."""

EVENTS_S = 0.2
"""Events for Flower are sent together this often. One by one they cost the engine more than the doorbells do."""

PATIENCE_S = 0.2
"""How long a doorbell that has come waits for the engine to have nothing in hand: to look at it takes the interpreter
from the engine for a millisecond. Less than what `celery inspect` waits for an answer."""

QUEUE_CHECK_S = 5.0
"""How often a worker looks for queues of new tenants that no broadcast told it of."""


class Engine(Protocol):
    """What a worker serves: operations of one base model, run in the engine's own thread."""

    def start(self) -> None:
        """Begin to look for operations."""

    def wake(self) -> None:
        """Look now: something was submitted."""

    def rests(self, timeout_s: float) -> bool:
        """Wait until nothing is carried out; False after `timeout_s`."""

    def knows(self, tenant: str, request_id: str) -> bool:
        """Tell whether it has seen the operation already, so that it needn't look."""

    def wait_for(self, tenant: str, request_id: str) -> None:
        """Wait until the operation has taken effect, as long as that costs nobody anything.

        Raises:
            OperationFailed: it ended in a failure.
        """

    def release_waiters(self) -> None:
        """Let every `wait_for` return: the worker is about to leave."""

    def stop(self) -> None:
        """Finish what runs, hand everything back, and return within a bound."""


class EngineTask(Task):
    """A task that rings for the engine of its process, bound once by `serve`."""

    abstract = True
    throws = (OperationFailed,)
    engine: ClassVar[Engine]

    def ring(self, tenant: str, request_id: str) -> None:
        """Wake the engine and wait until the operation has taken effect."""
        if not self.engine.knows(tenant, request_id):
            self.engine.wake()
        self.engine.wait_for(tenant, request_id)


class TenantQueues:
    """The queues that this worker consumes: its base model's own, and one for each tenant."""

    def __init__(self, store: Store, *, family: str, slug: str) -> None:
        self._store = store
        self.family = family
        self.slug = slug

    def names(self) -> list[str]:
        """Return every queue to consume now."""
        note_pool(self._store, self.family, self.slug)
        with self._store.translated():
            tenants = sorted(
                member.decode() for member in self._store.redis.smembers(keys.queues(self.family, self.slug))
            )
        return [notice_queue(self.family, self.slug), *(queue_name(self.family, self.slug, name) for name in tenants)]

    def consume_new(self, consumer: Any) -> None:
        """Start consuming the queues that `consumer` doesn't know yet. Runs in the consumer's own thread."""
        try:
            wanted = self.names()
        except StoreUnavailable:
            return
        for name in wanted:
            if not consumer.task_consumer.consuming_from(name):
                consumer.add_task_queue(name)
                log.info("consuming %s", name)


_queues: TenantQueues | None = None


class _QueueCheck(bootsteps.StartStopStep):
    """Looks for new tenants' queues by itself: a broadcast may be lost, and a restart forgets it."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        if _queues is not None:
            consumer.timer.call_repeatedly(QUEUE_CHECK_S, _queues.consume_new, (consumer,))


class _EventsTogether(bootsteps.StartStopStep):
    """Sends the events of tasks in batches, in place of after each turn of Celery's loop; those of turns too."""

    requires = ("celery.worker.consumer.events:Events",)

    def start(self, consumer: Any) -> None:
        consumer.event_dispatcher.on_send_buffered = None
        consumer.timer.call_repeatedly(EVENTS_S, self.flush, (consumer,))

    def stop(self, consumer: Any) -> None:
        self.flush(consumer)

    def flush(self, consumer: Any) -> None:
        if consumer.event_dispatcher is not None:
            for name, fields in turn_events.take():
                consumer.event_dispatcher.send(name, **fields)
            consumer.event_dispatcher.flush()


class Patience:
    """Lets doorbells wait while their engine is at work, which is when it needs none; not all of a long pass."""

    def __init__(
        self, rests: Callable[[float], bool], *, most_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`rests` is `Engine.rests`."""
        self._rests, self._most_s, self._clock = rests, most_s, clock
        self._over_until = 0.0

    def wait(self) -> None:
        """Wait for the engine to rest, `most_s` at most; after a wait in vain all pass for as long."""
        if self._clock() >= self._over_until and not self._rests(self._most_s):
            self._over_until = self._clock() + self._most_s


class _Forgetful(Consumer):
    """Takes doorbells without the broker's book of deliveries: one that is lost with its worker does no harm."""

    no_ack = True
    patience: ClassVar[Patience]

    def _receive_callback(self, message: Message) -> Any:
        self.patience.wait()
        message.ack_log_error = _nothing_to_acknowledge  # type: ignore[method-assign]  # kombu calls it for every message
        return super()._receive_callback(message)


def _nothing_to_acknowledge(*_: object, **__: object) -> None:
    """Stand in for an acknowledgement: the message left the broker when it was read."""


@Panel.register(name="refresh_queues", type="control")
def refresh_queues(state: Any, **_: Any) -> dict[str, str]:
    """Look for new tenants' queues now (`celery -A openrl.tasks control refresh_queues`)."""
    if _queues is not None:
        _queues.consume_new(state.consumer)
    return {"ok": "queues looked up"}


def serve(engine: Engine, *, store: Store, family: str, slug: str, name: str) -> int:
    """Serve `engine` until SIGTERM or SIGINT, then let it stop. Returns the exit status.

    `family` is `train` or `sample`. Must run in the main thread: Celery installs its signal handlers.
    """
    global _queues
    _queues = TenantQueues(store, family=family, slug=slug)
    EngineTask.engine = engine
    revoking.listen(store)
    sys.setswitchinterval(SWITCH_S)
    for noisy in ("celery.worker.strategy", "celery.app.trace"):
        # One line when a task comes and one when it ends: Flower shows both, and the engines log what they do.
        logging.getLogger(noisy).setLevel(logging.WARNING)
    _Forgetful.patience = Patience(engine.rests)
    celery.amqp.Consumer = _Forgetful
    celery.steps["consumer"].update((_QueueCheck, _EventsTogether))

    # The receiver is kept by a name of this frame: Celery's signals hold their receivers weakly.
    def leave(**_: Any) -> None:
        threading.Thread(target=engine.release_waiters, name="release-waiters", daemon=True).start()

    worker_shutting_down.connect(leave)
    worker = celery.Worker(
        hostname=f"{name}@{socket.gethostname()}",
        pool="threads",
        concurrency=store.settings.doorbell_threads,
        queues=_queues.names(),
        loglevel=store.settings.log_level,
        without_gossip=True,
        without_mingle=True,
        task_events=True,
        quiet=True,
    )
    engine.start()
    try:
        worker.start()
    finally:
        engine.release_waiters()
        engine.stop()
    return int(worker.exitcode or 0)
