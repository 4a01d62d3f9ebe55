"""The registry: which base models, sessions, runs, samplers and checkpoints exist.

Reads and writes their rows (`records` says what is in one; those of checkpoints have their own module). Another
tenant's thing looks exactly like none. Knows no HTTP and opens none of the directories that it names.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from openrl.tasks import keys
from openrl.tasks.checkpoints import Checkpoints
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, shown
from openrl.tasks.records import BaseModel, Checkpoint, Row, Run, Sampler, Session, checkpoint_row, sampler_row
from openrl.tasks.store import translated

__all__ = [
    "BaseModel", "Checkpoint", "Registry", "Row", "Run", "Sampler", "Session", "checkpoint_row", "sampler_row",
]  # fmt: skip

IDEMPOTENCY_TTL_S = 24 * 3600

_SESSION = ("record", "last_seen", "finished", "reason", "project")
_READ_AT_ONCE = 500


class Registry(Checkpoints):
    """Reads and writes the rows; one per process, safe to share between threads."""

    # base models

    @translated()
    def add_model(self, model: BaseModel) -> None:
        """Serve `model` from now on."""
        self._redis.hset(keys.MODELS, model.name, model.to_json())

    @translated()
    def note_sampler(self, model: BaseModel, *, rank: int, head: bool) -> None:
        """Note which adapters the samplers of `model` serve, while the weights that are served are still those."""

        def note(pipe: Any) -> None:
            row = pipe.hget(keys.MODELS, model.name)
            now = None if row is None else BaseModel.from_json(row)
            pipe.multi()
            if now is not None and (now.path, now.digest) == (model.path, model.digest):
                pipe.hset(keys.MODELS, model.name, replace(now, sampler_rank=rank, sampler_head=head).to_json())

        # Watched: a service that starts meanwhile writes rows of its own.
        self._redis.transaction(note, keys.MODELS)

    @translated()
    def remove_models(self) -> None:
        """Serve none; a start of the service adds its own."""
        self._redis.delete(keys.MODELS)

    @translated()
    def serve(self, models: Iterable[BaseModel]) -> None:
        """Serve these models and no others, from one moment to the next."""
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.delete(keys.MODELS)
            for model in models:
                pipe.hset(keys.MODELS, model.name, model.to_json())
            pipe.execute()

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
        now = round(time.time(), 6)
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
        session = _session(self._redis.hmget(keys.session(tenant, session_id), _SESSION))
        if session is None:
            raise NotFound(f"no session {session_id!r}")
        return session

    def heartbeat(self, tenant: str, session_id: str) -> None:
        """Note that the client lives. Raises Gone once the session is finished."""
        keys.session(tenant, session_id)
        answer = self._store.script("session_touch")(tenant, session_id, "")
        _raise_for_session(answer, session_id)

    def finish_session(self, tenant: str, session_id: str, reason: str, detail: str = "") -> None:
        """Note that the client has gone. Finishing twice is fine; the first reason stays."""
        keys.session(tenant, session_id)
        end = json.dumps({"type": reason, "detail": detail})
        answer = self._store.script("session_touch")(tenant, session_id, end)
        if answer != b"GONE":
            _raise_for_session(answer, session_id)

    @translated()
    def sessions(self, tenant: str, limit: int, offset: int) -> tuple[list[Session], int]:
        """Return a page of sessions, newest first, and how many there are."""
        ids, total = self._page(keys.sessions(tenant), limit, offset)
        return self._sessions(tenant, ids), total

    @translated()
    def sessions_before(self, tenant: str, created: float | None, limit: int, offset: int) -> list[Session]:
        """Return a page of the sessions that were opened at `created` or before, newest first. None: of all."""
        newest = "+inf" if created is None else created
        ids = self._redis.zrevrangebyscore(keys.sessions(tenant), newest, "-inf", start=offset, num=limit)
        return self._sessions(tenant, [member.decode() for member in ids])

    @translated()
    def sessions_by_id(self, tenant: str, session_ids: Iterable[str]) -> dict[str, Session]:
        """Return those of some sessions that there are."""
        ids = list(dict.fromkeys(session_ids))
        return {
            session.session_id: session
            for first in range(0, len(ids), _READ_AT_ONCE)
            for session in self._sessions(tenant, ids[first : first + _READ_AT_ONCE])
        }

    def _sessions(self, tenant: str, ids: Sequence[str]) -> list[Session]:
        with self._redis.pipeline(transaction=False) as pipe:
            for session_id in ids:
                pipe.hmget(keys.session(tenant, session_id), _SESSION)
            return [found for row in pipe.execute() if (found := _session(row)) is not None]

    @translated()
    def move_session(self, tenant: str, session_id: str, project_id: str) -> None:
        """Put a session, and all that it made, into a project."""
        self.session(tenant, session_id)
        self._redis.hset(keys.session(tenant, session_id), "project", project_id)

    @translated()
    def session_contents(self, tenant: str, session_id: str) -> tuple[list[str], list[str]]:
        """Return the ids of a session's runs and samplers, in the order of their numbers."""
        self.session(tenant, session_id)
        run_ids = self._redis.hkeys(keys.session_runs(tenant, session_id))
        sampler_ids = self._redis.hkeys(keys.session_samplers(tenant, session_id))
        return _by_number(run_ids), _by_number(sampler_ids)

    @translated()
    def stored_by(self, tenant: str, session_ids: Sequence[str]) -> list[tuple[int, int]]:
        """Return, for each session, how many checkpoints its runs have and how many bytes those take."""
        with self._redis.pipeline(transaction=False) as pipe:
            for session_id in session_ids:
                pipe.hkeys(keys.session_runs(tenant, session_id))
            run_ids = [run_id.decode() for members in pipe.execute() for run_id in members]
        sizes: dict[str, list[int]] = {session_id: [] for session_id in session_ids}
        for checkpoint in self.checkpoints_of(tenant, run_ids):
            sizes[keys.session_of(checkpoint.run_id)].append(checkpoint.size_bytes)
        return [(len(sizes[session_id]), sum(sizes[session_id])) for session_id in session_ids]

    # runs

    @translated()
    def run(self, tenant: str, run_id: str) -> Run:
        """Return a run of this tenant."""
        row = self._redis.hgetall(keys.run(tenant, run_id))
        if b"record" not in row:
            raise NotFound(f"no run {run_id!r}")
        return _run(row)

    @translated()
    def runs(self, tenant: str, limit: int, offset: int, *, project_id: str | None = None) -> tuple[list[Run], int]:
        """Return a page of runs, newest first, and how many there are: all, or those of one project."""
        if project_id is None:
            ids, total = self._page(keys.runs(tenant), limit, offset)
        else:
            mine = self._runs_in(tenant, project_id)
            ids, total = mine[offset : offset + limit], len(mine)
        return self.runs_by_id((tenant, run_id) for run_id in ids), total

    @translated()
    def runs_by_id(self, places: Iterable[tuple[str, str]]) -> list[Run]:
        """Return those of some runs (tenant, run id) that there are."""
        with self._redis.pipeline(transaction=False) as pipe:
            for tenant, run_id in places:
                pipe.hgetall(keys.run(tenant, run_id))
            return [_run(row) for row in pipe.execute() if b"record" in row]

    def _runs_in(self, tenant: str, project_id: str) -> list[str]:
        """Return the ids of a project's runs, newest first: a run is where its session is."""
        ids = [member.decode() for member in self._redis.zrevrange(keys.runs(tenant), 0, -1)]
        homes = self.sessions_by_id(tenant, map(keys.session_of, ids))
        found = {session_id for session_id, session in homes.items() if session.project_id == project_id}
        return [run_id for run_id in ids if keys.session_of(run_id) in found]

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
        weights_digest: str = "",
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
            weights_digest=weights_digest,
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
        record, dropped = self._redis.hmget(keys.sampler(tenant, sampler_id), ["record", "dropped"])
        if dropped is not None:
            raise NotFound(
                f"the weights of sampler {sampler_id!r} were dropped: it was not used for OPENRL_VERSION_TTL_S, or its "
                "run's took more than OPENRL_VERSION_BYTES, and it was none of the run's last OPENRL_VERSION_LAST; "
                "save the weights for sampling again, under a name to keep them"
            )
        if record is None:
            raise NotFound(f"no sampler {sampler_id!r}")
        return Sampler.from_json(record)

    def _page(self, key: str, limit: int, offset: int) -> tuple[list[str], int]:
        total = self._redis.zcard(key)
        if limit <= 0:
            return [], total
        return [member.decode() for member in self._redis.zrevrange(key, offset, offset + limit - 1)], total


def _session(row: Sequence[bytes | None]) -> Session | None:
    """Build a Session from the fields `_SESSION` of its hash; None where there is none."""
    record, seen, finished, reason, project = row
    if record is None:
        return None
    newer: dict[str, Any] = {} if project is None else {"project_id": project.decode()}
    end = json.loads(reason or b"{}")
    return Session.from_json(record, last_seen=float(seen or 0), finished=finished is not None, end=end, **newer)


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


def _raise_for_session(answer: bytes, session_id: str) -> None:
    if answer == b"NOTFOUND":
        raise NotFound(f"no session {session_id!r}")
    if answer == b"GONE":
        raise Gone(f"session {session_id!r} is finished; open a new one")
