"""Deletes what a crash or a deletion has left on disk: files and directories that no row of the store names.

Never what is younger than a day (a setting), since rows are written after files; never the directories of a run that
the store doesn't know, since then the store is not the one that they were written under.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from openrl.tasks.orphans import Named, named
from openrl.tasks.spool import Spool
from openrl.tasks.store import Store
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

AT_ONCE = 1000
"""Deletions in one go: the scheduler has other things to do."""


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


def _orphans(store: Store, names: Named, before: float) -> Iterator[Path]:
    data_dir = store.settings.data_dir
    spool = Spool(data_dir, inline_bytes=store.settings.inline_bytes)
    for path in spool.files():
        if _older(path, before) and f"@{path.relative_to(data_dir).as_posix()}" not in names.files:
            yield path
    for tenant, run_id in sorted(names.runs):
        for path in layout.versions(data_dir, tenant, run_id):
            if _older(path, before) and path.relative_to(data_dir).as_posix() not in names.directories:
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
