"""Which files the store still names: what isn't named here, and isn't new, nobody will ever read.

Bodies and results in the spool, and directories of weights: of checkpoints, samplers, recovery snapshots, and of
checkpoints that were deleted while an operation that loads them waits. Deletes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from openrl.tasks import keys, walk
from openrl.tasks.records import Checkpoint
from openrl.tasks.spool import Spool
from openrl.tasks.store import Store, translated


@dataclass(slots=True)
class Named:
    """What rows name. `files` as the store has them (`@spool/...`), `directories` relative to the data directory.

    A run that isn't in `runs` is unknown to this store: nothing is known of its directories either.
    """

    runs: set[tuple[str, str]] = field(default_factory=set)
    files: set[str] = field(default_factory=set)
    directories: set[str] = field(default_factory=set)
    chained: set[str] = field(default_factory=set)
    """Those of `directories` that are versions of full runs: each needs its parents, back to an anchor."""
    dropped: set[str] = field(default_factory=set)
    """Directories whose row is gone, and whose own sweep comes."""


class Dropped:
    """The directories whose row is gone, each with the time when it went."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    @translated()
    def before(self, moment: float) -> list[str]:
        """Return those whose row went before a moment of the store's clock, longest ago first."""
        return _text(self._redis.zrangebyscore(keys.DROPPED, "-inf", moment))

    def forget(self, directories: Sequence[str]) -> None:
        """Note that the directories are gone too: from now on nobody is charged for them."""
        if directories:
            self._store.script("forget")(*directories)

    @translated()
    def look_later(self, directories: Sequence[str]) -> None:
        """Note that something needs these now, as if their rows had just gone: no sweep asks before the next grace."""
        if directories:
            self._redis.zadd(keys.DROPPED, dict.fromkeys(directories, self._store.now()), xx=True)


def named(store: Store) -> Named:
    """Read every row that names a file or a directory.

    Raises:
        OSError: a waiting operation's body can't be read, so what it names isn't known.
    """
    found = Named()
    with translated():
        found.files.update(_text(store.redis.zrange(keys.FILES, 0, -1)))
        found.dropped.update(_text(store.redis.zrange(keys.DROPPED, 0, -1)))
        for tenant in walk.tenants(store):
            for run_id in _text(store.redis.zrange(keys.runs(tenant), 0, -1)):
                _add_run(store, found, tenant, run_id)
            _add_samples(store, found, tenant)
    return found


def _add_run(store: Store, found: Named, tenant: str, run_id: str) -> None:
    spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes)
    snapshot_dir, last_version, files, loads, rows = store.script("named")(tenant, run_id)
    checkpoints = [Checkpoint.from_json(row) for row in rows]
    found.runs.add((tenant, run_id))
    found.files.update(_text(files))
    found.directories.add(snapshot_dir.decode())
    found.directories.update(_loaded(spool, body) for body in loads)
    found.directories.update(checkpoint.directory for checkpoint in checkpoints)
    found.chained.update(checkpoint.directory for checkpoint in checkpoints if checkpoint.weights_digest)
    if last_version:  # the next one is a delta from it, whatever became of its row
        found.directories.add(last_version.decode())
        found.chained.add(last_version.decode())


def _loaded(spool: Spool, stowed: bytes) -> str:
    """Return the directory that a waiting operation loads; "" where its body is lost or broken, so that it can't."""
    try:
        return str(json.loads(spool.load(stowed)).get("checkpoint_dir", ""))
    except (FileNotFoundError, ValueError):
        return ""


def _add_samples(store: Store, found: Named, tenant: str) -> None:
    """Add the samplers' versions, and the bodies of the samples that aren't finished."""
    slugs = set()
    for sampler, _ in walk.samplers(store, tenant):
        found.directories.add(sampler.adapter_dir)
        if sampler.weights_digest:
            found.chained.add(sampler.adapter_dir)
        slugs.add(sampler.slug)
    for slug in slugs:
        for member in _text(store.redis.zrange(keys.unfinished(slug), 0, -1)):
            owner, _, request_id = member.partition(" ")
            body = store.redis.hget(keys.job(owner, request_id), "body") if owner == tenant else None
            if body and body.startswith(b"@"):
                found.files.add(body.decode())


def _text(members: list[bytes] | set[bytes]) -> list[str]:
    return [member.decode() for member in members]
