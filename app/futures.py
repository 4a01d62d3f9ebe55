"""Futures over HTTP: a poll for one result, or for any of a client's samples, held until it is there; cancelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import marshmallow
from flask import Response, jsonify
from flask.views import MethodView
from marshmallow import fields, validate

from openrl.app import wire
from openrl.app.auth import caller, require
from openrl.app.context import model_of, registry, services, tenant
from openrl.app.greenlets import beside, off_loop
from openrl.app.held import Held
from openrl.app.recent import Recent
from openrl.app.schemas import BINARY, INT64_MAX, Flag, Number, Sent, Text, Whole, tag
from openrl.tasks import keys
from openrl.tasks.deliveries import Batch
from openrl.tasks.errors import InvalidRequest, NotFound, NotServed, OpenRLError, shown
from openrl.tasks.futures import Future
from openrl.tasks.messages import Sample, SaveWeightsForSampler
from openrl.tasks.operations import JSON, PROTOBUF
from openrl.tasks.ownership import presence
from openrl.tasks.tenants import TRAIN
from openrl.tasks.wire import codec

blp = wire.Blueprint("futures", __name__, description="Results of slow operations.")


MAX_ACKNOWLEDGED = 100_000
"""Results that one request may say are fetched; the SDK sends those since its last poll."""

_ENDS = {"type": "string", "enum": ["finished", "failed"]}


class RetrieveSchema(Sent):
    """A promise to poll. `allow_metadata_only` permits an answer in two steps; here it always comes in one."""

    request_id = Text(required=True)
    allow_metadata_only = Flag(load_default=False)


class TargetSchema(Sent):
    """Whose samples are asked for: those of one clone of a sampling client; the first client is clone 0."""

    type = tag("sampling_session")
    sampling_session_id = Text(required=True)
    cloned_sampler_id = Whole(load_default=0, most=keys.MAX_CLONE)


class RetrieveManySchema(Sent):
    """Samples to wait for. `timeout` shortens the wait; 0.0 is none."""

    target = fields.Nested(TargetSchema, required=True)
    prev_cursor = Whole(load_default=0, most=INT64_MAX)
    timeout = Number(load_default=None, validate=validate.Range(min=0, error="must be 0 or more"))
    retrieved_request_ids = fields.List(
        Text(most_chars=256), load_default=list, validate=validate.Length(max=MAX_ACKNOWLEDGED)
    )


class CancelSchema(Sent):
    """A promise that nobody waits for any more."""

    request_id = Text(required=True)


class PendingSchema(marshmallow.Schema):
    """A result that isn't there yet, and why it may take longer."""

    type = fields.String()
    request_id = fields.String()
    queue_state = fields.String()
    queue_state_reason = fields.String(allow_none=True)


class CompletionSchema(marshmallow.Schema):
    """A sample that has ended. Its result, or why it failed, comes from retrieve_future."""

    state = fields.Function(lambda ended: "failed" if ended.failed else "finished", metadata=_ENDS)
    request_id = fields.String(required=True)
    response_payload_uncompressed_size = fields.Integer(attribute="size_bytes")


class CompletionsSchema(marshmallow.Schema):
    """What has ended up to `cursor`, to be given back as `prev_cursor`."""

    completions = fields.List(fields.Nested(CompletionSchema), attribute="ended", required=True)
    cursor = fields.Integer(required=True)


class CancelledSchema(marshmallow.Schema):
    """What became of it: `cancelled`; `asked`: it is, unless its trainer begins it before; `finished`: it had ended."""

    request_id = fields.String(required=True)
    state = fields.String(required=True)


