"""A session's timeline as a trace that ui.perfetto.dev and chrome://tracing open: JSON in the Trace Event Format.

Nothing is built beforehand: the link leads to a view that reads the journal and streams what it finds. Each operation
is an interval from its submission to its end; a process stands for a run or a sampler.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import marshmallow
from flask import Response
from flask.views import MethodView
from marshmallow import fields

from openrl.app import wire
from openrl.app.context import registry, services, tenant
from openrl.app.links import LinkSchema, check, link
from openrl.app.schemas import ErrorSchema
from openrl.tasks.operations import JSON
from openrl.tasks.timeline import Span, Timeline

blp = wire.Blueprint("traces", __name__, description="Sessions: their timelines.")

KIND = "GET trace"
"""What a link to a trace is signed as, so that it leads to nothing else."""

EVENTS_AT_ONCE = 200


class TraceSchema(marshmallow.Schema):
    """Where the trace is; here it is ready at once."""

    status = fields.Constant("ready")
    url = fields.String(required=True)


@blp.route("/sessions/<session_id>/trace_export")
class TraceExportView(MethodView):
    @blp.response(200, TraceSchema)
    def get(self, session_id: str) -> dict[str, str]:
        """Give a link to a session's trace, which works for a short time without a key."""
        registry().session(tenant(), session_id)
        expires = int(time.time()) + services().settings.download_link_ttl_s
        return {"url": link("traces", tenant(), session_id, expires, kind=KIND)}


@blp.route("/traces/<owner>/<session_id>")
class TraceView(MethodView):
    @blp.doc(security=[])
    @blp.doc(responses={"200": {"content": {JSON: {"schema": {"type": "object"}}}}})
    @blp.response(200, description="The trace, in the Trace Event Format.", content_type=JSON)
    @blp.alt_response(401, schema=ErrorSchema, description="The address has no signature.")
    @blp.alt_response(403, schema=ErrorSchema, description="The link was altered.")
    @blp.arguments(LinkSchema, location="query")
    def get(self, sent: dict[str, str], owner: str, session_id: str) -> Response:
        """Stream a session's trace to the holder of its link."""
        check(sent, owner, session_id, again="GET .../trace_export gives a new one", kind=KIND)
        run_ids, sampler_ids = registry().session_contents(owner, session_id)
        trace = _trace(services().timeline, owner, session_id, run_ids, sampler_ids)
        headers = {
            "Content-Disposition": f'attachment; filename="{session_id}.json"',
            "Cache-Control": "private, no-store",
            "X-Content-Type-Options": "nosniff",
        }
        return Response(trace, content_type=JSON, headers=headers)


def _trace(
    timeline: Timeline, owner: str, session_id: str, run_ids: list[str], sampler_ids: list[str]
) -> Iterator[str]:
    """Yield the trace's text, some events at a time."""
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps({"session_id": session_id})},"traceEvents":[\n'
    separator, part = "", []
    for event in _events(timeline, owner, run_ids, sampler_ids):
        part.append(json.dumps(event, separators=(",", ":")))
        if len(part) == EVENTS_AT_ONCE:
            yield separator + ",\n".join(part)
            separator, part = ",\n", []
    yield (separator + ",\n".join(part) if part else "") + "\n]}\n"


def _events(timeline: Timeline, owner: str, run_ids: list[str], sampler_ids: list[str]) -> Iterator[dict[str, Any]]:
    for number, parent in enumerate([*run_ids, *sampler_ids], 1):
        is_run = number <= len(run_ids)
        yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": parent}}
        for span in timeline.of_run(owner, parent) if is_run else timeline.of_sampler(owner, parent):
            yield from _interval(span, pid=number, category="training" if is_run else "sampling")


def _interval(span: Span, *, pid: int, category: str) -> Iterator[dict[str, Any]]:
    """Yield begin and end of an operation; they may overlap others, so each is named by its id."""
    common = {"cat": category, "id": span.request_id, "name": span.kind, "pid": pid, "tid": 0}
    told = {"request_id": span.request_id, "tokens": span.tokens, "error": span.error}
    yield {**common, "ph": "b", "ts": _microseconds(span.submitted), "args": {k: v for k, v in told.items() if v}}
    if span.finished is not None:
        yield {**common, "ph": "e", "ts": _microseconds(span.finished)}


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
