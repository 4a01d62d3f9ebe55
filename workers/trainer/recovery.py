"""A run rebuilt from its last snapshot and its journal: after a crash, or when it comes back from another worker.

A snapshot is adapter, moments, accumulated gradient and the void mark after one operation. What the journal
holds behind it is carried out again, each operation alone in its pass and under its recorded outcome: what
failed is not tried again but voids as it did; what left no trace is skipped. A run that was always alone comes
back with the same bits. Knows no passes and no leases.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

from openrl.tasks.boundaries import reach
from openrl.tasks.errors import OpenRLError, StoreUnavailable
from openrl.tasks.journal import Journal, Operation
from openrl.tasks.messages import CreateModel, ForwardBackward, LoadWeights, OptimStep, decode
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer import states
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.full import FullTuning
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

REPEATED = frozenset({CreateModel.kind, ForwardBackward.kind, OptimStep.kind, LoadWeights.kind})
"""The kinds that change a run; the others are not done again."""


class RecoveryFailed(OpenRLError):
    """The journal and the files don't give the run back: an operator must look."""


class Recovery:
    """Rebuilds runs of one base model."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Device,
        journal: Journal,
        *,
        base_model: str,
        data_dir: Path,
        full: FullTuning | None = None,
    ) -> None:
        """Rebuild LoRA runs; with `full` the one run that trains all weights."""
        self._loaded, self._full = loaded, full
        self._device = device
        self._journal = journal
        self._base_model = base_model
        self._data_dir = data_dir

    def restore(self, tenant: str, run_id: str, *, token: int, applied: int) -> Run:
        """Return the run as it was after operation `applied`.

        Raises:
            RecoveryFailed: the snapshot can't be read, or an operation that succeeded fails now.
            OSError: a body can't be read.
        """
        began = time.monotonic()
        run = self._last_snapshot(tenant, run_id, token)
        first, read = run.applied, time.monotonic()
        for operation in self._journal.history(tenant, run_id, after=first, upto=applied, bodies_of=REPEATED):
            self._repeat(run, operation)
            reach("trainer.repeated")
            run.applied = operation.seq_id
        if run.applied != applied:
            raise RecoveryFailed(f"run {run_id!r} can be rebuilt to operation {run.applied} only, not to {applied}")
        self._device.residency.admit([run])
        reach("trainer.restored")
        log.info(
            "rebuilt run %s: snapshot read in %.0f ms, %d operations repeated in %.0f ms, now at %d",
            run_id, (read - began) * 1e3, applied - first, (time.monotonic() - read) * 1e3, applied,
        )  # fmt: skip
        return run

    def _last_snapshot(self, tenant: str, run_id: str, token: int) -> Run:
        run = Run(tenant=tenant, run_id=run_id, token=token)
        found = self._journal.snapshot(tenant, run_id)
        if found is None:
            return run
        directory, run.applied = found
        try:
            path = layout.existing(self._data_dir, directory)
            state = states.read(path, self._loaded, base_model=self._base_model, with_optimizer=True, full=self._full)
        except StoreUnavailable:
            raise
        except (OpenRLError, OSError) as error:
            raise RecoveryFailed(f"snapshot {directory!r} of run {run_id!r} can't be read: {error}") from error
        run.adopt(state.trained, state.moments)
        run.gradient = state.gradient and [tensor.to(self._loaded.device) for tensor in state.gradient]
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
            message = decode(operation.kind, operation.body)
            work = Work(run=run, seq_id=operation.seq_id, message=message, is_repeated=True)
            [outcome] = self._device.execute([work])
            if outcome.error is not None:
                raise RecoveryFailed(f"{work} had succeeded and fails now: {outcome.error}")
