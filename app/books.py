"""A tenant's books: what it used, what it stores, what was done to its keys and checkpoints.

The shapes are the SDK's. There are no prices here, so no cost is named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import ValidationError, fields, validate, validates_schema

from openrl.app import wire
from openrl.app.context import registry, services, tenant
from openrl.app.schemas import TEXTS, Sent, Text, Time, as_strings
from openrl.tasks import audit, keys
from openrl.tasks.errors import NotFound
from openrl.tasks.usage import HOUR_S, Usage, Used

blp = wire.Blueprint("books", __name__, description="Usage, storage, the audit log: for keys with the scope admin.")

MOST_DAYS = 14
GIGABYTE = 10**9
ALL = 10_000_000

TOKENS = {"trained_tokens": "training", "forward_tokens": "training"}
"""Both kinds of passes are one on the wire."""


class WindowSchema(Sent):
    """Which hours: from one full hour (UTC) to another, at most 14 days."""

    starting_on = fields.AwareDateTime(required=True, format="iso", default_timezone=UTC)
    ending_before = fields.AwareDateTime(required=True, format="iso", default_timezone=UTC)

    @validates_schema
    def whole_hours(self, data: Mapping[str, datetime], **_options: Any) -> None:
        """Refuse other times than the SDK says."""
        start, end = data["starting_on"], data["ending_before"]
        for name, at in data.items():
            if not 0 <= at.timestamp() < 1e11 or at.timestamp() % HOUR_S:
                raise ValidationError("must be a full hour (UTC)", name)
        if start > datetime.now(UTC):
            raise ValidationError("must not be in the future", "starting_on")
        if not timedelta(0) < end - start <= timedelta(days=MOST_DAYS):
            raise ValidationError(f"must be after starting_on, by {MOST_DAYS} days at most", "ending_before")


class StorageQuerySchema(Sent):
    """Of which project; all of them where it is absent."""

    project_id = Text(most_chars=256)


class AuditQuerySchema(Sent):
    """Which events, of which day (UTC); today where it is absent."""

    event_type = fields.String(
        load_default="all",
        validate=validate.OneOf(list(audit.KINDS), error=f"must be {' or '.join(audit.KINDS)}"),
    )
    day = fields.Date(
        format="iso", load_default=None, validate=validate.Range(min=date(1970, 1, 1), error="must be {min} or later")
    )


class UsageEventSchema(marshmallow.Schema):
    """What one session used of one base model in one hour. `event_info` has its `type` and how much."""

    bucket_start = Time()
    bucket_end = Time()
    base_model = fields.String(allow_none=True)
    session_id = fields.String(allow_none=True)
    project_id = fields.String(allow_none=True)
    event_info = fields.Dict(required=True)


class UsageSessionSchema(marshmallow.Schema):
    """What a session was opened with."""

    user_metadata = fields.Dict(keys=fields.String(), values=fields.String(), metadata=TEXTS)


class UsageSchema(marshmallow.Schema):
    """Usage by the hour, and the sessions that it is of."""

    data = fields.List(fields.Nested(UsageEventSchema), required=True)
    sessions = fields.Dict(keys=fields.String(), values=fields.Nested(UsageSessionSchema), required=True)


class StorageItemSchema(marshmallow.Schema):
    """What a project's checkpoints take."""

    project_id = fields.String(allow_none=True)
    checkpoint_count = fields.Integer(required=True)
    size_bytes = fields.Integer(required=True)
    size_gigabytes = fields.Float(required=True)


class StorageSchema(marshmallow.Schema):
    """What a tenant's checkpoints take."""

    data = fields.List(fields.Nested(StorageItemSchema), required=True)


class AuditEntrySchema(marshmallow.Schema):
    """What was done. `event` is `<thing>_<deed>`."""

    timestamp = Time(attribute="at", required=True)
    event = fields.String(required=True)
    event_details = fields.Dict(keys=fields.String(), values=fields.String(), attribute="details", metadata=TEXTS)


class AuditSchema(marshmallow.Schema):
    """Entries, oldest first."""

    entries = fields.List(fields.Nested(AuditEntrySchema), required=True)


