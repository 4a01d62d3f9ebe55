"""A run's whole state to disk and back: handing it over, and rebuilding it after a crash.

A snapshot is adapter, moments, accumulated gradient and the void mark after one operation. To rebuild a
run is to read its last snapshot and to carry out again what the journal holds behind it, each operation
alone in its pass and under its recorded outcome: what failed is not tried again but voids as it did;
what left no trace is skipped. A run that was always alone comes back with the same bits. Knows no passes
and no leases.
"""

from __future__ import annotations

import logging
from pathlib import Path

from openrl.tasks.errors import OpenRLError, StaleOwner, StoreUnavailable
from openrl.tasks.journal import Journal, Operation
from openrl.tasks.messages import CreateModel, ForwardBackward, LoadWeights, OptimStep, decode
from openrl.tasks.ownership import Lease
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer import states
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

REPEATED = frozenset({CreateModel.kind, ForwardBackward.kind, OptimStep.kind, LoadWeights.kind})
"""The kinds that change a run; the others are not done again."""


class RecoveryFailed(OpenRLError):
    """The journal and the files don't give the run back: an operator must look."""


class Recovery:
    """Writes and reads the states of runs of one base model."""

    def __init__(
        self, loaded: LoadedModel, device: Device, journal: Journal, *, base_model: str, data_dir: Path
    ) -> None:
        self._loaded = loaded
        self._device = device
        self._journal = journal
        self._base_model = base_model
        self._data_dir = data_dir

    def snapshot(self, run: Run, lease: Lease) -> None:
        """Write the run as it is after `run.applied` and let the journal be trimmed to what follows.

        Raises:
            StaleOwner: the run is another's now; what was written doesn't count.
            StoreUnavailable: it may count or not, so what was written stays; a second call finds out.
            OSError: the disk refused; the older snapshot still counts.
        """
        before = self._journal.snapshot(run.tenant, run.run_id)
        directory = layout.snapshot_dir(run.tenant, run.run_id, run.applied, run.token)
        if before is not None and not run.changed:
            directory = before[0]  # what changed nothing is covered by the files that are there
        path = layout.resolve(self._data_dir, directory)
        if not path.is_dir():
            extra = {"applied": run.applied, "void": run.void}
            base = {"base_model": self._base_model, "base_digest": self._loaded.digest}
            states.write(path, run, kind=states.SNAPSHOT, extra=extra, **base)
        try:
            self._journal.record_snapshot(lease, run.tenant, run.run_id, run.token, directory, run.applied)
        except StaleOwner:
            # The first of two sendings may have been heard, and only the second have come too late.
            named = self._journal.snapshot(run.tenant, run.run_id)
            if named is None or named[0] != directory:
                layout.remove(path)
            raise
        run.changed = False
        if before is not None and before[0] != directory:
            layout.remove(layout.resolve(self._data_dir, before[0]))

    def restore(self, tenant: str, run_id: str, *, token: int, applied: int) -> Run:
        """Return the run as it was after operation `applied`.

        Raises:
            RecoveryFailed: the snapshot can't be read, or an operation that succeeded fails now.
            OSError: a body can't be read.
        """
        run = self._last_snapshot(tenant, run_id, token)
        first = run.applied
        for operation in self._journal.history(tenant, run_id, after=first, upto=applied, bodies_of=REPEATED):
            self._repeat(run, operation)
            run.applied = operation.seq_id
        if run.applied != applied:
            raise RecoveryFailed(f"run {run_id!r} can be rebuilt to operation {run.applied} only, not to {applied}")
        if applied > first:
            log.info("rebuilt run %s: %d operations repeated, now at %d", run_id, applied - first, applied)
        return run

    def _last_snapshot(self, tenant: str, run_id: str, token: int) -> Run:
        run = Run(tenant=tenant, run_id=run_id, token=token)
        found = self._journal.snapshot(tenant, run_id)
        if found is None:
            return run
        directory, run.applied = found
        try:
            path = layout.existing(self._data_dir, directory)
            state = states.read(path, self._loaded, base_model=self._base_model, with_optimizer=True)
        except StoreUnavailable:
            raise
        except (OpenRLError, OSError) as error:
            raise RecoveryFailed(f"snapshot {directory!r} of run {run_id!r} can't be read: {error}") from error
        run.adapter, run.moments, run.gradient = state.adapter, state.moments, state.gradient
        run.train_attn, run.train_mlp = state.manifest.train_attn, state.manifest.train_mlp
        run.train_unembed, run.seed = state.manifest.train_unembed, state.manifest.seed
        run.void = str(state.manifest.extra["void"])
        return run

    def _repeat(self, run: Run, operation: Operation) -> None:
        if operation.kind == CreateModel.kind and operation.error:
            run.failure = operation.error
        elif operation.kind == OptimStep.kind and operation.error:
            run.drop_gradient()
        elif operation.voids or (operation.kind == ForwardBackward.kind and operation.error):
            run.make_void(operation.seq_id, operation.error)
        elif operation.kind in REPEATED and not operation.error:
            work = Work(run=run, seq_id=operation.seq_id, message=decode(operation.kind, operation.body))
            [outcome] = self._device.execute([work])
            if outcome.error is not None:
                raise RecoveryFailed(f"{work} had succeeded and fails now: {outcome.error}")
