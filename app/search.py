"""Sessions by what they are: a search over a tenant's own, newest first.

Which sessions match is decided here, by pure functions; the registry only reads them, some at a time. A project is a
label that sessions carry: it exists as soon as one names it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import ValidationError, fields, validate, validates_schema

from openrl.app import wire
from openrl.app.context import registry, tenant
from openrl.app.schemas import TEXTS, Sent, Text, Time, Whole, as_strings
from openrl.tasks.errors import NotFound
from openrl.tasks.journal import SESSION_SILENT_S
from openrl.tasks.registry import Session

blp = wire.Blueprint("search", __name__, description="Sessions: search.")

ENDS = ("success", "errored", "interrupted")
"""How a client says that it ended."""

READ_AT_ONCE = 500
READ_MOST = 5000
"""Sessions looked at for one page. A page that ends here may have few or none, and still a `next_cursor`."""


class SearchOwnerSchema(Sent):
    """Whose sessions: `own`, `accessible` (the same here), or those of some users, who are tenants here."""

    type = Text(load_default="own", most_chars=64)
    owner_urns = fields.List(Text(most_chars=256), validate=validate.Length(min=1, max=10))

    @validates_schema
    def known(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse an unknown kind of owner, and users where none belong."""
        if data["type"] not in ("own", "accessible", "user"):
            raise ValidationError("must be own, accessible or user", "type")
        if (data["type"] == "user") != ("owner_urns" in data):
            raise ValidationError("goes with type user, and only with it", "owner_urns")


