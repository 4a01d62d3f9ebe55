"""The scheduler's process: a Celery worker on the queue `control`, with the beat in a thread.

`python -m openrl.scheduler`. Needs OPENRL_REDIS_URL and OPENRL_DATA_DIR. Two of them at once are harmless.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path

from celery.beat import Service

from openrl.scheduler import metrics, remembered
from openrl.scheduler.needs import Budget
from openrl.scheduler.noted import Noted
from openrl.scheduler.reconcile import SCHEDULE, Reconciler, SchedulerTask, reconcile
from openrl.scheduler.resources import Cluster
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.timetable import timetable
from openrl.tasks import revoking, upgrade
from openrl.tasks.celery import CONTROL_QUEUE, celery
from openrl.tasks.errors import OtherVersion
from openrl.tasks.process import die_with_parent
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

log = logging.getLogger(__name__)

DISTRIBUTION = "openrl-service"
"""What OpenRL is installed as."""

EVERY_TICK = ("celery.beat", "celery.worker.strategy", "celery.app.trace")
"""Loggers that would write three lines a second."""


class Beat(threading.Thread):
    """The beat. A process whose beat has failed must not linger: it ends, and its parent starts another."""

    def __init__(self, schedule_filename: str) -> None:
        super().__init__(name="beat", daemon=True)
        # No longer than a second between two looks, or a stop would wait for the next one.
        self._service = Service(celery, max_interval=1, schedule_filename=schedule_filename, remote_control=False)
        self._stopping = False
        self.failed = False

    def run(self) -> None:
        """Send the scheduled tasks until stopped."""
        try:
            self._service.start()
        finally:
            if not self._stopping:
                self.failed = True
                log.error("the beat has ended; leaving")
                os.kill(os.getpid(), signal.SIGTERM)

    def stop(self) -> None:
        """Stop sending; returns when the schedule is on disk."""
        self._stopping = True
        self._service.stop()
        self.join(timeout=3.0)


class Poke:
    """Has the scheduler look soon, however often it is called meanwhile."""

    def __init__(self, wait_s: float = 0.2) -> None:
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __call__(self) -> None:
        """Ask for a look; returns at once."""
        with self._lock:
            if self._timer is None:
                self._timer = threading.Timer(self._wait_s, self._send)
                self._timer.daemon = True
                self._timer.start()

    def _send(self) -> None:
        with self._lock:
            self._timer = None
        try:
            reconcile.apply_async(queue=CONTROL_QUEUE, expires=2, retry=False)
        except Exception as broken:  # whatever the broker's client raises, the beat looks anyway
            log.info("nobody was called to look, the beat will: %s", broken)


def _cluster(store: Store, settings: SchedulerSettings) -> tuple[Cluster | None, str]:
    """Return where workers run, None for this machine, and the version that they are to have: on it, our own.

    Raises:
        ValueError: a setting of the cluster makes no sense, or it isn't found.
    """
    if settings.cluster == "local":
        return None, metadata.version(DISTRIBUTION)
    # Only here, since its client alone takes half a second and 50 MB to import.
    from openrl.scheduler.clusters.kubernetes import connect

    return connect(store, os.environ, on_change=Poke())


def main() -> int:
    """Serve the queue `control` until SIGTERM or SIGINT. Returns the exit status, 2 where it refuses to start."""
    die_with_parent()
    try:
        environ = Noted(os.environ)
        settings, own = StoreSettings.from_env(), SchedulerSettings.from_env(environ)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.scheduler: {nonsense}\n")
        return 2
    store = Store.connect(settings)
    try:
        upgrade.check(store)
        cluster, version = _cluster(store, own)
        budget = Budget.from_env(environ)
        remembered.keep(store, environ.answered)
    except (OtherVersion, ValueError) as refused:
        sys.stderr.write(f"openrl.scheduler: {refused}\n")
        return 2
    SchedulerTask.reconciler = Reconciler(store, own, cluster=cluster, version=version, budget=budget)
    revoking.listen(store)
    # No results are kept, so nothing needs the cleanup that Celery would add to the schedule.
    celery.conf.update(beat_schedule=SCHEDULE, result_expires=None)
    for name in EVERY_TICK:
        logging.getLogger(name).setLevel(logging.WARNING)
    if own.metrics_port:
        metrics.serve(store, own.metrics_port)
    beat_dir = Path(own.beat_dir) if own.beat_dir else settings.data_dir / "scheduler"
    with timetable(beat_dir) as path:
        return _serve(Beat(str(path)), settings.log_level)


def _serve(beat: Beat, log_level: str) -> int:
    """Work on the queue `control` beside the beat; return the exit status."""
    worker = celery.Worker(
        hostname=f"scheduler@{socket.gethostname()}",
        pool="solo",
        queues=[CONTROL_QUEUE],
        loglevel=log_level,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
    )
    beat.start()
    try:
        worker.start()
    finally:
        beat.stop()
    return 1 if beat.failed else int(worker.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main())
