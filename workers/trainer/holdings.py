"""The runs that a worker holds: rebuilt when one is needed, saved when that is due, handed back when it may go.

A run is in memory here, or whole in journal and snapshot: what is dropped comes back with the same bits. Knows
neither passes nor outcomes; what a run is asked to do, and what is told of it, is the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from openrl.tasks.errors import OpenRLError, StaleOwner, StoreUnavailable
from openrl.tasks.journal import Journal, Slice
from openrl.tasks.ownership import Lease
from openrl.tasks.unloading import Unload
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
        lies_in_host: Callable[[Run], bool] = lambda run: False,
    ) -> None:
        """`lies_in_host`: whether a run can be saved without the accelerator."""
        self._slug = slug
        self._journal = journal
        self._recovery = recovery
        self._snapshots = snapshots
        self._settings = settings
        self._accelerator = accelerator
        self.residents = Residents(settings)
        self._offered: dict[Key, int] = {}
        """The last operation that the journal has offered of each run that is resident here."""
        self._lies_in_host = lies_in_host
        self._asked: list[Unload] = []
        """What clients wanted out of memory when that was last looked at."""
        self._unload_at = self._vanished_at = self._let_go_at = 0.0

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
            run = None  # its memory is free before it is taken up again
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
        """Write a recovery snapshot. False: the disk refused, or the run is another's; the journal still has all."""
        try:
            self._snapshots.write(run, lease)
        except StoreUnavailable:
            raise
        except StaleOwner as stale:
            log.warning("run %s has passed to another worker; dropped: %s", run.run_id, stale)
            self.drop(run.key)
            return False
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

    def let_go(self, waiting: set[Key], lease: Lease, *, gives_up: Callable[[], bool] = lambda: False) -> None:
        """Hand back the runs that take up memory for nothing, except those that something waits for.

        All that have to be saved on the accelerator share one turn, and one wait for it. Where that isn't granted, or
        `gives_up` ends the waiting, they stay until there is a turn; so does a run that can't be saved.
        """
        leaving: dict[Key, Run] = {}
        for why, runs in (
            ("idle", self.residents.surplus(waiting)),
            ("its client wants it unloaded", self._unloaded(waiting)),
            ("its client has vanished", self._vanished(waiting)),
        ):
            for run in runs:
                if leaving.setdefault(run.key, run) is run and time.monotonic() >= self._let_go_at:
                    log.info("handing back run %s: %s", run.run_id, why)
        if leaving and time.monotonic() >= self._let_go_at:
            self._hand_back_idle(list(leaving.values()), lease, gives_up)
        self._tell_unloaded(lease)

    def _hand_back_idle(self, runs: Sequence[Run], lease: Lease, gives_up: Callable[[], bool]) -> None:
        for run in runs:
            self._snapshots.settle(run.key)
        near = [run for run in runs if not run.changed or self._lies_in_host(run)]
        far = [run for run in runs if run not in near]
        saved = [self._release_if_saved(run, lease) for run in near]
        try:
            if far:
                with self._accelerator.turn(patience_s=self._settings.stop_s / 2, gives_up=gives_up):
                    saved += [self._release_if_saved(run, lease) for run in far]
        except NotGranted as waited:
            log.info("%d idle runs stay for now: %s", len(far), waited)
        if not all(saved):  # the disk refused: no need to ask it all the time
            self._let_go_at = time.monotonic() + self._settings.doubt_s

    def _release_if_saved(self, run: Run, lease: Lease) -> bool:
        if run.changed and not self.save(run, lease):
            return False
        self._journal.release(lease, run.tenant, run.run_id, run.token)
        self.drop(run.key)
        return True

    def _hand_back(self, run: Run, lease: Lease) -> None:
        """Hand back a run for good: what can't be saved is rebuilt from the journal."""
        self._snapshots.settle(run.key)
        if not run.changed or self._save_in_turn(run, lease):
            self._journal.release(lease, run.tenant, run.run_id, run.token)
        self.drop(run.key)

    def _save_in_turn(self, run: Run, lease: Lease) -> bool:
        """Save a run that may be parked. False: as `save` says, or no turn was granted in time for that."""
        if self._lies_in_host(run):
            return self.save(run, lease)
        try:
            with self._accelerator.turn(patience_s=self._settings.stop_s / 2):
                return self.save(run, lease)
        except NotGranted as waited:
            log.warning("no recovery snapshot of run %s: %s", run.run_id, waited)
            return False

    def _unloaded(self, waiting: set[Key]) -> list[Run]:
        """Return the runs that their clients want out of memory, each once nothing of it waits."""
        if time.monotonic() < self._unload_at:
            return []
        self._unload_at = time.monotonic() + self._settings.poll_s
        self._asked = self._journal.unloads(self._slug)
        runs = [self.residents.get((each.tenant, each.run_id)) for each in self._asked]
        return [run for run in runs if run is not None and run.key not in waiting]

    def _tell_unloaded(self, lease: Lease) -> None:
        """Tell which of the runs that were to be unloaded aren't here any more."""
        asked, self._asked = self._asked, []
        if asked:
            freed = [each for each in asked if self.residents.get((each.tenant, each.run_id)) is None]
            self._journal.unloaded(self._slug, lease, freed)

    def _vanished(self, waiting: set[Key]) -> list[Run]:
        """Return the runs whose clients have vanished; each comes back, to the bit, with its next operation."""
        if time.monotonic() < self._vanished_at:
            return []
        self._vanished_at = time.monotonic() + VANISHED_POLLS * self._settings.poll_s
        idle = [run for run in self.residents if run.key not in waiting]
        gone = self._journal.vanished([run.key for run in idle]) if idle else set()
        return [run for run in idle if run.key in gone]
