"""Whether a worker's place is still its own: what the scheduler says of places, and what a worker asks.

On Kubernetes a pod may start late, after its place has been given to another. The scheduler writes each place's id here
before the pod is made, and its end, for good, before the place is given on. A worker touches no accelerator before it
has read that its place is current, and leaves when it reads that it has ended. Knows no Kubernetes.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from openrl.tasks import keys
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)

VARIABLE = "OPENRL_ASSIGNMENT_ID"
KEEP_S = 7 * 24 * 3600
"""How long the end of a place, and of a pod, is remembered: longer than a pod takes to start or a turn to be swept."""
ASK_S = 2.0
"""Between two questions of a worker."""
ALIVE = "OPENRL_ALIVE_FILE"
"""Names a file that a worker with a place touches about each ASK_S, store or not; a probe looks at it."""
PATIENCE_S = 120.0
"""A worker that isn't told of its place for so long leaves, and is started again."""


def keep(store: Store, environ: Mapping[str, str]) -> bool:
    """Wait until this process's place is its own, and let the process leave (SIGTERM) once it no longer is.

    Returns False where the place has ended, or nobody says that it is current: the process must end without touching
    the accelerator. Where no place was given, as on one machine, there is nothing to wait for.
    """
    place = Assignment.of(store, environ)
    if place is None:
        return True
    if not place.wait():
        log.warning("the place %s is not this worker's: it ends, and the scheduler starts another", place.assignment)
        return False
    place.watch(lambda: os.kill(os.getpid(), signal.SIGTERM))
    return True


class Assignments:
    """The scheduler's side: places that are current, and those that have ended; pods whose containers have ended."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def begin(self, ids: Iterable[str]) -> None:
        """Say that these places are current, each unless it has ended."""
        with translated(), self._store.redis.pipeline(transaction=False) as pipe:
            for each in ids:
                pipe.set(keys.assignment(each), "current", nx=True)
            pipe.execute()

    def end(self, assignment: str) -> None:
        """Say that a place has ended. It never becomes current again."""
        with translated():
            self._store.redis.set(keys.assignment(assignment), "ended", ex=KEEP_S)

    def note_pod_ended(self, uid: str) -> None:
        """Say that it is proved that no container of a pod runs."""
        with translated():
            self._store.redis.set(keys.pod_ended(uid), "1", ex=KEEP_S)

    def has_pod_ended(self, uid: str) -> bool:
        """Tell whether that was said."""
        with translated():
            return bool(uid) and bool(self._store.redis.exists(keys.pod_ended(uid)))


class Assignment:
    """A worker's side: its own place."""

    def __init__(self, store: Store, assignment: str, *, alive: str = "") -> None:
        self._store = store
        self.assignment = assignment
        self._alive = alive

    @classmethod
    def of(cls, store: Store, environ: Mapping[str, str]) -> Assignment | None:
        """Return this process's place; None where none was given, as on one machine."""
        return cls(store, environ[VARIABLE], alive=environ.get(ALIVE, "")) if environ.get(VARIABLE) else None

    def state(self) -> str:
        """Return `current`, `ended`, or "" where nothing was said yet."""
        with translated():
            said = self._store.redis.get(keys.assignment(self.assignment))
        return said.decode() if isinstance(said, bytes) else ""

    def wait(self, *, patience_s: float = PATIENCE_S, sleep: Callable[[float], None] = time.sleep) -> bool:
        """Wait until the place is current, and tell whether it is: not if it has ended, or nobody says so."""
        waited_s = 0.0
        while (state := self._ask()) != "current":
            if state == "ended" or waited_s >= patience_s:
                return False
            sleep(ASK_S)
            waited_s += ASK_S
        return True

    def watch(self, leave: Callable[[], None]) -> threading.Event:
        """Call `leave` from a thread of its own once the place has ended; set the event to stop looking."""
        stopped = threading.Event()

        def look() -> None:
            while not stopped.wait(ASK_S):
                if self._ask() == "ended":
                    log.warning("the place %s is another's now: leaving", self.assignment)
                    leave()
                    return

        threading.Thread(target=look, name="assignment", daemon=True).start()
        return stopped

    def _ask(self) -> str:
        if self._alive:
            with suppress(OSError):  # a probe must not end what it looks at
                Path(self._alive).touch()
        try:
            return self.state()
        except StoreUnavailable:
            return ""
