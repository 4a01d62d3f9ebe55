"""Copies of checkpoints: into a project of one's own, or a session's next run, durable before they are answered.

A copy shares its files with the source where the disk allows it, and lives on its own: it has its own end, and stays
when the source is deleted. It is all that its run holds, and that run can't be trained on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import marshmallow
from flask import request
from flask.views import MethodView
from marshmallow import ValidationError, fields, validates_schema

from openrl.app import wire
from openrl.app.access import readable, token_of
from openrl.app.auth import caller
from openrl.app.checkpoints import TTL_LEAST_S, TTL_MOST_S
from openrl.app.context import registry, services, tenant
from openrl.app.greenlets import off_loop
from openrl.app.schemas import Sent, Text, Whole
from openrl.app.sessions import IDEMPOTENCY_HEADER
from openrl.tasks import audit, keys
from openrl.tasks.checkpoints import COPIED, Copy, asked_digest
from openrl.tasks.errors import InvalidRequest, NotFound, StoreFault, StoreUnavailable, shown
from openrl.tasks.registry import Checkpoint, Run, Session
from openrl.workers.weights import layout

blp = wire.Blueprint("copies", __name__, description="Copies of checkpoints.")

DESTINATION = ("destination_project_id", "session_id", "model_seq_id")
_VERSION_BITS = 62


class CopySchema(Sent):
    """What to copy, and where to: a project, or a run's number in a session that is there."""

    source_path = Text(required=True)
    destination_project_id = Text(most_chars=256)
    session_id = Text()
    model_seq_id = Whole()
    ttl_seconds = Whole(least=TTL_LEAST_S, most=TTL_MOST_S, load_default=None)
    weights_access_token = Text(load_default=None)

    @validates_schema
    def one_destination(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse a body that names both destinations, neither, or half of one."""
        named = set(DESTINATION) & data.keys()
        if named not in ({"destination_project_id"}, {"session_id", "model_seq_id"}):
            raise ValidationError("must have either destination_project_id, or session_id and model_seq_id")


class CopiedSchema(marshmallow.Schema):
    """The copy's address."""

    tinker_path = fields.String(attribute="uri", required=True)


@blp.route("/copy_weights")
class CopyView(MethodView):
    @blp.response(200, CopiedSchema)
    @blp.arguments(CopySchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Copy:
        """Copy a checkpoint that one may read; the same X-Idempotency-Key within a day gives the same copy."""
        return _copy(asked, request.headers.get(IDEMPOTENCY_HEADER, ""))


def _copy(asked: Mapping[str, Any], idempotency_key: str) -> Copy:
    session = None if "session_id" in asked else _new_session(asked["destination_project_id"])
    session_id = (session or registry().session(tenant(), asked["session_id"])).session_id
    run_id = keys.run_id(session_id, asked.get("model_seq_id", 0))
    content = (asked.get(name) for name in ("source_path", "ttl_seconds", *DESTINATION))
    once = {"idempotency_key": idempotency_key, "digest": asked_digest(*content)}
    earlier = registry().earlier_copy(tenant(), run_id, **once)
    if earlier is not None:
        return earlier
    token = token_of(asked["weights_access_token"])
    owner, source = readable(asked["source_path"], token)
    if source.weights_digest:
        raise InvalidRequest(
            f"source_path {shown(source.uri)} is a version of a full run, which is read with those before it: "
            "copy a training checkpoint of the run"
        )
    run = _holder(registry().run(owner, source.run_id), source, session_id, run_id)
    made = _made(source, run, asked["ttl_seconds"])
    try:
        _link(source, made)
        if readable(asked["source_path"], token)[1].directory != source.directory:
            raise _gone(source)  # overwritten meanwhile
        registered = registry().register_copy(tenant(), run, made, session, **once)
    except (StoreUnavailable, StoreFault):
        raise  # it may be registered: the sweep removes the files if no row names them
    except BaseException:
        _remove(made)
        raise
    if registered.directory == made.directory:
        details = {"tinker_path": made.uri, "source_path": source.uri}
        audit.record(services().store, tenant(), "checkpoint_copied", actor=caller().actor, **details)
    else:  # another request with the same key was first
        _remove(made)
    return registered


def _new_session(project_id: str) -> Session:
    now = round(time.time(), 6)
    return Session(session_id=f"s-{secrets.token_hex(16)}", created=now, last_seen=now, project_id=project_id)


def _holder(origin: Run, source: Checkpoint, session_id: str, run_id: str) -> Run:
    """Return the run that is to hold the copy: what it says of itself is the checkpoint's."""
    return Run(
        tenant=tenant(),
        run_id=run_id,
        session_id=session_id,
        base_model=source.base_model,
        slug=keys.base_slug(origin.slug),
        rank=source.rank,
        seed=0,
        train_attn=source.train_attn,
        train_mlp=source.train_mlp,
        train_unembed=source.train_unembed,
        user_metadata=dict(origin.user_metadata),
        state=COPIED,
        base_digest=source.base_digest,
        fine_tuning=source.fine_tuning,
    )


def _made(source: Checkpoint, run: Run, ttl_s: int | None) -> Checkpoint:
    now = time.time()
    directory = layout.copy_dir(run.tenant, run.run_id, source.checkpoint_id, secrets.randbits(_VERSION_BITS))
    ends = None if ttl_s is None else now + ttl_s
    return replace(source, run_id=run.run_id, directory=directory, created=now, expires_at=ends, public=False)


def _link(source: Checkpoint, made: Checkpoint) -> None:
    """Put the files of a checkpoint into the directory of its copy, durably.

    A deletion takes the row first and the files later: whoever finds the row afterwards has all the files.
    """
    data_dir = services().store.settings.data_dir
    registry().announce_copy(made.directory)
    try:
        origin = layout.existing(data_dir, source.directory)
        off_loop(layout.link, origin, layout.resolve(data_dir, made.directory), large=True)
    except (NotFound, FileNotFoundError):
        raise _gone(source) from None


def _remove(made: Checkpoint) -> None:
    layout.remove(layout.resolve(services().store.settings.data_dir, made.directory))


def _gone(source: Checkpoint) -> NotFound:
    return NotFound(f"no checkpoint {shown(source.uri)}")
