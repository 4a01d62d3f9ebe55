"""Versions of the weights that only samplers hold: no checkpoint's row names them, and samplers come and go.

They are made by ephemeral saves, or are left over from checkpoints that were deleted. What is to be kept of them is
decided in the scheduler; here they are found, and dropped one by one, unless somebody has used them meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from openrl.tasks import keys, walk
from openrl.tasks.store import Store, translated


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The weights of one sampler. Times in unix seconds; `size_bytes` 0: not known.

    `seen` is its last use as the store has it, "" if there was none yet; `busy`: it has samples that aren't finished.
    """

    tenant: str
    sampler_id: str
    run_id: str
    directory: str
    size_bytes: int
    created: float
    last_used: float
    seen: str = ""
    busy: bool = False


class Versions:
    """Finds and drops versions; for the scheduler."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    @translated()
    def all(self) -> list[Version]:
        """Return every version that only samplers hold."""
        tenants = walk.tenants(self._store)
        samplers = [
            (tenant, sampler, seen)
            for tenant in tenants
            for sampler, seen in walk.samplers(self._store, tenant)
            if sampler.adapter_dir
        ]
        # After the samplers: what becomes a checkpoint's in between is left alone.
        named = {found.directory for tenant in tenants for found, _ in walk.checkpoints(self._store, tenant)}
        busy = self._busy({sampler.slug for _, sampler, _ in samplers})
        return [
            Version(
                tenant=tenant,
                sampler_id=sampler.sampler_id,
                run_id=sampler.run_id,
                directory=sampler.adapter_dir,
                size_bytes=sampler.size_bytes,
                created=sampler.created,
                last_used=float(seen or sampler.created),
                seen=seen,
                busy=(tenant, sampler.sampler_id) in busy,
            )
            for tenant, sampler, seen in samplers
            if sampler.adapter_dir not in named
        ]

    def drop(self, version: Version) -> bool:
        """Drop a sampler's weights: from now on it answers as gone. False: it was used, or dropped, meanwhile."""
        return bool(
            self._store.script("sampler_drop")(version.tenant, version.sampler_id, version.seen, version.directory)
        )

    def _busy(self, slugs: set[str]) -> set[tuple[str, str]]:
        """Return (tenant, sampler) of every sample that isn't finished."""
        found = set()
        for slug in slugs:
            for member in self._redis.zrange(keys.unfinished(slug), 0, -1):
                tenant, _, request_id = member.decode().partition(" ")
                found.add((tenant, request_id.rpartition(":")[0]))
        return found
