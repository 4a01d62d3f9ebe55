"""Which runs are resident in this process, how long they were idle, and when they are due for a snapshot.

Bookkeeping only: neither writes nor drops anything by itself on the device or in the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings

Key = tuple[str, str]


@dataclass(slots=True, kw_only=True)
class Resident:
    """A run, and what has happened since it was last used (monotonic seconds) and since it was last saved."""

    run: Run
    used: float
    operations: int = 0
    worked: float = 0.0
    """Seconds that those operations took to carry out."""
    journal_bytes: int = 0
    memory_bytes: int = 0


class Residents:
    """The runs of this process by tenant and run id."""

    def __init__(self, settings: TrainerSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._residents: dict[Key, Resident] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter([resident.run for resident in list(self._residents.values())])

    def __len__(self) -> int:
        return len(self._residents)

    def get(self, key: Key) -> Run | None:
        """Return the resident run, None if it isn't here."""
        resident = self._residents.get(key)
        return resident.run if resident is not None else None

    def holds(self, run: Run) -> bool:
        """Tell whether this very object is resident: a run that was dropped and rebuilt is another."""
        return self.get(run.key) is run

    def add(self, run: Run, *, worked: float = 0.0) -> None:
        """Make a run resident; `worked`: the seconds that it took to rebuild it, and would take again."""
        self._residents[run.key] = Resident(run=run, used=self._clock(), worked=worked, memory_bytes=run.size_bytes)

    def drop(self, key: Key) -> None:
        """Forget a run and so free its memory; one that isn't here is fine."""
        self._residents.pop(key, None)

    def clear(self) -> None:
        """Forget all."""
        self._residents.clear()

    def note(self, run: Run, body_bytes: int, seconds: float) -> None:
        """Note one committed operation, the size of its body and how long it took to carry out."""
        resident = self._residents[run.key]
        resident.used = self._clock()
        resident.operations += 1
        resident.journal_bytes += body_bytes
        resident.worked += seconds
        resident.memory_bytes = run.size_bytes

    def note_saved(self, run: Run) -> None:
        """Note that a snapshot was written, or tried: the next one is due after as much again."""
        resident = self._residents[run.key]
        resident.operations, resident.journal_bytes, resident.worked = 0, 0, 0.0

    def snapshot_due(self, run: Run) -> bool:
        """Tell whether enough has built up behind the last snapshot, and whether another one may cost so much."""
        resident, settings = self._residents[run.key], self._settings
        return run.snapshot_s <= settings.snapshot_share * resident.worked and (
            resident.operations >= settings.snapshot_operations
            or resident.journal_bytes >= settings.snapshot_bytes
            or resident.worked >= settings.snapshot_s
        )

    def surplus(self, waiting: Collection[Key]) -> list[Run]:
        """Return the runs to hand back now: idle for too long, or the longest idle ones while memory is short."""
        now = self._clock()
        free = sorted((one for key, one in self._residents.items() if key not in waiting), key=lambda one: one.used)
        over = sum(one.memory_bytes for one in self._residents.values()) - self._settings.resident_bytes
        leaving = []
        for resident in free:
            if over <= 0 and now - resident.used < self._settings.idle_s:
                break
            leaving.append(resident.run)
            over -= resident.memory_bytes
        return leaving
