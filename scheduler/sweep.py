"""Deletes what a crash or a deletion has left on disk: files and directories that no row of the store names.

Never what is younger than a day (a setting), since rows are written after files; never the directories of a run that
the store doesn't know, since then the store is not the one that they were written under.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from openrl.scheduler.chains import ancestors
from openrl.tasks.orphans import Dropped, Named, named
from openrl.tasks.spool import Spool
from openrl.tasks.store import Store
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

AT_ONCE = 1000
"""Deletions in one go: the scheduler has other things to do."""


GRACE_S = 600.0
"""Time between the end of a directory's row and its own: whoever had just read the row has used it by then."""


def sweep(store: Store, *, age_s: float) -> int:
    """Delete orphans that haven't changed for `age_s`; return how many."""
    before = time.time() - age_s
    names = named(store)
    swept = 0
    for path in islice(_orphans(store, names, before), AT_ONCE):
        log.info("deleting %s: nothing names it", path.relative_to(store.settings.data_dir))
        _delete(path)
        swept += 1
    return swept


def sweep_dropped(store: Store, *, grace_s: float = GRACE_S) -> int:
    """Delete the directories whose row is gone for `grace_s`, and which nothing needs any more; return how many.

    A waiting load, a sampler or a snapshot may still name one, and a later version may lead on from it: it is looked
    at again, but not before another `grace_s`, since each look reads every row. After a crash in between they are
    looked at again too.
    """
    dropped = Dropped(store)
    due = dropped.before(store.now() - grace_s)
    if not due:
        return 0
    is_needed = _needs(store, named(store))
    needed = {each for each in due if is_needed(each)}
    dropped.look_later(sorted(needed))
    gone = []
    for directory in [each for each in due if each not in needed][:AT_ONCE]:
        log.info("deleting %s: its row is gone", directory)
        path = layout.resolve(store.settings.data_dir, directory)
        layout.remove(path)
        if not path.exists():
            gone.append(directory)
    dropped.forget(gone)
    return len(gone)


def _needs(store: Store, names: Named) -> Callable[[str], bool]:
    """Return what tells whether a directory is named, or a full run's named versions may lead on from it."""
    chains = ancestors(store.settings.data_dir, names.chained)
    return lambda directory: directory in names.directories or chains.need(directory)


def _orphans(store: Store, names: Named, before: float) -> Iterator[Path]:
    data_dir = store.settings.data_dir
    spool = Spool(data_dir, inline_bytes=store.settings.inline_bytes)
    is_needed = _needs(store, names)
    for path in spool.files():
        if _older(path, before) and f"@{path.relative_to(data_dir).as_posix()}" not in names.files:
            yield path
    for tenant, run_id in sorted(names.runs):
        for path in layout.versions(data_dir, tenant, run_id):
            name = path.relative_to(data_dir).as_posix()
            if _older(path, before) and not is_needed(name) and name not in names.dropped:
                yield path


def _delete(path: Path) -> None:
    if path.is_dir():
        layout.remove(path)
    else:
        path.unlink(missing_ok=True)


def _older(path: Path, before: float) -> bool:
    try:
        return path.lstat().st_mtime < before
    except FileNotFoundError:
        return False
