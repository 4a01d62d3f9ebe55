"""Checkpoints: promised by a save, listed by run, described by their address, kept for a time, published, deleted."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import ValidationError, fields, missing, post_load, pre_load, validate, validates_schema

from openrl.app import checks, wire
from openrl.app.auth import caller
from openrl.app.clients import unknown_kinds
from openrl.app.context import registry, services, tenant
from openrl.app.creation import ADAMW
from openrl.app.schemas import (
    TEXTS,
    CursorSchema,
    Flag,
    Metadata,
    PageSchema,
    PromiseSchema,
    Sent,
    Text,
    Time,
    Whole,
    as_strings,
    tag,
)
from openrl.app.submission import Submission, consumes_its_key, submit
from openrl.tasks import audit, keys
from openrl.tasks.errors import NotFound
from openrl.tasks.journal import Promise
from openrl.tasks.messages import SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from openrl.tasks.registry import Checkpoint
from openrl.workers.weights import layout

blp = wire.Blueprint("checkpoints", __name__, description="Checkpoints: save, list, describe, delete.")

TTL_LEAST_S = 3600
TTL_MOST_S = 10 * 365 * 24 * 3600

EXTERNAL = "external"
"""The kind of a checkpoint that is there to be downloaded: nothing but its links needs its files."""

ALL = 10_000_000
"""A page that holds whatever a run has: the SDK asks for that list without a page."""


# What is sent ------------------------------------------------------------------------------------


class SaveSchema(Sent):
    """What both saves share."""

    model_id = Text(required=True)
    seq_id = Whole(required=True, least=1)
    ttl_seconds = Whole(least=TTL_LEAST_S, most=TTL_MOST_S, load_default=None)
    user_metadata = Metadata(load_default=dict)

    def common(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that both messages share."""
        return {"ttl_seconds": data["ttl_seconds"], "user_metadata": as_strings(data["user_metadata"])}


class SaveWeightsSchema(SaveSchema):
    """A training checkpoint to be saved under a bare name."""

    path = Text(required=True)
    overwrite = Flag(load_default=False)
    type = tag("save_weights")

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Submission:
        """Build the message."""
        checks.check_name(data["path"])
        message = SaveWeights(name=data["path"], overwrite=data["overwrite"], **self.common(data))
        return Submission(run_id=data["model_id"], seq_id=data["seq_id"], message=message)


