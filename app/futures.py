"""Futures over HTTP: one poll a request, held until the result is there or its time is up."""

from __future__ import annotations

import json
from typing import Any

from flask import Response, jsonify
from flask.views import MethodView

from openrl.app import wire
from openrl.app.context import registry, services, tenant
from openrl.app.schemas import Flag, Sent, Text
from openrl.tasks import keys
from openrl.tasks.errors import NotFound
from openrl.tasks.futures import Future
from openrl.tasks.messages import Sample
from openrl.tasks.ownership import is_served
from openrl.tasks.wire import codec

blp = wire.Blueprint("futures", __name__, description="Results of slow operations.")


class RetrieveSchema(Sent):
    """A promise to poll. `allow_metadata_only` permits an answer in two steps; here it always comes in one."""

    request_id = Text(required=True)
    allow_metadata_only = Flag(load_default=False)


@blp.route("/retrieve_future")
class RetrieveView(MethodView):
    @blp.response(200, description="The result: JSON, or protobuf where Accept asks for it; or {error, category}.")
    @blp.alt_response(408, description="Still pending; poll again at once.")
    @blp.arguments(RetrieveSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Response:
        """Wait a while for a result."""
        return _answer(asked["request_id"], services().polls.wait(tenant(), asked["request_id"]))


def _answer(request_id: str, future: Future) -> Response:
    if future.state == "pending":
        return _pending(request_id)
    response = _failure(future) if future.state == "failed" else _result(future)
    services().futures.deliver(tenant(), request_id)
    return response


def _pending(request_id: str) -> Response:
    state, reason = _queue_state(request_id)
    response = jsonify(type="try_again", request_id=request_id, queue_state=state, queue_state_reason=reason)
    response.status_code = 408
    return response


def _failure(future: Future) -> Response:
    return jsonify(error=future.error, category=future.category)


def _result(future: Future) -> Response:
    if future.content_type != wire.PROTOBUF:
        return jsonify(json.loads(future.result or b"{}"))
    if wire.accepts_protobuf():
        return Response(future.result, content_type=wire.PROTOBUF)
    read = codec.sample_response_to_json if future.kind == Sample.kind else codec.output_to_json
    return jsonify(read(future.result))


def _queue_state(request_id: str) -> tuple[str, str | None]:
    """Say whether the operation can run now; it can't while no worker of its base model is up."""
    parent, is_run, _ = keys.parse_request(request_id)
    try:
        owner = registry().run(tenant(), parent) if is_run else registry().sampler(tenant(), parent)
    except NotFound:
        return "active", None
    kind = "trainer" if is_run else "sampler"
    if is_served(services().store, kind, owner.slug):
        return "active", None
    return "paused_capacity", f"a {kind} for {owner.base_model} is starting"
