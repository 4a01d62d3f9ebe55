"""The beat's tasks: bring what runs in line with what is asked for, close gaps, sweep what is left over.

Each may be lost, doubled or run by two schedulers at once without harm: each looks at what is there now,
and the store's scripts refuse what somebody else has done meanwhile.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

from celery import Task

from openrl.scheduler import demand
from openrl.scheduler.clusters.errors import ClusterUnavailable
from openrl.scheduler.clusters.local import LocalCluster, device_bytes, devices
from openrl.scheduler.decide import decide
from openrl.scheduler.needs import Budget, Needs
from openrl.scheduler.resources import Cluster, Need, Pool, Seen, Snapshot
from openrl.scheduler.retention import retain
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.sweep import sweep, sweep_dropped
from openrl.tasks import queues
from openrl.tasks.assignment import Assignments
from openrl.tasks.boundaries import reach
from openrl.tasks.celery import CONTROL_QUEUE, celery
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.store import Store, translated
from openrl.tasks.usage import Usage
from openrl.timeslice.holder import Holder
from openrl.timeslice.turn import Turns

log = logging.getLogger(__name__)

BREAK_S = 30.0
"""After so long without a look at the store nobody can be blamed for not having renewed a lease."""

# A tick that waited longer than its interval has nothing to add to the next one.
SCHEDULE: dict[str, dict[str, Any]] = {
    "reconcile": {
        "task": "scheduler.reconcile",
        "schedule": 1.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 2},
    },
    "close-gaps": {
        "task": "scheduler.close_gaps",
        "schedule": 10.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 10},
    },
    "sweep-turns": {
        "task": "timeslice.sweep",
        "schedule": 2.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 2},
    },
    "sweep-results": {
        "task": "scheduler.sweep_results",
        "schedule": 300.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 300},
    },
    "sweep-queues": {
        "task": "scheduler.sweep_queues",
        "schedule": 300.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 300},
    },
    "meter-storage": {
        "task": "scheduler.meter_storage",
        "schedule": 300.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 300},
    },
    "sweep-checkpoints": {
        "task": "scheduler.sweep_checkpoints",
        "schedule": 300.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 300},
    },
    "sweep-orphans": {
        "task": "scheduler.sweep_orphans",
        "schedule": 3600.0,
        "options": {"queue": CONTROL_QUEUE, "expires": 3600},
    },
}


class Reconciler:
    """Observes, decides and applies on one store. `clock` returns seconds since the epoch."""

    def __init__(
        self,
        store: Store,
        settings: SchedulerSettings,
        *,
        cluster: Cluster | None = None,
        version: str = "",
        budget: Budget | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Work on `cluster`, None: this machine. Workers of another `version` are replaced, "": none is told.

        `budget`: what workers are sized for.
        """
        self._store = store
        self._policy = settings.policy(version=version)
        self._needs = Needs(budget or Budget(), settings.priorities)
        self._settings = settings
        self._clock = clock
        self._registry = Registry(store)
        self._journal = Journal(store)
        self._futures = Futures(store)
        chosen = devices()[: settings.accelerators] if cluster is None else ()
        self._local = LocalCluster(store, accelerators=settings.accelerators, device_bytes=device_bytes(chosen))
        self._cluster: Cluster = cluster or self._local
        self._assignments = Assignments(store)
        self._turns = Turns(store.redis)
        self._said = False
        self._watched_since = self._looked = float("-inf")

    def reconcile(self) -> None:
        """Start and stop what the demand of this moment calls for."""
        decision = decide(self.observe())
        if decision.actions:
            reach("scheduler.decided")
        changed = self._cluster.apply(decision.actions)
        for action in decision.actions:
            if action.name in changed:
                log.info("%s %s: %s", action.verb, action.name, action.reason)
        if changed:
            reach("scheduler.applied")
        if not self._said:
            for text in self._settings.priorities.unserved(model.name for model in self._registry.models()):
                log.warning(text)
            self._local.set_watched()
            self._said = True

    def observe(self) -> Snapshot:
        """Return what a decision may depend on, as it is now."""
        # Demand before workers: an operation that ends in between leaves an idle time of nearly nothing, never a stop.
        # Processes before signs: one that is replaced in between has given none.
        seen = self._cluster.observe()
        models = self._registry.models()
        standing = [workload.pool for workload in seen.workloads]
        asked, signs = demand.demand(self._journal, models, standing), demand.signs(self._store)
        self._note_look()
        return Snapshot(
            now=self._clock(),
            demand=asked,
            seen=seen,
            workers=demand.workers(self._store),
            signs=signs,
            watched_since=self._watched_since,
            lease_s=self._store.settings.lease_s,
            needs=self._sizes(seen, asked, models),
            policy=self._policy,
        )

    def _sizes(self, seen: Seen, asked: Iterable[Pool], models: Sequence[BaseModel]) -> dict[Pool, Need]:
        """Return what workers need, where that matters: the size of accelerators is known, or can be asked for."""
        if not seen.has_claims:
            return {}
        owners = demand.owners(self._journal, models)
        if not (seen.can_claim or any(claim.device_bytes for claim in seen.claims)):
            return self._needs.ranks(asked, owners)
        return self._needs.of(asked, models, owners)

    def _note_look(self) -> None:
        """Note that the store answers; after a long break, watching begins anew."""
        now = self._clock()
        if not 0 <= now - self._looked < BREAK_S:
            self._watched_since = now
        self._looked = now

    def close_gaps(self) -> None:
        """Let runs go on past operations that never arrived; keep promises to unload what its owner's end unloaded."""
        if closed := self._journal.close_gaps():
            log.info("closed %d gap(s): operations that never arrived", closed)
        for model in self._registry.models():
            for slug in (model.slug, *(pool.slug for pool in self._journal.pools(model.slug))):
                self._journal.unloaded(slug)

    def sweep_turns(self) -> None:
        """End the turns on accelerators whose holders are proved to be gone."""
        with translated():
            for accelerator in self._turns.accelerators():
                self._turns.sweep(accelerator, is_gone=self._is_gone)

    def _is_gone(self, holder: Holder) -> bool:
        """Tell whether a turn's holder is proved to be gone: by this machine, or by the API server for its pod."""
        return holder.is_gone() or self._assignments.has_pod_ended(holder.pod)

    def sweep_results(self) -> None:
        """Delete the files of results that have expired."""
        if swept := self._futures.sweep():
            log.info("deleted the files of %d expired results", swept)

    def sweep_queues(self) -> None:
        """Delete the queues of full runs' pools that were let go."""
        if forgotten := queues.forget_idle(self._store):
            log.info("deleted the queues of %d pools that have nothing to do", forgotten)

    def meter_storage(self) -> None:
        """Count what tenants have stored since the last time."""
        Usage(self._store).meter()

    def sweep_checkpoints(self) -> None:
        """Forget expired checkpoints and versions that are to be kept no longer; delete what nobody needs any more."""
        if expired := self._registry.expire():
            log.info("%d checkpoints have expired", expired)
        retain(self._store, self._settings)
        if swept := sweep_dropped(self._store):
            log.info("deleted %d directories whose rows were gone", swept)

    def sweep_orphans(self) -> None:
        """Delete what a crash or a deletion has left on disk."""
        if swept := sweep(self._store, age_s=self._settings.orphan_age_s):
            log.info("deleted %d files and directories that nothing named", swept)


