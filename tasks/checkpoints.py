"""Checkpoints: who may read one, what its owner may change, what expires, what is copied.

A checkpoint belongs to one tenant, who alone may change it. A published one is read by all, and nothing else of its
owner is. Whatever a tenant may not read looks exactly like nothing. Each change is one script, so that two at once
leave the one or the other. Files are not touched here: a directory whose row is gone is noted as dropped.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace

from openrl.tasks import keys, quotas, walk
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, shown
from openrl.tasks.records import Checkpoint, Run, Session
from openrl.tasks.store import Store, translated

COPIED = "copied"
"""The state of a run that only holds a copy."""

COPY_KEY_TTL_S = 24 * 3600
_RUNS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """A copy that exists: its address, and the directory that its row names."""

    uri: str
    directory: str


class Checkpoints:
    """The registry's checkpoints; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    # read

    @translated()
    def checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint of this tenant that hasn't expired."""
        return self._owned(tenant, run_id, checkpoint_id)[1]

    def checkpoint_by_uri(self, tenant: str, uri: str) -> Checkpoint:
        """Return the checkpoint at `tinker://<run>/<segment>/<name>`: this tenant's, or a published one."""
        return self.readable_by_uri(tenant, uri)[1]

    def readable_by_uri(self, tenant: str, uri: str) -> tuple[str, Checkpoint]:
        """Return the checkpoint at `tinker://<run>/<segment>/<name>` that this tenant may read, and its owner."""
        run_id, checkpoint_id = self.parts(uri)
        try:
            return self.readable(tenant, run_id, checkpoint_id)
        except NotFound:
            raise NotFound(f"no checkpoint {shown(uri)}") from None

    @staticmethod
    def parts(uri: str) -> tuple[str, str]:
        """Take `tinker://<run>/<segment>/<name>` apart: the run, and the checkpoint's id in it."""
        parts = uri.removeprefix("tinker://").split("/")
        if not uri.startswith("tinker://") or len(parts) != 3 or not all(parts):
            raise InvalidRequest(f"{shown(uri)} is no checkpoint address; it is tinker://<run>/<segment>/<name>")
        return parts[0], f"{parts[1]}/{parts[2]}"

    @translated()
    def readable(self, tenant: str, run_id: str, checkpoint_id: str) -> tuple[str, Checkpoint]:
        """Return a checkpoint that this tenant may read, and its owner. "" as `tenant`: somebody without a key."""
        with self._redis.pipeline(transaction=False) as pipe:
            if tenant:
                pipe.hget(keys.checkpoints(tenant, run_id), checkpoint_id)
            pipe.hget(keys.published(run_id), checkpoint_id)
            *own, owner = pipe.execute()
        if any(own):
            return tenant, _living(own[0], run_id, checkpoint_id)
        if owner is None:
            raise _unknown(run_id, checkpoint_id)
        row = self._redis.hget(keys.checkpoints(owner.decode(), run_id), checkpoint_id)
        found = _living(row, run_id, checkpoint_id)
        if not found.public:
            raise _unknown(run_id, checkpoint_id)
        return owner.decode(), found

    @translated()
    def checkpoints(
        self, tenant: str, run_id: str | None, limit: int, offset: int, *, without: Container[str] = ()
    ) -> tuple[list[Checkpoint], int]:
        """Return a page of the tenant's own checkpoints, newest first, and how many there are.

        `run_id` None means those of all its runs; an unknown run is NotFound. The kinds in `without` are left out.
        """
        if run_id is not None:
            self._require_run(tenant, run_id)
            run_ids = [run_id]
        else:
            run_ids = [member.decode() for member in self._redis.zrange(keys.runs(tenant), 0, -1)]
        return _page((row for _, row in self._rows(tenant, run_ids)), limit, offset, without)

    @translated()
    def checkpoints_of(self, tenant: str, run_ids: list[str]) -> list[Checkpoint]:
        """Return the checkpoints of some of the tenant's runs, newest first."""
        rows = [row for _, row in self._rows(tenant, run_ids)]
        return _page(rows, len(rows), 0)[0]

    def published(self, run_id: str) -> tuple[str, list[Checkpoint]]:
        """Return the owner of a run and those of its checkpoints that everybody may read, newest first; "" if none."""
        return self.published_of([run_id]).get(run_id, ("", []))

    @translated()
    def published_of(self, run_ids: Sequence[str]) -> dict[str, tuple[str, list[Checkpoint]]]:
        """Return the same of those runs that have such checkpoints."""
        with self._redis.pipeline(transaction=False) as pipe:
            for run_id in run_ids:
                pipe.hgetall(keys.published(run_id))
            listed = {run_id: row for run_id, row in zip(run_ids, pipe.execute(), strict=True) if row}
        owners = {run_id: next(iter(row.values())).decode() for run_id, row in listed.items()}
        with self._redis.pipeline(transaction=False) as pipe:
            for run_id, row in listed.items():
                pipe.hmget(keys.checkpoints(owners[run_id], run_id), list(row))
            found = {}
            for run_id, rows in zip(listed, pipe.execute(), strict=True):
                public = [each for each in _page(filter(None, rows), len(rows), 0)[0] if each.public]
                if public:
                    found[run_id] = owners[run_id], public
        return found

    @translated()
    def published_runs(self) -> list[str]:
        """Return the runs that have a published checkpoint, the latest published first."""
        return [member.decode() for member in self._redis.zrevrange(keys.PUBLISHED, 0, -1)]

    @translated()
    def tenants(self) -> list[str]:
        """Return the tenants that ever opened a session or got a key."""
        return walk.tenants(self._store)

    @translated()
    def owner_of(self, run_id: str) -> str:
        """Return whose run this is: for operators, never for another tenant."""
        for tenant in self.tenants():
            if self._redis.hexists(keys.run(tenant, run_id), "record"):
                return tenant
        raise NotFound(f"no run {run_id!r}")

    # change

    @translated()
    def set_expiry(self, tenant: str, run_id: str, checkpoint_id: str, expires_at: float | None) -> Checkpoint:
        """Keep a checkpoint until then (unix seconds), or, with None, until it is deleted. Only its row changes."""
        return self._swap(tenant, run_id, checkpoint_id, lambda found: replace(found, expires_at=expires_at).to_json())

    @translated()
    def set_public(self, tenant: str, run_id: str, checkpoint_id: str, *, public: bool) -> Checkpoint:
        """Let every tenant read a checkpoint, or its owner alone."""
        return self._swap(tenant, run_id, checkpoint_id, lambda found: replace(found, public=public).to_json())

    @translated()
    def delete_checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Forget a checkpoint and return what it was. Its directory stays until nobody can need it."""
        return self._swap(tenant, run_id, checkpoint_id, lambda _: "")

    @translated()
    def expire(self) -> int:
        """Forget the checkpoints whose time is over, by the store's clock; return how many."""
        now, expired = self._store.now(), 0
        for tenant in self.tenants():
            run_ids = [run_id.decode() for run_id in self._redis.zrange(keys.runs(tenant), 0, -1)]
            for run_id, row in self._rows(tenant, run_ids):
                found = Checkpoint.from_json(row)
                if found.expires_at is not None and found.expires_at <= now:
                    # A row that was changed meanwhile has another end, or is another checkpoint.
                    swapped = self._store.script("checkpoint_swap")(tenant, run_id, found.checkpoint_id, row, "")
                    expired += swapped == b"OK"
        return expired

    # copy

    def earlier_copy(self, tenant: str, run_id: str, *, idempotency_key: str, digest: str) -> Copy | None:
        """Return the copy that this key, or this run's number, was used for already; None if neither was.

        Raises:
            KeyReused: it was used for something else.
        """
        session_id = keys.session_of(run_id)
        return self._copy(tenant, session_id, "", run_id, "", "", "", "", "", digest, _key_digest(idempotency_key))

    @translated()
    def announce_copy(self, directory: str) -> None:
        """Have a directory deleted after a while, unless a registered copy names it by then."""
        self._redis.zadd(keys.DROPPED, {directory: self._store.now()})

    def register_copy(
        self,
        tenant: str,
        run: Run,
        checkpoint: Checkpoint,
        session: Session | None,
        *,
        idempotency_key: str,
        digest: str,
    ) -> Copy:
        """Register `checkpoint`, whose files are there, as all that `run` holds; `session` None: its session exists.

        Returns the earlier copy where there is one: its directory isn't this checkpoint's then.

        Raises:
            KeyReused, NotFound, Gone: the number, the key or the session can't be used; nothing was changed.
            QuotaExceeded: it would be more than the tenant may store; nothing was changed.
        """
        opened = "" if session is None else session.to_json()
        copied = self._copy(
            tenant, run.session_id, opened, run.run_id, run.slug, run.to_json(), checkpoint.checkpoint_id,
            checkpoint.to_json(), checkpoint.uri, digest, _key_digest(idempotency_key),
        )  # fmt: skip
        assert copied is not None, "a copy that isn't there is registered"
        return copied

    def _copy(self, tenant: str, session_id: str, *rest: str) -> Copy | None:
        keys.check_tenant(tenant)
        status, *found = self._store.script("copy")(tenant, session_id, *rest, COPY_KEY_TTL_S)
        if status.startswith(b"QUOTA"):
            raise quotas.refusal(status)
        if status == b"KEYREUSED":
            raise KeyReused("that number or X-Idempotency-Key was used for something else; use another one")
        if status == b"NOTFOUND":
            raise NotFound(f"no session {session_id!r}")
        if status == b"GONE":
            raise Gone(f"session {session_id!r} is finished; open a new one")
        return Copy(uri=found[0].decode(), directory=found[1].decode()) if found else None

    # rows

    def _swap(self, tenant: str, run_id: str, checkpoint_id: str, change: Callable[[Checkpoint], str]) -> Checkpoint:
        """Write a checkpoint's row anew ("" removes it), as it stands in that moment; return what it was."""
        while True:
            row, found = self._owned(tenant, run_id, checkpoint_id)
            swapped = self._store.script("checkpoint_swap")(tenant, run_id, checkpoint_id, row, change(found))
            if swapped == b"OK":
                return found

    def _owned(self, tenant: str, run_id: str, checkpoint_id: str) -> tuple[bytes, Checkpoint]:
        row = self._redis.hget(keys.checkpoints(tenant, run_id), checkpoint_id)
        return row, _living(row, run_id, checkpoint_id)

    def _require_run(self, tenant: str, run_id: str) -> None:
        if not self._redis.hexists(keys.run(tenant, run_id), "record"):
            raise NotFound(f"no run {run_id!r}")

    def _rows(self, tenant: str, run_ids: list[str]) -> Iterable[tuple[str, bytes]]:
        for first in range(0, len(run_ids), _RUNS_AT_ONCE):
            some = run_ids[first : first + _RUNS_AT_ONCE]
            with self._redis.pipeline(transaction=False) as pipe:
                for run_id in some:
                    pipe.hvals(keys.checkpoints(tenant, run_id))
                for run_id, rows in zip(some, pipe.execute(), strict=True):
                    yield from ((run_id, row) for row in rows)


