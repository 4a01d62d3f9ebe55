"""Futures over HTTP: one poll a request, held until the result is there or its time is up."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from flask import Response, jsonify
from flask.views import MethodView

from openrl.app import wire
from openrl.app.context import model_of, registry, services, tenant
from openrl.app.greenlets import beside, off_loop
from openrl.app.schemas import Flag, Sent, Text
from openrl.tasks import keys
from openrl.tasks.errors import NotFound, NotServed, StoreUnavailable
from openrl.tasks.futures import Future, Futures
from openrl.tasks.messages import Sample
from openrl.tasks.operations import JSON, PROTOBUF
from openrl.tasks.ownership import presence
from openrl.tasks.wire import codec

log = logging.getLogger(__name__)

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
    beside(_note_delivery, services().futures, tenant(), request_id)
    return response


def _note_delivery(futures: Futures, owner: str, request_id: str) -> None:
    """Shorten the life of a result; the answer doesn't wait for it. At worst the result is kept for days."""
    try:
        futures.deliver(owner, request_id)
    except StoreUnavailable as error:
        log.warning("the delivery of %s wasn't noted: %s", request_id, error)


def _pending(request_id: str) -> Response:
    state, reason = _queue_state(request_id)
    response = jsonify(type="try_again", request_id=request_id, queue_state=state, queue_state_reason=reason)
    response.status_code = 408
    return response


def _failure(future: Future) -> Response:
    return jsonify(error=future.error, category=future.category)


def _result(future: Future) -> Response:
    if future.content_type == PROTOBUF and wire.accepts_protobuf():
        return Response(future.result, content_type=PROTOBUF)
    read: Callable[[bytes], Any] = json.loads
    if future.content_type == PROTOBUF:
        read = codec.sample_response_to_json if future.kind == Sample.kind else codec.output_to_json
    large = len(future.result) > wire.LARGE_BYTES
    return Response(off_loop(_as_json, read, future.result or b"{}", large=large), content_type=JSON)


def _as_json(read: Callable[[bytes], Any], result: bytes) -> str:
    return json.dumps(read(result), allow_nan=False, separators=(",", ":"))


def _queue_state(request_id: str) -> tuple[str, str | None]:
    """Say whether the operation can run now; it can't while no worker of its base model is up."""
    parent, is_run, _ = keys.parse_request(request_id)
    try:
        owner = registry().run(tenant(), parent) if is_run else registry().sampler(tenant(), parent)
    except NotFound:
        return "active", None
    kind = "trainer" if is_run else "sampler"
    there = presence(services().store, kind, owner.slug)
    if there == "up":
        return "active", None
    try:
        model_of(owner)
    except NotServed as lacking:
        return "paused_capacity", str(lacking)
    if there == "starting":
        return "paused_capacity", f"a {kind} for {owner.base_model} is starting"
    return "paused_capacity", f"no {kind} answers for {owner.base_model}"
