"""Who serves a run: leases of workers, tokens that only grow, epochs of the store.

A lease says that a worker process lives; the journal's `take` binds a run to it under a token
(epoch * 2^32 + counter), and every commit is checked against the run's present token (Kleppmann 2016,
"How to do distributed locking"). So a worker that was stopped for a minute can't do harm when it wakes:
by then either nobody claimed its runs, or its token is stale.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from types import TracebackType
from typing import Literal, Self

from openrl.tasks import keys
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)

KINDS = ("trainer", "sampler")
STATES = ("starting", "ready", "busy", "stopping")

_JOIN_S = 2.0
"""Closing doesn't wait longer than this for a renewal that hangs; it can't undo the end of the lease."""


class Lease:
    """One worker process's proof of life, taken at once and renewed by its own thread until `close`.

    A lost lease stays lost: the process must end, or take a new one, which is a new `generation`.
    """

    def __init__(self, store: Store, worker_id: str, kind: str, slug: str) -> None:
        assert kind in KINDS, kind
        self.worker_id = worker_id
        self.kind = kind
        self.slug = slug
        self.generation = secrets.token_hex(8)
        self.held: dict[tuple[str, str], int] = {}
        """(tenant, run) -> token that `take` has told this process of. Kept by the journal."""
        self.call_number = 0
        """Number of the next `take_samples`. Kept by the journal."""
        self._script = store.script("lease")
        self._lease_s = store.settings.lease_s
        self._fields: dict[str, str | int | float] = {
            "kind": kind, "slug": slug, "state": "starting", "pid": os.getpid(), "last_busy": 0.0,
        }  # fmt: skip
        self._lost = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._renewed = time.monotonic()
        self._call("take")
        self._thread = threading.Thread(target=self._renew, name=f"lease-{worker_id}", daemon=True)
        self._thread.start()

    @property
    def identity(self) -> str:
        """Return the name of this very process, never used again."""
        return f"{self.worker_id}/{self.generation}"

    @property
    def lost(self) -> bool:
        """Tell whether others may by now have taken what this worker owned."""
        if not self._lost and not self._closed.is_set() and time.monotonic() - self._renewed > self._lease_s:
            self.mark_lost()
        return self._lost

    def mark_lost(self) -> None:
        """Note that the store no longer knows this lease."""
        if not self._lost:
            log.warning("worker %s lost its lease", self.worker_id)
        self._lost = True

    def set_state(self, state: str) -> None:
        """Say what the worker is doing.

        Others hear at once that it has started or is about to leave; ready and busy, which may alternate with
        each operation, travel with the next renewal.
        """
        assert state in STATES, state
        before, self._fields["state"] = self._fields["state"], state
        if before != state and {before, state} & {"starting", "stopping"}:
            self._try_to_renew()

    def touch_busy(self) -> None:
        """Note that the worker has just computed something; the store hears of it with the next renewal."""
        self._fields["last_busy"] = time.time()

    def close(self) -> None:
        """End the lease: what this worker owned is free at once. Closing twice is fine."""
        if self._closed.is_set():
            return
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)
        try:
            self._call("end")
        except StoreUnavailable as error:
            log.warning("worker %s leaves its lease to expire: %s", self.worker_id, error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _renew(self) -> None:
        while not self._closed.wait(self._lease_s / 4) and not self.lost:
            self._try_to_renew()

    def _try_to_renew(self) -> None:
        if self._closed.is_set():
            return
        try:
            self._call("renew")
        except StoreUnavailable as error:
            log.warning("worker %s could not renew its lease: %s", self.worker_id, error)

    def _call(self, verb: str) -> None:
        """Run the script; what counts as the time of a renewal is before it was sent."""
        with self._lock:
            sent = time.monotonic()
            fields = [part for pair in self._fields.items() for part in pair]
            held = self._script(verb, self.worker_id, self.generation, int(self._lease_s * 1000), *fields)
            if not held:
                self.mark_lost()
            else:
                self._renewed = sent


def new_epoch(store: Store, floor: int = 0) -> int:
    """Begin a new epoch, above the last one and at least `floor`; called once per start of the store.

    A floor kept outside the store makes tokens grow even over a store that came back empty.
    """
    return int(store.script("epoch")(floor))


@translated()
def epoch_of(store: Store) -> int:
    """Return the epoch that stands, 0 before the first."""
    return int(store.redis.get(keys.EPOCH) or 0)


@translated()
def owner(store: Store, tenant: str, run_id: str) -> str:
    """Return the id of the living worker that serves a run, or ""."""
    worker_id, generation = store.redis.hmget(keys.run(tenant, run_id), ["owner", "generation"])
    if not worker_id or store.redis.hget(keys.worker(worker_id.decode()), "generation") != generation:
        return ""
    return worker_id.decode()


@translated()
def presence(store: Store, kind: str, slug: str) -> Literal["up", "starting", ""]:
    """Tell whether a worker of this kind serves a base model, or at least is loading it; "" means neither."""
    ids = [member.decode() for member in store.redis.smembers(keys.WORKERS)]
    with store.redis.pipeline(transaction=False) as pipe:
        for worker_id in ids:
            pipe.hmget(keys.worker(worker_id), ["kind", "slug", "state"])
        rows = pipe.execute()
    states = {row[2] for row in rows if tuple(row[:2]) == (kind.encode(), slug.encode())}
    if states & {b"ready", b"busy"}:
        return "up"
    return "starting" if b"starting" in states else ""
