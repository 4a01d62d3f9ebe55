"""Which files the store still names: what isn't named here, and isn't new, nobody will ever read.

Bodies and results in the spool, and directories of weights: of checkpoints, samplers, recovery snapshots, and of
checkpoints that were deleted while an operation that loads them waits. Deletes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from openrl.tasks import keys
from openrl.tasks.records import Checkpoint, Sampler
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


def named(store: Store) -> Named:
    """Read every row that names a file or a directory.

    Raises:
        OSError: a waiting operation's body can't be read, so what it names isn't known.
    """
    found = Named()
    with translated():
        found.files.update(_text(store.redis.zrange(keys.FILES, 0, -1)))
        for tenant in sorted(_text(store.redis.smembers(keys.TENANTS))):
            for run_id in _text(store.redis.zrange(keys.runs(tenant), 0, -1)):
                _add_run(store, found, tenant, run_id)
            _add_samples(store, found, tenant)
    return found


def _add_run(store: Store, found: Named, tenant: str, run_id: str) -> None:
    spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes)
    snapshot_dir, files, loads, checkpoints = store.script("named")(tenant, run_id)
    found.runs.add((tenant, run_id))
    found.files.update(_text(files))
    found.directories.add(snapshot_dir.decode())
    found.directories.update(_loaded(spool, body) for body in loads)
    found.directories.update(Checkpoint.from_json(row).directory for row in checkpoints)


def _loaded(spool: Spool, stowed: bytes) -> str:
    """Return the directory that a waiting operation loads; "" where its body is lost or broken, so that it can't."""
    try:
        return str(json.loads(spool.load(stowed)).get("checkpoint_dir", ""))
    except (FileNotFoundError, ValueError):
        return ""


def _add_samples(store: Store, found: Named, tenant: str) -> None:
    """Add the samplers' versions, and the bodies of the samples that aren't finished."""
    slugs = set()
    for sampler in _samplers(store, tenant):
        found.directories.add(sampler.adapter_dir)
        slugs.add(sampler.slug)
    for slug in slugs:
        for member in _text(store.redis.zrange(keys.unfinished(slug), 0, -1)):
            owner, _, request_id = member.partition(" ")
            body = store.redis.hget(keys.job(owner, request_id), "body") if owner == tenant else None
            if body and body.startswith(b"@"):
                found.files.add(body.decode())


def _samplers(store: Store, tenant: str) -> Iterator[Sampler]:
    for session_id in _text(store.redis.zrange(keys.sessions(tenant), 0, -1)):
        for sampler_id in _text(store.redis.hkeys(keys.session_samplers(tenant, session_id))):
            record = store.redis.hget(keys.sampler(tenant, sampler_id), "record")
            if record:
                yield Sampler.from_json(record)


def _text(members: list[bytes] | set[bytes]) -> list[str]:
    return [member.decode() for member in members]