class SessionStatusSchema(Sent):
    """One status to look for."""

    type = Text(required=True, most_chars=64)
    reasons = fields.List(Text(most_chars=64), validate=validate.Length(min=1, max=len(ENDS)))

    @validates_schema
    def known(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse what no session can be."""
        if data["type"] not in ("active", "cancelled", "failed", "client_finished"):
            raise ValidationError("must be active, cancelled, failed or client_finished", "type")
        if "reasons" in data and data["type"] != "client_finished":
            raise ValidationError("goes with client_finished only", "reasons")
        if not set(data.get("reasons", ())) <= set(ENDS):
            raise ValidationError(f"must hold {', '.join(ENDS)} only", "reasons")


class SearchCursorSchema(Sent):
    """Where the next page begins: the last session of the one before."""

    last_created_at = fields.AwareDateTime(
        required=True, format="iso", error_messages={"invalid": "must be a time in ISO 8601, with its zone"}
    )
    last_session_id = Text(required=True, most_chars=256)


class SessionSearchSchema(Sent):
    """What a session must be. With both session_id and display_name, one of them is enough."""

    session_id = Text(load_default=None, most_chars=256)
    project_ids = fields.List(Text(most_chars=256), load_default=None, validate=validate.Length(max=1000))
    user_metadata = fields.Dict(keys=Text(), values=Text(), load_default=dict, validate=validate.Length(max=100))
    display_name = Text(load_default=None, most_chars=256)
    owner = fields.Nested(SearchOwnerSchema, load_default=lambda: {"type": "own"})
    statuses = fields.List(
        fields.Nested(SessionStatusSchema), load_default=None, validate=validate.Length(min=1, max=100)
    )
    limit = Whole(load_default=50, least=1, most=200)
    cursor = fields.Nested(SearchCursorSchema, load_default=None)


class SessionSummarySchema(marshmallow.Schema):
    """A session, as a search shows it. `status` is null when it is neither finished nor known to run."""

    session_id = fields.String(required=True)
    created_at = Time(required=True, attribute="created")
    owner = fields.String(required=True)
    project_id = fields.String(required=True)
    status = fields.Dict(allow_none=True)
    checkpoints_count = fields.Integer(required=True)
    display_name = fields.String(allow_none=True)
    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), metadata=TEXTS)
    checkpoint_storage_bytes = fields.Integer()


class SessionPageSchema(marshmallow.Schema):
    """A page of a search; without `next_cursor` it is the last one."""

    sessions = fields.List(fields.Nested(SessionSummarySchema), required=True)
    next_cursor = fields.Nested(SearchCursorSchema, allow_none=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a session must be, with None for what doesn't matter. `words` are of the display name, in lower case."""

    session_id: str | None
    words: tuple[str, ...] | None
    project_ids: Collection[str] | None
    user_metadata: Mapping[str, str]
    statuses: Collection[tuple[str, Collection[str]]] | None

    def matches(self, session: Session, now: float) -> bool:
        """Tell whether it is one of those that are searched for."""
        return (
            self._is_named(session)
            and (self.project_ids is None or (session.project_id or "") in self.project_ids)
            and self.user_metadata.items() <= as_strings(session.user_metadata).items()
            and self._has_status(status(session, now))
        )

    def _is_named(self, session: Session) -> bool:
        if self.session_id is None and self.words is None:
            return True
        name = (session.display_name or "").lower()
        by_name = self.words is not None and bool(name) and all(word in name for word in self.words)
        return by_name or session.session_id == self.session_id

    def _has_status(self, found: Mapping[str, Any] | None) -> bool:
        if self.statuses is None:
            return True
        return found is not None and any(
            found["type"] == kind and (not reasons or found["reason"]["type"] in reasons)
            for kind, reasons in self.statuses
        )


def status(session: Session, now: float) -> dict[str, Any] | None:
    """Say whether a session runs, or how its client ended it; None where neither is known."""
    if session.finished:
        said = session.end.get("type")
        reason = {"type": said if said in ENDS else "errored"}
        return {"type": "client_finished", "reason": reason, "detail": session.end.get("detail") or None}
    return {"type": "active"} if now - session.last_seen < SESSION_SILENT_S else None


@blp.route("/sessions/search")
class SearchView(MethodView):
    @blp.response(200, SessionPageSchema)
    @blp.arguments(SessionSearchSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Search one's own sessions, newest first."""
        owner = asked["owner"]
        if owner["type"] == "user" and tenant() not in owner["owner_urns"]:
            return {"sessions": [], "next_cursor": None}
        found, last = _page(_wanted(asked), asked["limit"], asked["cursor"])
        return {"sessions": _summaries(found), "next_cursor": last}


def _wanted(asked: Mapping[str, Any]) -> Wanted:
    name, statuses = asked["display_name"], asked["statuses"]
    return Wanted(
        session_id=asked["session_id"],
        words=tuple(name.lower().split()) if name is not None else None,
        project_ids=None if asked["project_ids"] is None else frozenset(asked["project_ids"]),
        user_metadata=asked["user_metadata"],
        statuses=None if statuses is None else [(one["type"], one.get("reasons", ())) for one in statuses],
    )


def _page(
    wanted: Wanted, limit: int, cursor: Mapping[str, Any] | None
) -> tuple[list[Session], Mapping[str, Any] | None]:
    """Return what matches behind the cursor, and the cursor of the next page, None where there is none."""
    now, last = time.time(), None
    found: list[Session] = []
    for looked_at, session in enumerate(_candidates(wanted, cursor)):
        if len(found) == limit or looked_at == READ_MOST:
            return found, last
        last = {"last_created_at": _moment(session), "last_session_id": session.session_id}
        if wanted.matches(session, now):
            found.append(session)
    return found, None


def _candidates(wanted: Wanted, cursor: Mapping[str, Any] | None) -> Iterator[Session]:
    """Yield the sessions that may match, newest first: all behind the cursor, or the one that is named."""
    behind = None if cursor is None else (_microseconds(cursor["last_created_at"]), cursor["last_session_id"])
    if wanted.session_id is not None and wanted.words is None:
        read = _named(wanted.session_id)
    else:
        read = _all(None if behind is None else (behind[0] + 1) / 1e6)
    for session in read:
        if behind is None or (session.created_us, session.session_id) < behind:
            yield session


def _named(session_id: str) -> Iterator[Session]:
    try:
        yield registry().session(tenant(), session_id)
    except NotFound:
        return


def _all(newest: float | None) -> Iterator[Session]:
    offset = 0
    while some := registry().sessions_before(tenant(), newest, READ_AT_ONCE, offset):
        yield from some
        offset += READ_AT_ONCE


def _summaries(sessions: list[Session]) -> list[dict[str, Any]]:
    now, stored = time.time(), registry().stored_by(tenant(), [session.session_id for session in sessions])
    return [
        {
            "session_id": session.session_id,
            "created": session.created,
            "owner": tenant(),
            "project_id": session.project_id or "",
            "status": status(session, now),
            "checkpoints_count": count,
            "display_name": session.display_name,
            "user_metadata": as_strings(session.user_metadata),
            "checkpoint_storage_bytes": size_bytes,
        }
        for session, (count, size_bytes) in zip(sessions, stored, strict=True)
    ]


def _moment(session: Session) -> datetime:
    seconds, microseconds = divmod(session.created_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=microseconds)


def _microseconds(moment: datetime) -> int:
    """Return a time in whole microseconds since the epoch, which a float of seconds can't hold exactly."""
    whole = moment.replace(microsecond=0)
    return round(whole.timestamp()) * 1_000_000 + moment.microsecond