def asked_digest(*asked: object) -> str:
    """Return what tells one request for a copy from another."""
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def _key_digest(idempotency_key: str) -> str:
    """Return what is kept of a client's key; "copy" keeps it apart from the keys of sessions."""
    return hashlib.sha256(b"copy\0" + idempotency_key.encode("utf-8", "replace")).hexdigest() if idempotency_key else ""


def _page(rows: Iterable[bytes], limit: int, offset: int, without: Container[str] = ()) -> tuple[list[Checkpoint], int]:
    kept = [each for row in rows if not _expired(each := Checkpoint.from_json(row)) and each.kind not in without]
    kept.sort(key=lambda checkpoint: (-checkpoint.created, checkpoint.run_id, checkpoint.checkpoint_id))
    return kept[offset : offset + limit], len(kept)


def _living(row: bytes | None, run_id: str, checkpoint_id: str) -> Checkpoint:
    checkpoint = Checkpoint.from_json(row) if row else None
    if checkpoint is None or _expired(checkpoint):
        raise _unknown(run_id, checkpoint_id)
    return checkpoint


def _unknown(run_id: str, checkpoint_id: str) -> NotFound:
    return NotFound(f"no checkpoint {shown(f'tinker://{run_id}/{checkpoint_id}')}")


def _expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= time.time()
