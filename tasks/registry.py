"""The registry: which base models, sessions, runs, samplers and checkpoints exist.

Reads and writes their rows (`records` says what is in one). Another tenant's thing looks exactly like
none. Knows no HTTP and opens none of the directories that it names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from openrl.tasks import keys
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, shown
from openrl.tasks.records import BaseModel, Checkpoint, Row, Run, Sampler, Session, checkpoint_row, sampler_row
from openrl.tasks.store import Store, translated

__all__ = [
    "BaseModel", "Checkpoint", "Registry", "Row", "Run", "Sampler", "Session", "checkpoint_row", "sampler_row",
]  # fmt: skip

IDEMPOTENCY_TTL_S = 24 * 3600


class Registry:
    """Reads and writes the rows; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._redis = store.redis

    # base models

    @translated()
    def add_model(self, model: BaseModel) -> None:
        """Serve `model` from now on."""
        self._redis.hset(keys.MODELS, model.name, model.to_json())

    @translated()
    def remove_models(self) -> None:
        """Serve none; a start of the service adds its own."""
        self._redis.delete(keys.MODELS)

    @translated()
    def made_on(self) -> dict[str, str]:
        """Return, by base model, the digest of the weights that its runs were made on, where that is known."""
        return {name.decode(): digest.decode() for name, digest in self._redis.hgetall(keys.MADE_ON).items()}

    @translated()
    def model(self, name: str) -> BaseModel:
        """Return the model called `name`, or as the SDK does the one without the suffix after a colon."""
        row = self._redis.hget(keys.MODELS, name) or self._redis.hget(keys.MODELS, name.split(":", 1)[0])
        if row is None:
            served = ", ".join(sorted(model.name for model in self.models())) or "none"
            raise NotFound(f"base model {shown(name)} is not served here; served: {served}")
        return BaseModel.from_json(row)

    @translated()
    def models(self) -> list[BaseModel]:
        """Return the models served, by name."""
        rows = self._redis.hgetall(keys.MODELS).values()
        return sorted((BaseModel.from_json(row) for row in rows), key=lambda model: model.name)

    # sessions

    def create_session(
        self,
        tenant: str,
        *,
        idempotency_key: str = "",
        tags: Iterable[str] = (),
        user_metadata: Mapping[str, Any] | None = None,
        project_id: str | None = None,
        display_name: str | None = None,
    ) -> Session:
        """Open a session; the same non-empty key within a day returns the same one."""
        now = time.time()
        session = Session(
            session_id=f"s-{secrets.token_hex(16)}",
            tags=list(tags),
            user_metadata=dict(user_metadata or {}),
            created=now,
            last_seen=now,
            project_id=project_id,
            display_name=display_name,
        )
        digest = hashlib.sha256(idempotency_key.encode("utf-8", "replace")).hexdigest() if idempotency_key else ""
        keys.check_tenant(tenant)
        session_id = self._store.script("session_create")(
            tenant, session.session_id, session.to_json(), now, digest, IDEMPOTENCY_TTL_S
        )
        return self.session(tenant, session_id.decode())

    @translated()
    def session(self, tenant: str, session_id: str) -> Session:
        """Return a session of this tenant."""
        record, seen, finished = self._redis.hmget(
            keys.session(tenant, session_id), ["record", "last_seen", "finished"]
        )
        if record is None:
            raise NotFound(f"no session {session_id!r}")
        return Session.from_json(record, last_seen=float(seen or 0), finished=finished is not None)

    def heartbeat(self, tenant: str, session_id: str) -> None:
        """Note that the client lives. Raises Gone once the session is finished."""
        keys.session(tenant, session_id)
        answer = self._store.script("session_touch")(tenant, session_id, "")
        _raise_for_session(answer, session_id)

    def finish_session(self, tenant: str, session_id: str, reason: str) -> None:
        """Note that the client has gone. Finishing twice is fine; the first reason stays."""
        keys.session(tenant, session_id)
        answer = self._store.script("session_touch")(tenant, session_id, reason or "finished")
        if answer != b"GONE":
            _raise_for_session(answer, session_id)

    @translated()
    def sessions(self, tenant: str, limit: int, offset: int) -> tuple[list[Session], int]:
        """Return a page of sessions, newest first, and how many there are."""
        ids, total = self._page(keys.sessions(tenant), limit, offset)
        with self._redis.pipeline(transaction=False) as pipe:
            for session_id in ids:
                pipe.hmget(keys.session(tenant, session_id), ["record", "last_seen", "finished"])
            rows = pipe.execute()
        return [
            Session.from_json(record, last_seen=float(seen or 0), finished=finished is not None)
            for record, seen, finished in rows
        ], total

    @translated()
    def session_contents(self, tenant: str, session_id: str) -> tuple[list[str], list[str]]:
        """Return the ids of a session's runs and samplers, in the order of their numbers."""
        self.session(tenant, session_id)
        run_ids = self._redis.hkeys(keys.session_runs(tenant, session_id))
        sampler_ids = self._redis.hkeys(keys.session_samplers(tenant, session_id))
        return _by_number(run_ids), _by_number(sampler_ids)

    # runs

    @translated()
    def run(self, tenant: str, run_id: str) -> Run:
        """Return a run of this tenant."""
        row = self._redis.hgetall(keys.run(tenant, run_id))
        if b"record" not in row:
            raise NotFound(f"no run {run_id!r}")
        return _run(row)

    @translated()
    def runs(self, tenant: str, limit: int, offset: int) -> tuple[list[Run], int]:
        """Return a page of runs, newest first, and how many there are."""
        ids, total = self._page(keys.runs(tenant), limit, offset)
        with self._redis.pipeline(transaction=False) as pipe:
            for run_id in ids:
                pipe.hgetall(keys.run(tenant, run_id))
            return [_run(row) for row in pipe.execute()], total

    # samplers

    def create_sampler(
        self,
        tenant: str,
        *,
        session_id: str,
        seq: int,
        base_model: str,
        slug: str,
        model_path: str = "",
        adapter_dir: str = "",
        run_id: str = "",
        base_digest: str = "",
    ) -> Sampler:
        """Register a sampler under `(session, seq)`.

        Raises:
            KeyReused: that number already belongs to a different sampler or to an ephemeral save.
        """
        keys.session(tenant, session_id)
        if not 0 <= seq <= keys.MAX_RUN_SEQ:
            raise InvalidRequest(f"sampling_session_seq_id must be 0 to {keys.MAX_RUN_SEQ}, not {shown(seq)}")
        sampler = Sampler(
            sampler_id=keys.sampler_id(session_id, seq),
            session_id=session_id,
            base_model=base_model,
            slug=slug,
            model_path=model_path,
            adapter_dir=adapter_dir,
            run_id=run_id,
            created=time.time(),
            base_digest=base_digest,
        )
        digest = hashlib.sha256(json.dumps([base_model, model_path]).encode()).hexdigest()
        answer = self._store.script("sampler_create")(
            tenant, session_id, sampler.sampler_id, sampler.to_json(), digest, sampler.created
        )
        if answer == b"KEYREUSED":
            raise KeyReused(f"{sampler.sampler_id!r} already names a different sampler; use the next number")
        _raise_for_session(answer, session_id)
        return self.sampler(tenant, sampler.sampler_id)

    @translated()
    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Return a sampler of this tenant."""
        record = self._redis.hget(keys.sampler(tenant, sampler_id), "record")
        if record is None:
            raise NotFound(f"no sampler {sampler_id!r}")
        return Sampler.from_json(record)

    # checkpoints

    @translated()
    def checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Return a checkpoint of this tenant that hasn't expired."""
        return self._checkpoint(tenant, run_id, checkpoint_id)[1]

    def checkpoint_by_uri(self, tenant: str, uri: str) -> Checkpoint:
        """Return the checkpoint at `tinker://<run>/<segment>/<name>`."""
        parts = uri.removeprefix("tinker://").split("/")
        if not uri.startswith("tinker://") or len(parts) != 3 or not all(parts):
            raise InvalidRequest(f"{shown(uri)} is no checkpoint address; it is tinker://<run>/<segment>/<name>")
        try:
            return self.checkpoint(tenant, parts[0], f"{parts[1]}/{parts[2]}")
        except NotFound:
            raise NotFound(f"no checkpoint {shown(uri)}") from None

    @translated()
    def set_expiry(self, tenant: str, run_id: str, checkpoint_id: str, expires_at: float | None) -> None:
        """Keep a checkpoint until then (unix seconds), or, with None, until it is deleted."""
        self._swap(tenant, run_id, checkpoint_id, lambda found: replace(found, expires_at=expires_at).to_json())

    @translated()
    def delete_checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Forget a checkpoint and return what it was. Its directory stays."""
        return self._swap(tenant, run_id, checkpoint_id, lambda _: "")

    def _swap(self, tenant: str, run_id: str, checkpoint_id: str, change: Callable[[Checkpoint], str]) -> Checkpoint:
        """Write a checkpoint's row anew ("" removes it), as it stands in that moment; return what it was."""
        while True:
            row, found = self._checkpoint(tenant, run_id, checkpoint_id)
            swapped = self._store.script("checkpoint_swap")(tenant, run_id, checkpoint_id, row, change(found))
            if swapped == b"OK":
                return found

    def _checkpoint(self, tenant: str, run_id: str, checkpoint_id: str) -> tuple[bytes, Checkpoint]:
        row = self._redis.hget(keys.checkpoints(tenant, run_id), checkpoint_id)
        checkpoint = Checkpoint.from_json(row) if row else None
        if checkpoint is None or _expired(checkpoint):
            raise NotFound(f"no checkpoint {shown(f'tinker://{run_id}/{checkpoint_id}')}")
        return row, checkpoint

    @translated()
    def checkpoints(self, tenant: str, run_id: str | None, limit: int, offset: int) -> tuple[list[Checkpoint], int]:
        """Return a page of checkpoints, newest first, and how many there are.

        `run_id` None means those of all the tenant's runs; an unknown run is NotFound.
        """
        if run_id is not None:
            self.run(tenant, run_id)
            run_ids = [run_id]
        else:
            run_ids = [member.decode() for member in self._redis.zrange(keys.runs(tenant), 0, -1)]
        with self._redis.pipeline(transaction=False) as pipe:
            for each in run_ids:
                pipe.hvals(keys.checkpoints(tenant, each))
            rows = [row for values in pipe.execute() for row in values]
        kept = [checkpoint for row in rows if not _expired(checkpoint := Checkpoint.from_json(row))]
        kept.sort(key=lambda checkpoint: (-checkpoint.created, checkpoint.run_id, checkpoint.checkpoint_id))
        return kept[offset : offset + limit], len(kept)

    def _page(self, key: str, limit: int, offset: int) -> tuple[list[str], int]:
        total = self._redis.zcard(key)
        if limit <= 0:
            return [], total
        return [member.decode() for member in self._redis.zrevrange(key, offset, offset + limit - 1)], total


def _run(row: Mapping[bytes, bytes]) -> Run:
    """Build a Run from its hash: the record, and the newer values that commits wrote beside it."""
    newer: dict[str, Any] = {}
    for spec in fields(Run):
        text = row.get(spec.name.encode())
        if text is not None:
            newer[spec.name] = _PARSE[spec.type](text.decode())
    return Run.from_json(row[b"record"], **newer)


def _flag(text: str) -> bool:
    return text.lower() in ("1", "true")


_PARSE: dict[Any, Any] = {"str": str, "int": int, "float": float, "bool": _flag, "Mapping[str, Any]": json.loads}


def _by_number(ids: Iterable[bytes]) -> list[str]:
    return sorted((member.decode() for member in ids), key=lambda member: int(member.rpartition(":")[2]))


def _expired(checkpoint: Checkpoint) -> bool:
    return checkpoint.expires_at is not None and checkpoint.expires_at <= time.time()


def _raise_for_session(answer: bytes, session_id: str) -> None:
    if answer == b"NOTFOUND":
        raise NotFound(f"no session {session_id!r}")
    if answer == b"GONE":
        raise Gone(f"session {session_id!r} is finished; open a new one")