class SaveForSamplerSchema(SaveSchema):
    """Weights to sample from: under a bare name, or as the session's next sampler."""

    path = Text()
    sampling_session_seq_id = Whole()
    kind = Text(load_default="snapshot")
    type = tag("save_weights_for_sampler")

    @validates_schema
    def one_target(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse a body that names both targets or neither, and mutable weights."""
        if ("path" in data) == ("sampling_session_seq_id" in data):
            raise ValidationError("must have either path or sampling_session_seq_id")
        if data["kind"] != "snapshot":
            raise ValidationError("isn't served: use 'snapshot', which keeps its weights for ever", "kind")

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Submission:
        """Build the message; the sampler's id follows from the run's session."""
        if "path" in data:
            checks.check_name(data["path"])
            target = {"name": data["path"]}
        else:
            session_id = keys.session_of(data["model_id"])
            target = {"sampler_id": keys.sampler_id(session_id, data["sampling_session_seq_id"])}
        message = SaveWeightsForSampler(**target, **self.common(data))
        return Submission(run_id=data["model_id"], seq_id=data["seq_id"], message=message)


class SaveExternalSchema(SaveSchema):
    """An adapter to be saved for download, under a bare name."""

    path = Text(required=True)
    age_encryption_recipients = fields.Raw()
    type = tag("save_weights_external")

    @validates_schema
    def plain_only(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse to encrypt, rather than to leave in the clear what was to be encrypted."""
        if "age_encryption_recipients" in data:
            raise ValidationError(
                "isn't served: files are exported as they are; leave it out, and encrypt what you downloaded",
                "age_encryption_recipients",
            )

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Submission:
        """Build the message."""
        checks.check_name(data["path"])
        message = SaveWeightsExternal(name=data["path"], **self.common(data))
        return Submission(run_id=data["model_id"], seq_id=data["seq_id"], message=message)


class TtlSchema(Sent):
    """How long from now on a checkpoint is kept; null means: until it is deleted."""

    ttl_seconds = Whole(least=TTL_LEAST_S, most=TTL_MOST_S, load_default=None)

    @pre_load
    def null_is_said(self, data: Any, **_options: Any) -> Any:
        """Refuse an empty body: for ever is only what was asked for."""
        if isinstance(data, Mapping) and "ttl_seconds" not in data:
            raise ValidationError("is required; null keeps the checkpoint until it is deleted", "ttl_seconds")
        return data


class TinkerPathSchema(Sent):
    """A checkpoint's address."""

    tinker_path = Text(required=True)


class CheckpointPageSchema(PageSchema):
    """Which part of the list of all checkpoints."""

    limit = fields.Integer(
        load_default=100,
        validate=validate.Range(min=1, max=1000, error="must be {min} to {max}"),
        error_messages={"invalid": "must be a whole number"},
    )


# What is answered --------------------------------------------------------------------------------


LORA_RANK = fields.Function(lambda thing: thing.rank if thing.is_lora else missing, metadata={"type": "integer"})
"""Absent where all weights are trained."""


class WeightsInfoSchema(marshmallow.Schema):
    """What a checkpoint can be loaded into."""

    base_model = fields.String()
    is_lora = fields.Boolean()
    lora_rank = LORA_RANK
    train_attn = fields.Boolean()
    train_mlp = fields.Boolean()
    train_unembed = fields.Boolean()
    optimizer_config = fields.Constant({"type": ADAMW})


class CheckpointSchema(marshmallow.Schema):
    """A checkpoint as the SDK lists it."""

    checkpoint_id = fields.String()
    checkpoint_type = fields.String(attribute="kind")
    time = Time(attribute="created")
    tinker_path = fields.String(attribute="uri")
    size_bytes = fields.Integer()
    public = fields.Boolean()
    expires_at = Time()
    user_metadata = fields.Function(lambda checkpoint: as_strings(checkpoint.user_metadata), metadata=TEXTS)


class CheckpointListSchema(marshmallow.Schema):
    """A part of a list of checkpoints."""

    checkpoints = fields.List(fields.Nested(CheckpointSchema))
    cursor = fields.Nested(CursorSchema)


# Routes ------------------------------------------------------------------------------------------


@blp.route("/save_weights")
class SaveWeightsView(MethodView):
    @blp.response(200, PromiseSchema)
    @consumes_its_key(SaveWeights.kind)
    @blp.arguments(SaveWeightsSchema, location="wire")
    def post(self, asked: Submission) -> Promise:
        """Promise the training checkpoint `tinker://<run>/weights/<path>`."""
        return submit(asked)


@blp.route("/save_weights_for_sampler")
class SaveForSamplerView(MethodView):
    @blp.response(200, PromiseSchema)
    @consumes_its_key(SaveWeightsForSampler.kind)
    @blp.arguments(SaveForSamplerSchema, location="wire")
    def post(self, asked: Submission) -> Promise:
        """Promise immutable weights to sample from, named or as a sampler of the session."""
        return submit(asked)


@blp.route("/save_weights_external")
class SaveExternalView(MethodView):
    @blp.response(200, PromiseSchema)
    @consumes_its_key(SaveWeightsExternal.kind)
    @blp.arguments(SaveExternalSchema, location="wire")
    def post(self, asked: Submission) -> Promise:
        """Promise the adapter as PEFT's files, `tinker://<run>/external_weights/<path>`, to be downloaded."""
        return submit(asked)


@blp.route("/weights_info")
class WeightsInfoView(MethodView):
    @blp.response(200, WeightsInfoSchema)
    @blp.arguments(TinkerPathSchema, location="wire")
    def post(self, asked: dict[str, str]) -> Checkpoint:
        """Say what a checkpoint is."""
        return registry().checkpoint_by_uri(tenant(), asked["tinker_path"])


@blp.route("/training_runs/<run_id>/checkpoints")
class RunCheckpointsView(MethodView):
    @blp.response(200, CheckpointListSchema)
    def get(self, run_id: str) -> dict[str, Any]:
        """List a run's checkpoints, newest first; of somebody else's run, those that are published."""
        return {"checkpoints": listed(run_id, without=unknown_kinds())}


@blp.route("/checkpoints")
class CheckpointListView(MethodView):
    @blp.response(200, CheckpointListSchema)
    @blp.arguments(CheckpointPageSchema, location="query")
    def get(self, page: dict[str, Any]) -> dict[str, Any]:
        """List one's own checkpoints, newest first."""
        found, total = registry().checkpoints(tenant(), None, page["limit"], page["offset"], without=unknown_kinds())
        return {"checkpoints": found, "cursor": {**page, "total_count": total}}


@blp.route("/training_runs/<run_id>/checkpoints/<kind>/<name>")
class CheckpointView(MethodView):
    @blp.response(200, marshmallow.Schema)
    def delete(self, run_id: str, kind: str, name: str) -> dict[str, Any]:
        """Forget a checkpoint. Samplers and runs made from it keep their weights; an export's files go."""
        gone = registry().delete_checkpoint(tenant(), run_id, f"{kind}/{name}")
        if gone.kind == EXTERNAL:
            layout.remove(layout.resolve(services().store.settings.data_dir, gone.directory))
        _note("deleted", gone)
        return {}


@blp.route("/training_runs/<run_id>/checkpoints/<kind>/<name>/publish")
class PublishView(MethodView):
    @blp.response(200, marshmallow.Schema)
    def post(self, run_id: str, kind: str, name: str) -> dict[str, Any]:
        """Let every tenant read a checkpoint of one's own, until it is unpublished. Twice is fine."""
        _note("published", registry().set_public(tenant(), run_id, f"{kind}/{name}", public=True))
        return {}

    @blp.response(200, marshmallow.Schema)
    def delete(self, run_id: str, kind: str, name: str) -> dict[str, Any]:
        """Let nobody else read a checkpoint from now on; what was made from it keeps its weights."""
        _note("unpublished", registry().set_public(tenant(), run_id, f"{kind}/{name}", public=False))
        return {}


@blp.route("/training_runs/<run_id>/checkpoints/<kind>/<name>/ttl")
class TtlView(MethodView):
    @blp.response(200, marshmallow.Schema)
    @blp.arguments(TtlSchema, location="wire")
    def put(self, asked: dict[str, Any], run_id: str, kind: str, name: str) -> dict[str, Any]:
        """Keep a checkpoint for `ttl_seconds` from now on."""
        ttl_s = asked["ttl_seconds"]
        expires_at = None if ttl_s is None else time.time() + ttl_s
        changed = registry().set_expiry(tenant(), run_id, f"{kind}/{name}", expires_at)
        _note("ttl_set", changed, ttl_seconds=ttl_s)
        return {}


def listed(run_id: str, *, without: Collection[str] = ()) -> list[Checkpoint]:
    """Return the checkpoints of a run that one may read, newest first."""
    try:
        return registry().checkpoints(tenant(), run_id, ALL, 0, without=without)[0]
    except NotFound:
        published = registry().published(run_id)[1]
        if not published:
            raise
        return [checkpoint for checkpoint in published if checkpoint.kind not in without]


def _note(deed: str, checkpoint: Checkpoint, **details: int | None) -> None:
    """Write a change of a checkpoint into the tenant's audit log."""
    event, actor = f"checkpoint_{deed}", caller().actor
    audit.record(services().store, tenant(), event, actor=actor, tinker_path=checkpoint.uri, **details)
