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
from openrl.tasks.celery import celery, notice_queue, queue_name
from openrl.tasks.errors import Gone, NotFound, OperationFailed, StoreUnavailable
from openrl.tasks.futures import Completions, Future, Futures
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

WAIT_S = 60.0
"""A doorbell gives its thread back after this long, whatever became of the operation."""

_SLICE_S = 0.25
_FAR_BEHIND = 512
"""A doorbell this many operations behind its run's position isn't worth a thread."""


class Doorbell:
    """Rings workers for submitted operations. One per sending process; safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: set[str] = set()

    def ring(self, kind: str, slug: str, tenant: str, request_id: str) -> None:
        """Send the task of one operation. Never raises: the worker looks into the journal anyway."""
        family, worker = ("sample", "sampler") if kind == "sample" else ("train", "trainer")
        queue = queue_name(family, slug, tenant)
        try:
            _send(f"{worker}.{kind}", (tenant, request_id), task_id=request_id, queue=queue)
            if queue not in self._known:
                self._announce(family, worker, slug, tenant)
                self._known.add(queue)
        except Exception as failure:  # whatever the broker's client raises, the operation is safe in the journal
            log.warning("no doorbell for %s: %s", request_id, type(failure).__name__)

    def _announce(self, family: str, worker: str, slug: str, tenant: str) -> None:
        """Make the workers of a base model consume a tenant's queue. Costs nothing when they already do."""
        with self._store.translated():
            is_new = self._store.redis.sadd(keys.queues(family, slug), tenant)
        if is_new:
            celery.control.broadcast("refresh_queues")
            # Ends the read in flight, which doesn't know the new queue: 13 ms in place of a second.
            celery.send_task(f"{worker}.notice", queue=notice_queue(family, slug), ignore_result=True, retry=False)


def _send(name: str, args: tuple[str, ...], *, task_id: str, queue: str) -> None:
    """Send a task without Celery's handle for its result, which costs as much again and which nobody reads."""
    message = celery.amqp.as_task_v2(task_id, name, args, ignore_result=True)
    with celery.producer_pool.acquire(block=True) as producer:
        celery.amqp.send_task_message(producer, name, message, queue=queue, retry=False)


class Waiter:
    """Waits in a worker's thread for an operation, as long as that costs nobody anything."""

    def __init__(self, store: Store, completions: Completions, *, worker_id: Callable[[], str]) -> None:
        self._store = store
        self._completions = completions
        self._futures = Futures(store)
        self._worker_id = worker_id
        self._leaving = threading.Event()

    def wait_for(self, tenant: str, request_id: str) -> None:
        """Wait for the operation's end, at most a minute; return at once behind a gap or at shutdown.

        Raises:
            OperationFailed: it ended in a failure, whose text this carries.
        """
        try:
            self._wait(tenant, request_id)
        except (NotFound, Gone, StoreUnavailable) as reason:
            log.info("doorbell for %s: %s", request_id, reason)

    def release(self) -> None:
        """Let every wait return, now and from now on."""
        self._leaving.set()

    def _wait(self, tenant: str, request_id: str) -> None:
        deadline = time.monotonic() + WAIT_S
        with self._completions.watch(tenant, request_id) as done:
            future = self._futures.get(tenant, request_id)
            if future.state == "pending" and not self._worth_waiting(tenant, request_id):
                return
            while future.state == "pending" and not self._leaving.is_set() and time.monotonic() < deadline:
                if done.wait(_SLICE_S):
                    future = self._futures.get(tenant, request_id)
        _raise_if_failed(future)

    def _worth_waiting(self, tenant: str, request_id: str) -> bool:
        """Tell whether this process will run the operation soon; wake the one that owns its run if not."""
        run_id, _, seq = request_id.rpartition(":")
        if ":train:" not in run_id:
            return True
        with self._store.translated():
            owner, applied = self._store.redis.hmget(keys.run(tenant, run_id), "owner", "applied")
            if owner and owner.decode() != self._worker_id():
                self._store.redis.publish(keys.WAKE, owner)
            before = range(int(applied or -1) + 1, int(seq))
            if len(before) > _FAR_BEHIND:
                return False
            return not before or all(self._store.redis.hmget(keys.journal(tenant, run_id), [str(n) for n in before]))


def _raise_if_failed(future: Future) -> None:
    if future.state == "failed":
        raise OperationFailed(future.error)