class SchedulerTask(Task):
    """A task of the scheduler's own process; `reconciler` is bound by `__main__`.

    It sends no events: a row a second would bury the operations in Flower. What it does is in the log.
    """

    abstract = True
    send_events = False
    throws = (StoreUnavailable, ClusterUnavailable)
    reconciler: ClassVar[Reconciler]


@celery.task(bind=True, base=SchedulerTask, name="scheduler.reconcile")
def reconcile(self: SchedulerTask) -> None:
    """Start and stop workers. May be lost or doubled: the next tick sees the same or better."""
    self.reconciler.reconcile()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.close_gaps")
def close_gaps(self: SchedulerTask) -> None:
    """Close gaps that stand too long. May be lost or doubled: a gap closes once."""
    self.reconciler.close_gaps()


@celery.task(bind=True, base=SchedulerTask, name="timeslice.sweep")
def sweep_turns(self: SchedulerTask) -> None:
    """End turns whose holders are gone. May be lost or doubled: a turn ends once, by its token."""
    self.reconciler.sweep_turns()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.sweep_results")
def sweep_results(self: SchedulerTask) -> None:
    """Delete files of expired results. May be lost or doubled: the next tick deletes what is left."""
    self.reconciler.sweep_results()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.sweep_queues")
def sweep_queues(self: SchedulerTask) -> None:
    """Delete queues of pools that were let go. May be lost or doubled: the next tick deletes what is left."""
    self.reconciler.sweep_queues()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.meter_storage")
def meter_storage(self: SchedulerTask) -> None:
    """Measure stored bytes. May be lost or doubled: the next tick counts from where the last one ended."""
    self.reconciler.meter_storage()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.sweep_checkpoints")
def sweep_checkpoints(self: SchedulerTask) -> None:
    """Forget what has expired, delete what was dropped. May be lost or doubled: rows go before files, each once."""
    self.reconciler.sweep_checkpoints()


@celery.task(bind=True, base=SchedulerTask, name="scheduler.sweep_orphans")
def sweep_orphans(self: SchedulerTask) -> None:
    """Delete files that nothing names. May be lost or doubled: the next tick deletes what is left."""
    self.reconciler.sweep_orphans()
