"""The doorbell: one Celery task per operation, ids only, and the patience of the one who answers it.

`ring` is the sender's side, `Waiter` the worker's. Neither decides anything: an operation runs because
the journal holds it. So a ring that fails is not an error, and a wait may end early for any good reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from openrl.tasks import keys
from openrl.tasks.celery import celery, letter, notice_queue, queue_name
from openrl.tasks.endings import Endings
from openrl.tasks.errors import OperationFailed, StoreUnavailable
from openrl.tasks.futures import FAILED, PENDING
from openrl.tasks.queues import note_pool
from openrl.tasks.samples import MAX_ERROR_CHARS
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""A doorbell gives its thread back after this long, whatever became of the operation."""

SILENT_S = 5.0
"""A broker that failed is left alone for so long."""

_PAUSES_S = 0.25, 2.0
"""Between two looks into the store: the first, and the longest."""
_FAR_BEHIND = 512
"""A doorbell this many operations behind its run's position isn't worth a thread."""


class Doorbell:
    """Rings workers for submitted operations. One per sending process; safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[str] = set()
        self._is_in_store = store.settings.broker_is_store
        self._silent_until = 0.0

    def letter(self, kind: str, slug: str, tenant: str, request_id: str) -> tuple[str, str] | None:
        """Return the task of one operation for the journal to post along with it; None: the broker is elsewhere.

        That is one trip and one write less than `ring`, which is told of it by `posted`.
        """
        if not self._is_in_store:
            return None
        family, worker = _of(kind)
        queue = queue_name(family, slug, tenant)
        return letter(f"{worker}.{kind}", (tenant, request_id), task_id=request_id, queue=queue)

    def ring(self, kind: str, slug: str, tenant: str, request_id: str, *, posted: bool = False) -> None:
        """Send the task of one operation. Never raises: the worker looks into the journal anyway.

        After a failure nobody rings for a while: a broker that doesn't answer would hold up each submission.
        """
        if time.monotonic() < self._silent_until:
            return
        family, worker = _of(kind)
        queue = queue_name(family, slug, tenant)
        try:
            if not posted:
                _send(f"{worker}.{kind}", (tenant, request_id), task_id=request_id, queue=queue)
            if queue not in self._known:
                self._announce(family, worker, slug, tenant)
                self._remember(family, slug, queue)
        except Exception as failure:  # whatever the broker's client raises, the operation is safe in the journal
            self._silent_until = time.monotonic() + SILENT_S
            log.warning("no doorbell for %s, nor for others soon: %s", request_id, type(failure).__name__)

    def knows(self, kind: str, slug: str, tenant: str) -> bool:
        """Tell whether the workers were told of the queue, so that nothing is left to do for what was posted."""
        return queue_name(_of(kind)[0], slug, tenant) in self._known

    def _announce(self, family: str, worker: str, slug: str, tenant: str) -> None:
        """Make the workers of a base model consume a tenant's queue. Costs nothing when they already do."""
        with self._store.translated():
            note_pool(self._store, family, slug)
            is_new = self._store.redis.sadd(keys.queues(family, slug), tenant)
        if is_new:
            celery.control.broadcast("refresh_queues")
            # Ends the read in flight, which doesn't know the new queue: 13 ms in place of a second.
            celery.send_task(f"{worker}.notice", queue=notice_queue(family, slug), ignore_result=True, retry=False)

    def _remember(self, family: str, slug: str, queue: str) -> None:
        """Remember that a queue was announced; not a full run's, which goes again: each ring announces it."""
        if keys.is_full(slug):
            for name in (queue, notice_queue(family, slug)):
                celery.amqp.queues.pop(name, None)
        else:
            self._known.add(queue)


def _of(kind: str) -> tuple[str, str]:
    """Return the family of queues and the worker of an operation."""
    return ("sample", "sampler") if kind == "sample" else ("train", "trainer")


def _send(name: str, args: tuple[str, ...], *, task_id: str, queue: str) -> None:
    """Send a task without Celery's handle for its result, which costs as much again and which nobody reads."""
    message = celery.amqp.as_task_v2(task_id, name, args, ignore_result=True)
    with celery.producer_pool.acquire(block=True) as producer:
        celery.amqp.send_task_message(producer, name, message, queue=queue, retry=False)


class Waiter:
    """Waits in a worker's thread for an operation, as long as that costs nobody anything.

    What this process ends it is told by the engine; what else ends an operation it learns from the store, which it
    asks ever more seldom.
    """

    def __init__(self, store: Store, *, worker_id: Callable[[], str]) -> None:
        self._store = store
        self._worker_id = worker_id
        self._endings = Endings()
        self._leaving = threading.Event()

    def ended(self, tenant: str, request_id: str, error: str) -> None:
        """Hear from the engine how an operation ended; `error` "" is success."""
        self._endings.note(tenant, request_id, error[:MAX_ERROR_CHARS])

    def wait_for(self, tenant: str, request_id: str, *, is_next: bool = False) -> None:
        """Wait for the operation's end, at most a minute; return at once behind a gap or at shutdown.

        `is_next`: this process has seen that it can be executed.

        Raises:
            OperationFailed: it ended in a failure, whose text this carries.
        """
        try:
            error = self._wait(tenant, request_id, is_next)
        except StoreUnavailable as reason:
            log.info("doorbell for %s: %s", request_id, reason)
            return
        if error:
            raise OperationFailed(error)

    def release(self) -> None:
        """Let every wait return, now and from now on."""
        self._leaving.set()
        self._endings.release()

    def _wait(self, tenant: str, request_id: str, is_next: bool) -> str | None:
        """Return why the operation failed: "" if it didn't, None if it hasn't ended."""
        deadline, pause_s = time.monotonic() + WAIT_S, _PAUSES_S[0]
        with self._endings.watch(tenant, request_id) as ending:
            error = ending.error
            if error is None and not is_next:
                error = self._recorded(tenant, request_id)
                if error is None and not self._worth_waiting(tenant, request_id):
                    return None
            while error is None and not self._leaving.is_set() and time.monotonic() < deadline:
                error = ending.wait(pause_s)
                if error is None:
                    error, pause_s = self._recorded(tenant, request_id), min(2 * pause_s, _PAUSES_S[1])
        return error

    def _recorded(self, tenant: str, request_id: str) -> str | None:
        """Return how the operation ended by the store, which counts one that it doesn't know as done."""
        with self._store.translated():
            state, error = self._store.redis.hmget(keys.future(tenant, request_id), "state", "error")
        if state == PENDING.encode():
            return None
        return (error or b"failed").decode() if state == FAILED.encode() else ""

    def _worth_waiting(self, tenant: str, request_id: str) -> bool:
        """Tell whether this process will run the operation soon; wake the one that owns its run if not."""
        run_id, _, seq = request_id.rpartition(":")
        if ":train:" not in run_id:
            return True
        with self._store.translated():
            owner, applied = self._store.redis.hmget(keys.run(tenant, run_id), "owner", "applied")
            if owner and owner.decode() != self._worker_id():
                self._store.redis.publish(keys.wake(owner.decode()), b"")
            before = range(int(applied or -1) + 1, int(seq))
            if len(before) > _FAR_BEHIND:
                return False
            return not before or all(self._store.redis.hmget(keys.journal(tenant, run_id), [str(n) for n in before]))
