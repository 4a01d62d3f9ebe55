"""The runs that a worker holds: rebuilt when one is needed, saved when that is due, handed back when it may go.

A run is in memory here, or whole in journal and snapshot: what is dropped comes back with the same bits. Knows
neither passes nor outcomes; what a run is asked to do, and what is told of it, is the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from openrl.tasks.errors import OpenRLError, StoreUnavailable
from openrl.tasks.journal import Journal, Slice
from openrl.tasks.ownership import Lease
from openrl.timeslice.errors import NotGranted
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.residents import Key, Residents
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.snapshots import Snapshots

log = logging.getLogger(__name__)

VANISHED_POLLS = 8
"""Looks between two questions whether clients have vanished: their grace is minutes."""


class Holdings:
    """The runs of one base model here. Its methods are for one thread, the engine's, but `knows`."""

    def __init__(
        self,
        *,
        slug: str,
        journal: Journal,
        recovery: Recovery,
        snapshots: Snapshots,
        settings: TrainerSettings,
        accelerator: Accelerator,
    ) -> None:
        self._slug = slug
        self._journal = journal
        self._recovery = recovery
        self._snapshots = snapshots
        self._settings = settings
        self._accelerator = accelerator
        self.residents = Residents(settings)
        self._offered: dict[Key, int] = {}
        """The last operation that the journal has offered of each run that is resident here."""
        self._unload_at = self._vanished_at = 0.0

    def note_offered(self, slices: Sequence[Slice]) -> None:
        """Note what the journal has offered."""
        self._offered |= {(each.tenant, each.run_id): each.operations[-1].seq_id for each in slices}

    def knows(self, key: Key, seq_id: int) -> bool:
        """Tell whether the journal has already offered the operation here."""
        return seq_id <= self._offered.get(key, -1)

    def take_up(self, each: Slice) -> Run:
        """Return the run of a slice as the journal has it, rebuilt if need be.

        Raises:
            Exception: whatever makes that impossible now.
        """
        key = (each.tenant, each.run_id)
        run = self.residents.get(key)
        if run is not None and (run.token, run.applied) == (each.token, each.applied):
            return run
        if run is not None:
            log.warning("run %s is at %d here and at %d in the store", each.run_id, run.applied, each.applied)
            self.drop(key)
        self._snapshots.settle(key)  # one that was registered meanwhile would take away what is repeated
        began = time.monotonic()
        run = self._recovery.restore(each.tenant, each.run_id, token=each.token, applied=each.applied)
        self.residents.add(run, worked=time.monotonic() - began)
        return run

    def drop(self, key: Key) -> None:
        """Drop a run's device state."""
        self.residents.drop(key)
        self._offered.pop(key, None)

    def drop_all(self) -> None:
        """Drop every run."""
        self.residents.clear()
        self._offered.clear()

    # saving

    def save_if_due(self, run: Run, lease: Lease) -> None:
        """Have a recovery snapshot written beside, when enough has built up and no gradient is pending.

        That of a full run is written at once: a copy of it would take as much memory again.
        """
        if run.gradient is not None or not self.residents.snapshot_due(run):
            return
        if run.is_full:
            self.save(run, lease)
        elif self._snapshots.begin(run, lease):
            self.residents.note_saved(run)

    def save(self, run: Run, lease: Lease) -> bool:
        """Write a recovery snapshot. False: the disk refused or the run is another's; the journal still has all."""
        try:
            self._snapshots.write(run, lease)
        except StoreUnavailable:
            raise
        except (OpenRLError, OSError) as error:
            log.error("no recovery snapshot of run %s: %s", run.run_id, error)
            return False
        finally:
            if self.residents.holds(run):
                self.residents.note_saved(run)
        return True

    # letting go

    def hand_back_all(self, lease: Lease) -> None:
        """Write out and release every run, as many as the time for stopping allows."""
        deadline = time.monotonic() + self._settings.stop_s
        for run in self.residents:
            if time.monotonic() > deadline:
                log.warning("no time to hand back %d runs; takeover rebuilds them", len(self.residents))
                break
            self._hand_back(run, lease)

    def let_go(self, waiting: set[Key], lease: Lease) -> None:
        """Hand back the runs that take up memory for nothing, except those that something waits for."""
        self._make_room(waiting, lease)
        self._unload(waiting, lease)
        self._leave_vanished(waiting, lease)

    def _hand_back(self, run: Run, lease: Lease) -> None:
        self._snapshots.settle(run.key)
        if not run.changed or self._save_in_turn(run, lease):
            self._journal.release(lease, run.tenant, run.run_id, run.token)
        self.drop(run.key)

    def _save_in_turn(self, run: Run, lease: Lease) -> bool:
        """Save a run that may be parked. False: as `save` says, or no turn was granted in time for that."""
        try:
            with self._accelerator.turn(patience_s=self._settings.stop_s / 2):
                return self.save(run, lease)
        except NotGranted as waited:
            log.warning("no recovery snapshot of run %s: %s", run.run_id, waited)
            return False

    def _make_room(self, waiting: set[Key], lease: Lease) -> None:
        for run in self.residents.surplus(waiting):
            log.info("handing back run %s: idle", run.run_id)
            self._hand_back(run, lease)

    def _unload(self, waiting: set[Key], lease: Lease) -> None:
        """Hand back the runs that their clients want out of memory, each once nothing of it waits."""
        if time.monotonic() < self._unload_at:
            return
        self._unload_at = time.monotonic() + self._settings.poll_s
        asked = self._journal.unloads(self._slug)
        for each in asked:
            run = self.residents.get((each.tenant, each.run_id))
            if run is not None and run.key not in waiting:
                log.info("handing back run %s: its client wants it unloaded", run.run_id)
                self._hand_back(run, lease)
        if asked:
            freed = [each for each in asked if self.residents.get((each.tenant, each.run_id)) is None]
            self._journal.unloaded(self._slug, lease, freed)

    def _leave_vanished(self, waiting: set[Key], lease: Lease) -> None:
        """Hand back the runs whose clients have vanished; each comes back, to the bit, with its next operation."""
        if time.monotonic() < self._vanished_at:
            return
        self._vanished_at = time.monotonic() + VANISHED_POLLS * self._settings.poll_s
        idle = [run for run in self.residents if run.key not in waiting]
        gone = self._journal.vanished([run.key for run in idle]) if idle else set()
        for run in idle:
            if run.key in gone:
                log.info("handing back run %s: its client has vanished", run.run_id)
                self._hand_back(run, lease)
