"""Which versions of the weights are kept for samplers: the newest of each run, and the others while they are used.

An RL loop saves one version each step and never says that it is done with the last. Policy is a pure function of what
there is; what it gives up is dropped by a script that refuses when somebody has used it meanwhile.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import islice

from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks.store import Store
from openrl.tasks.versions import Version, Versions
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

AT_ONCE = 5000
"""Versions dropped in one go: the scheduler has other things to do."""


def surplus(
    versions: Iterable[Version],
    *,
    now: float,
    ttl_s: float,
    last: int,
    most_bytes: int,
    size: Callable[[Version], int] = lambda version: version.size_bytes,
) -> list[Version]:
    """Return the versions to drop.

    Of each run the newest `last` directories stay, and every one with unfinished samples. Of the others stay those that
    were used within `ttl_s`, the latest used first, while all of the run's together take `most_bytes` at most.
    """
    dropped: list[Version] = []
    for group in _by_run(versions).values():
        newest = sorted(group.values(), key=lambda samplers: max(each.created for each in samplers), reverse=True)
        kept = sum(size(samplers[0]) for samplers in newest[:last])
        for samplers in sorted(newest[last:], key=_last_used, reverse=True):
            is_used = now - _last_used(samplers) < ttl_s and kept + size(samplers[0]) <= most_bytes
            if is_used or any(each.busy for each in samplers):
                kept += size(samplers[0])
            else:
                dropped += samplers
    return dropped


def retain(store: Store, settings: SchedulerSettings) -> int:
    """Drop what isn't to be kept; return how many samplers have lost their weights."""
    versions = Versions(store)
    found = surplus(
        versions.all(),
        now=store.now(),
        ttl_s=settings.version_ttl_s,
        last=settings.version_last,
        most_bytes=settings.version_bytes,
        size=lambda version: version.size_bytes or _size_on_disk(store, version),
    )
    dropped = 0
    for version in islice(found, AT_ONCE):
        if versions.drop(version):
            log.info("dropped the weights of sampler %s", version.sampler_id)
            dropped += 1
    return dropped


def _by_run(versions: Iterable[Version]) -> dict[tuple[str, str], dict[str, list[Version]]]:
    """Return the samplers of each directory, by tenant and run."""
    found: dict[tuple[str, str], dict[str, list[Version]]] = defaultdict(lambda: defaultdict(list))
    for version in versions:
        found[version.tenant, version.run_id][version.directory].append(version)
    return found


def _last_used(samplers: Iterable[Version]) -> float:
    return max(each.last_used for each in samplers)


def _size_on_disk(store: Store, version: Version) -> int:
    """Return the size of a version that an earlier release wrote without noting it."""
    try:
        path = layout.existing(store.settings.data_dir, version.directory)
        return sum(file.stat().st_size for file in path.iterdir())
    except (LookupError, OSError):
        return 0