@blp.route("/billing/usage/events")
class UsageView(MethodView):
    @blp.response(200, UsageSchema)
    @blp.arguments(WindowSchema, location="query")
    def get(self, window: dict[str, datetime]) -> dict[str, Any]:
        """List what was used, by hour, session, base model and kind."""
        since, before = window["starting_on"].timestamp(), window["ending_before"].timestamp()
        rows = list(Usage(services().store).between(tenant(), since, before))
        sessions = registry().sessions_by_id(tenant(), (row.session_id for row in rows if row.session_id))
        names = _base_models(rows)
        data = [_event(key, amount, names, sessions) for key, amount in _grouped(rows).items()]
        data.sort(key=lambda event: (event["bucket_start"], -event["event_info"].get("token_count", -1)))
        told = {ident: {"user_metadata": as_strings(each.user_metadata)} for ident, each in sessions.items()}
        return {"data": data, "sessions": told}


@blp.route("/billing/usage/checkpoints/current")
class StorageView(MethodView):
    @blp.response(200, StorageSchema)
    @blp.arguments(StorageQuerySchema, location="query")
    def get(self, asked: dict[str, str]) -> dict[str, Any]:
        """Say what checkpoints take now, by project."""
        found = registry().checkpoints(tenant(), None, ALL, 0)[0]
        sessions = registry().sessions_by_id(tenant(), (keys.session_of(each.run_id) for each in found))
        sizes: dict[str | None, list[int]] = defaultdict(list)
        for each in found:
            session = sessions.get(keys.session_of(each.run_id))
            sizes[session.project_id if session else None].append(each.size_bytes)
        wanted = {asked["project_id"]} if "project_id" in asked else set(sizes)
        return {"data": [_stored(project, sizes[project]) for project in sorted(wanted & set(sizes), key=str)]}


@blp.route("/audit")
class AuditView(MethodView):
    @blp.response(200, AuditSchema)
    @blp.arguments(AuditQuerySchema, location="query")
    def get(self, asked: dict[str, Any]) -> dict[str, Any]:
        """List what was done to keys, checkpoints and quotas on one day."""
        since = day_start(asked["day"])
        kind = asked["event_type"]
        found = audit.entries(services().store, tenant(), since=since, before=since + 24 * HOUR_S, kind=kind)
        return {"entries": found}


def day_start(day: date | None) -> float:
    """Return when a day begins (UTC), in unix seconds; None is today."""
    day = day or datetime.now(UTC).date()
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def _grouped(rows: list[Used]) -> dict[tuple[int, str, str, str], int]:
    """Add up by hour, base model, session and what is counted; stored bytes belong to no session."""
    sums: dict[tuple[int, str, str, str], int] = defaultdict(int)
    for row in rows:
        name = TOKENS.get(row.name, row.name)
        if name in _KINDS:
            sums[row.hour, row.slug, "" if name == "byte_seconds" else row.session_id, name] += row.amount
    return dict(sums)


def _event(
    key: tuple[int, str, str, str], amount: int, names: Mapping[str, str], sessions: Mapping[str, Any]
) -> dict[str, Any]:
    hour, slug, session_id, name = key
    session = sessions.get(session_id)
    return {
        "bucket_start": hour,
        "bucket_end": hour + HOUR_S,
        "base_model": names.get(slug),
        "session_id": session_id or None,
        "project_id": session.project_id if session else None,
        "event_info": _KINDS[name](amount),
    }


_KINDS = {
    "training": lambda amount: {"type": "training", "token_count": amount},
    "prompt_tokens": lambda amount: {"type": "sampling_prefill", "cached": False, "token_count": amount},
    "sampled_tokens": lambda amount: {"type": "sampling_sample", "token_count": amount},
    "checkpoints": lambda amount: {"type": "checkpoint", "count": amount},
    "byte_seconds": lambda amount: {"type": "storage", "free": False, "gigabyte_hours": amount / GIGABYTE / HOUR_S},
}


def _base_models(rows: list[Used]) -> dict[str, str]:
    """Return the names behind slugs: of what is served, and of runs whose base model no longer is."""
    names = {model.slug: model.name for model in registry().models()}
    for row in rows:
        if row.slug not in names and row.run_id:
            try:
                names[row.slug] = registry().run(tenant(), row.run_id).base_model
            except NotFound:
                continue
    return names


def _stored(project: str | None, sizes: list[int]) -> dict[str, Any]:
    total = sum(sizes)
    return {
        "project_id": project,
        "checkpoint_count": len(sizes),
        "size_bytes": total,
        "size_gigabytes": total / GIGABYTE,
    }
