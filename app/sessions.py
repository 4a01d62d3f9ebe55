"""Sessions: opened by a client, kept alive by its heartbeats, finished when it says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import marshmallow
from flask import request
from flask.views import MethodView
from marshmallow import ValidationError, fields, validate, validates_schema

from openrl.app import fine_tuning, wire
from openrl.app.context import registry, services, tenant
from openrl.app.schemas import CursorSchema, Metadata, PageSchema, Sent, Text, as_strings, tag
from openrl.app.search import ENDS
from openrl.tasks.registry import Session

blp = wire.Blueprint("sessions", __name__, description="Sessions: one for each client.")

IDEMPOTENCY_HEADER = "X-Idempotency-Key"


class CreateSessionSchema(Sent):
    """A client that begins."""

    tags = fields.List(Text(most_chars=256), load_default=list, validate=validate.Length(max=100))
    user_metadata = Metadata(load_default=dict)
    sdk_version = Text(load_default="", most_chars=256)
    project_id = Text(load_default=None, most_chars=256)
    display_name = Text(load_default=None, most_chars=256)
    type = tag("create_session")


class HeartbeatSchema(Sent):
    """A client that lives."""

    session_id = Text(required=True)
    type = tag("session_heartbeat")


class ReasonSchema(Sent):
    """How a client ended."""

    type = Text(load_default="success", most_chars=64)

    @validates_schema
    def known(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse an end that no search would find."""
        if data["type"] not in ENDS:
            raise ValidationError(f"must be {', '.join(ENDS)}", "type")


class FinishSchema(Sent):
    """A client that ends."""

    reason = fields.Nested(ReasonSchema, load_default=dict)
    detail = Text(load_default="")


class ProjectSchema(Sent):
    """Where a session belongs."""

    project_id = Text(required=True, most_chars=256)

    @validates_schema
    def named(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse to take a session out of its project."""
        if not data["project_id"].strip():
            raise ValidationError("must name a project; a session can be moved, not taken out", "project_id")


class SessionAnswerSchema(marshmallow.Schema):
    """A session's id."""

    type = fields.Constant("create_session")
    session_id = fields.String()


class HeartbeatAnswerSchema(marshmallow.Schema):
    """Nothing but the kind of the answer."""

    type = fields.Constant("session_heartbeat")


class SessionSchema(marshmallow.Schema):
    """What a session made."""

    training_run_ids = fields.List(fields.String())
    sampler_ids = fields.List(fields.String())
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String())
    display_name = fields.String(allow_none=True)


class SessionListSchema(marshmallow.Schema):
    """A part of the list of sessions."""

    sessions = fields.List(fields.String())
    cursor = fields.Nested(CursorSchema)


@blp.route("/create_session")
class CreateSessionView(MethodView):
    @blp.response(200, SessionAnswerSchema)
    @blp.arguments(CreateSessionSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Session:
        """Open a session; the same X-Idempotency-Key within a day returns the same one."""
        del asked["sdk_version"]
        asked.pop("type", None)
        fine_tuning.of_session(asked["tags"], asked["user_metadata"])
        key = request.headers.get(IDEMPOTENCY_HEADER, "")
        return registry().create_session(tenant(), idempotency_key=key, **asked)


@blp.route("/session_heartbeat")
class HeartbeatView(MethodView):
    @blp.response(200, HeartbeatAnswerSchema)
    @blp.arguments(HeartbeatSchema, location="wire")
    def post(self, asked: dict[str, str]) -> dict[str, str]:
        """Note that a session's client lives; 410 once it is finished."""
        registry().heartbeat(tenant(), asked["session_id"])
        return {}


@blp.route("/sessions/<session_id>/finish")
class FinishView(MethodView):
    @blp.response(200, marshmallow.Schema)
    @blp.arguments(FinishSchema, location="wire")
    def post(self, asked: dict[str, Any], session_id: str) -> dict[str, str]:
        """Note that a client has ended: its unfinished samples are cancelled, the operations of its runs are not."""
        reason = asked["reason"].get("type", "success")
        registry().finish_session(tenant(), session_id, reason, asked["detail"])
        services().cancelling.cancel_samples(tenant(), session_id)
        return {}


@blp.route("/sessions/<session_id>/project")
class ProjectView(MethodView):
    @blp.response(200, marshmallow.Schema)
    @blp.arguments(ProjectSchema, location="wire")
    def put(self, asked: dict[str, str], session_id: str) -> dict[str, str]:
        """Move a session, with its runs and samplers, into a project."""
        registry().move_session(tenant(), session_id, asked["project_id"])
        return {}


@blp.route("/sessions")
class SessionListView(MethodView):
    @blp.response(200, SessionListSchema)
    @blp.arguments(PageSchema, location="query")
    def get(self, page: dict[str, Any]) -> dict[str, Any]:
        """List one's own sessions, newest first."""
        found, total = registry().sessions(tenant(), page["limit"], page["offset"])
        return {"sessions": [session.session_id for session in found], "cursor": {**page, "total_count": total}}


@blp.route("/sessions/<session_id>")
class SessionView(MethodView):
    @blp.response(200, SessionSchema)
    @blp.arguments(PageSchema(only=("access_scope",)), location="query")
    def get(self, _scope: dict[str, str], session_id: str) -> dict[str, Any]:
        """Show what a session made."""
        session = registry().session(tenant(), session_id)
        run_ids, sampler_ids = registry().session_contents(tenant(), session_id)
        return {
            "training_run_ids": run_ids,
            "sampler_ids": sampler_ids,
            "user_metadata": as_strings(session.user_metadata),
            "display_name": session.display_name,
        }
