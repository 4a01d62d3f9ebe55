"""Recovery snapshots: a run's whole state as files, so that its journal needs to keep only what follows.

One is written at once, where its caller may go on only after it, or beside the engine: then the engine's thread only
copies the state where it lies, and a thread of its own writes the copy and registers it for the operation that it was
taken after. Of one run there is never more than one in the making. Knows no reasons: when one is due is decided in
`residents`, what happens to a run in `engine`.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from pathlib import Path

from openrl.tasks.errors import OpenRLError, StaleOwner
from openrl.tasks.journal import Journal
from openrl.tasks.ownership import Lease
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer import states
from openrl.workers.trainer.residents import Key
from openrl.workers.trainer.runs import Run
from openrl.workers.weights import layout

log = logging.getLogger(__name__)


class Snapshots:
    """Writes the snapshots of runs of one base model. Its methods are for one thread, the engine's."""

    def __init__(
        self,
        loaded: LoadedModel,
        journal: Journal,
        *,
        base_model: str,
        data_dir: Path,
        at_once: int = 1,
        in_host: bool = False,
    ) -> None:
        """`at_once`: how many may be written beside the engine; each holds a copy of adapter and moments.

        `in_host`: the copies lie in host memory, since the device may be another's before they are written.
        """
        self._loaded = loaded
        self._journal = journal
        self._base_model = base_model
        self._data_dir = data_dir
        self._at_once = at_once
        self._in_host = in_host
        self._writers: dict[Key, threading.Thread] = {}

    def write(self, run: Run, lease: Lease) -> None:
        """Write the run as it is after `run.applied` and let the journal be trimmed to what follows.

        Raises:
            StaleOwner: the run is another's now; what was written doesn't count.
            StoreUnavailable: it may count or not, so what was written stays; a second call finds out.
            OSError: the disk refused; the older snapshot still counts.
        """
        self.settle(run.key)
        began = time.monotonic()
        self._save(run, lease)
        run.changed, run.snapshot_s = False, time.monotonic() - began

    def begin(self, run: Run, lease: Lease) -> bool:
        """Copy the run as it is now and have the copy written. False: not now, as many as may be are in the making.

        The run may change, leave memory or pass to another worker meanwhile. What goes wrong is logged; the older
        snapshot still counts then.
        """
        if run.key in self._writers or len(self._writers) >= self._at_once:
            return False
        began = time.monotonic()
        try:
            copy = run.copy(in_host=self._in_host)
            self._writers[run.key] = writer = threading.Thread(
                target=self._beside,
                args=(weakref.ref(run), copy, lease, began),
                name="trainer-snapshot",
                daemon=True,
            )
            run.changed = False
            writer.start()
        except (MemoryError, RuntimeError) as error:  # no memory, or no thread
            self._writers.pop(run.key, None)
            run.changed = True
            log.error("no recovery snapshot of run %s: %s", run.run_id, error)
        return True

    def settle(self, key: Key) -> None:
        """Wait until no snapshot of the run is in the making."""
        writer = self._writers.get(key)
        if writer is not None:
            writer.join()

    def _beside(self, run_of: weakref.ref[Run], copy: Run, lease: Lease, began: float) -> None:
        """Write a copy. The run itself is only told that it still has to be saved, if it has.

        It isn't kept: one that is dropped meanwhile is off the device at once, before a turn there is handed on.
        """
        saved = False
        try:
            self._save(copy, lease)
            saved = True
        except StaleOwner as stale:
            log.warning("a recovery snapshot came too late: %s", stale)
        except (OpenRLError, OSError) as error:
            log.error("no recovery snapshot of run %s: %s", copy.run_id, error)
        except Exception:
            log.exception("no recovery snapshot of run %s", copy.run_id)
        finally:
            run = run_of()
            if run is not None:
                run.changed = run.changed or (copy.changed and not saved)
                run.snapshot_s = time.monotonic() - began
            self._writers.pop(copy.key)

    def _save(self, run: Run, lease: Lease) -> None:
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
        if before is not None and before[0] != directory:
            layout.remove(layout.resolve(self._data_dir, before[0]))
