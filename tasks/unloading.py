"""Runs that are to leave memory: because their clients want it, or because their clients have vanished.

No operation of the run: it has no place in its order and changes nothing of its state. The promise is kept once no
living worker has the run in memory, whoever saw to that. Where the client has vanished nothing is promised: the run
comes back with its next operation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from openrl.tasks import keys
from openrl.tasks.errors import NotFound
from openrl.tasks.operations import Promise
from openrl.tasks.ownership import Lease
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store, translated


class Unload(NamedTuple):
    """One run to be unloaded, and the promise about it."""

    tenant: str
    run_id: str
    request_id: str


class Unloading:
    """The part of the journal that knows what is to leave memory."""

    _store: Store
    _settings: StoreSettings

    def unload(self, tenant: str, run_id: str) -> Promise:
        """Ask for a run to be unloaded; a second time is another promise of the same."""
        keys.run(tenant, run_id)
        request_id = self._store.script("unload")(tenant, run_id, self._settings.undelivered_ttl_s)
        if not request_id:
            raise NotFound(f"no run {run_id!r}")
        return Promise(request_id=request_id.decode(), run_id=run_id)

    @translated()
    def unloads(self, slug: str) -> list[Unload]:
        """Return what is asked for and not done, of one base model."""
        return [Unload(*member.decode().split(" ")) for member in self._store.redis.smembers(keys.unloads(slug))]

    @translated()
    def vanished(self, runs: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return those of these (tenant, run) whose session has ended, or wasn't heard of for the grace period."""
        sessions = list(dict.fromkeys((tenant, keys.session_of(run_id)) for tenant, run_id in runs))
        with self._store.redis.pipeline(transaction=False) as pipe:
            for tenant, session_id in sessions:
                pipe.hmget(keys.session(tenant, session_id), "last_seen", "finished")
            pipe.time()
            *rows, (seconds, microseconds) = pipe.execute()
        before = seconds + microseconds / 1e6 - self._settings.session_grace_s
        gone = {
            session
            for session, (seen, finished) in zip(sessions, rows, strict=True)
            if finished is not None or (seen is not None and float(seen) < before)
        }
        return {(tenant, run_id) for tenant, run_id in runs if (tenant, keys.session_of(run_id)) in gone}

    def unloaded(self, slug: str, lease: Lease | None = None, freed: Iterable[Unload] = ()) -> int:
        """Keep the promises about runs that are in nobody's memory; `freed` are not in that of this lease's holder."""
        holder = (lease.worker_id, lease.generation) if lease else ("", "")
        members = (" ".join(each) for each in freed)
        return int(self._store.script("unloaded")(slug, self._settings.undelivered_ttl_s, *holder, *members))