@blp.route("/retrieve_future")
class RetrieveView(MethodView):
    @blp.doc(responses={"200": {"content": {JSON: {"schema": {"type": "object"}}, PROTOBUF: {"schema": BINARY}}}})
    @blp.response(200, description="The result: JSON, or protobuf where Accept asks for it; or {error, category}.")
    @blp.alt_response(408, schema=PendingSchema, description="Still pending, or incomplete; send it again at once.")
    @blp.arguments(RetrieveSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Response:
        """Wait a while for a result."""
        request_id = asked["request_id"]
        return Held(
            partial(services().polls.wait, tenant(), request_id), partial(_answer, request_id, wire.accepts_protobuf())
        )


@blp.route("/retrieve_futures")
class RetrieveManyView(MethodView):
    @blp.response(200, CompletionsSchema)
    @blp.arguments(RetrieveManySchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Response:
        """Wait a while until any sample of a sampling client has ended."""
        sampler_id, clone = asked["target"]["sampling_session_id"], asked["target"]["cloned_sampler_id"]
        _check_target(asked["retrieved_request_ids"], sampler_id, clone)
        services().deliveries.acknowledge(tenant(), asked["retrieved_request_ids"])
        wait = partial(services().polls.wait_for_any, timeout_s=asked["timeout"])
        return Held(partial(wait, tenant(), sampler_id, clone, asked["prev_cursor"]), _completions)


@blp.route("/cancel_future")
class CancelView(MethodView):
    @blp.response(200, CancelledSchema)
    @blp.arguments(CancelSchema, location="wire")
    def post(self, asked: dict[str, str]) -> dict[str, str]:
        """Cancel a sample, or an operation of a run that waits; what has ended stays as it is."""
        if keys.parse_request(asked["request_id"]).is_run:
            require(caller(), (TRAIN,))
        return {**asked, "state": services().cancelling.cancel(tenant(), asked["request_id"])}


def _check_target(request_ids: list[str], sampler_id: str, clone: int) -> None:
    """Refuse to free results that belong to another client."""
    for request_id in request_ids:
        parent, _, seq = request_id.rpartition(":")
        if parent != sampler_id or not seq.isdecimal() or keys.clone(seq) != str(clone):
            whose = f"clone {clone} of {shown(sampler_id)}"
            raise InvalidRequest(f"retrieved_request_ids holds {shown(request_id)}, which is none of {whose}")


def _completions(batch: Batch) -> Response:
    return jsonify(CompletionsSchema().dump(batch))


def _answer(request_id: str, protobuf: bool, future: Future) -> Response:
    if future.state == "pending":
        return _pending(request_id)
    response = _failure(future) if future.state == "failed" else _result(future, protobuf=protobuf)
    services().delivered.note(tenant(), request_id)
    if future.kind == SaveWeightsForSampler.kind and future.state == "done":
        _foresee(json.loads(future.result).get("sampling_session_id"))
    return response


def _foresee(sampler_id: str | None) -> None:
    """Look a new sampler up while its client makes up its first request."""
    if sampler_id:
        find = partial(services().registry.sampler, tenant(), sampler_id)
        beside(_look_up, services().known_samplers, (tenant(), sampler_id), find)


def _look_up(known: Recent[Any], key: tuple[str, str], find: Callable[[], Any]) -> None:
    """Remember what is found; whoever asks for it is told why where it can't be."""
    with suppress(OpenRLError):
        known.get(key, find)


def _pending(request_id: str) -> Response:
    parent = keys.parse_request(request_id).parent
    state, reason = services().queue_states.get((tenant(), parent), lambda: _queue_state(request_id))
    response = jsonify(type="try_again", request_id=request_id, queue_state=state, queue_state_reason=reason)
    response.status_code = 408
    return response


def _failure(future: Future) -> Response:
    return jsonify(error=future.error, category=future.category)


def _result(future: Future, *, protobuf: bool) -> Response:
    if future.content_type == PROTOBUF and protobuf:
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
    if is_run and (wait_s := services().quotas.seconds_to_wait(tenant())):
        return "paused_rate_limit", f"the tenant's tokens of this minute are used; training goes on in {wait_s:.0f} s"
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
