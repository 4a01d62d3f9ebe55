"""Where a run's weights come from: the base model's with or without an adapter, or a training checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flask.views import MethodView
from marshmallow import ValidationError, fields, validates_schema

from openrl.app import checks, fine_tuning, wire
from openrl.app.access import FIELD, readable
from openrl.app.context import base_model, check_base, registry, services, tenant
from openrl.app.schemas import Flag, Metadata, PromiseSchema, Sent, Text, Whole, tag
from openrl.app.submission import consumes_its_key, enqueue, own_run
from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, NotFound, shown
from openrl.tasks.journal import Promise
from openrl.tasks.messages import CreateModel, LoadWeights
from openrl.tasks.records import FULL
from openrl.tasks.registry import Checkpoint, Run

blp = wire.Blueprint("creation", __name__, description="Runs: create, load.")

ADAMW = "adamw"
TRAINING_SEGMENT = "weights/"


class OptimizerConfigSchema(Sent):
    """Which optimizer a run has."""

    type = Text(load_default=ADAMW)
    version = Whole()

    @validates_schema
    def only_adamw(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse what isn't served, by name."""
        if data["type"] != ADAMW:
            raise ValidationError(f"{shown(data['type'])} isn't served: use {ADAMW!r}", "type")


class LoraConfigSchema(Sent):
    """Shape and start of an adapter."""

    rank = Whole(required=True, least=-(2**31))
    seed = Whole(load_default=None, least=-(2**63), most=2**63 - 1)
    train_attn = Flag(load_default=True)
    train_mlp = Flag(load_default=True)
    train_unembed = Flag(load_default=True)


class CreateModelSchema(Sent):
    """A new run on a base model."""

    session_id = Text(required=True)
    model_seq_id = Whole(required=True)
    base_model = Text(required=True)
    lora_config = fields.Nested(LoraConfigSchema)
    optimizer_config = fields.Nested(OptimizerConfigSchema)
    user_metadata = Metadata(load_default=dict)
    type = tag("create_model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Creation:
    """A run to be made, and its place in its session."""

    session_id: str
    model_seq_id: int
    message: CreateModel


class LoadWeightsSchema(Sent):
    """A checkpoint onto an existing run (model_id, seq_id), or as the start of a new one (session_id, ...)."""

    model_id = Text()
    seq_id = Whole(least=1)
    session_id = Text()
    model_seq_id = Whole()
    base_model = Text()
    user_metadata = Metadata(load_default=dict)
    path = Text(required=True)
    optimizer = Flag(required=True)
    optimizer_config = fields.Nested(OptimizerConfigSchema)
    weights_access_token = Text()
    type = tag("load_weights")

    @validates_schema
    def one_address(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse a body that says both or neither."""
        onto = {"model_id", "seq_id"} & data.keys()
        into = {"session_id", "model_seq_id"} & data.keys()
        if (len(onto), len(into)) not in ((2, 0), (0, 2)):
            raise ValidationError("must have either model_id and seq_id, or session_id and model_seq_id")


@blp.route("/create_model")
class CreateModelView(MethodView):
    @blp.response(200, PromiseSchema)
    @blp.arguments(CreateModelSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Promise:
        """Promise a new run, `<session>:train:<model_seq_id>`; without a `lora_config` it trains all weights."""
        return _create_fresh(asked)


@blp.route("/load_weights")
class LoadWeightsView(MethodView):
    @blp.response(200, PromiseSchema)
    @consumes_its_key(LoadWeights.kind)
    @blp.arguments(LoadWeightsSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Promise:
        """Promise a training checkpoint loaded: onto a run, or as the start of a new one."""
        return _load_onto(asked) if "model_id" in asked else _create_from(asked)


def create(creation: Creation) -> Promise:
    """Put a new run into the journal and ring for it. A refusal uses nothing up."""
    model = base_model(creation.message.base_model)
    message = replace(creation.message, base_model=model.name)
    checks.check_create(message, model, services().settings.max_lora_rank)
    checks.check_sampler(message, model)
    promise = services().journal.create(
        tenant(),
        creation.session_id,
        creation.model_seq_id,
        message,
        slug=model.slug,
        base_digest=model.digest,
    )
    slug = model.slug
    if message.fine_tuning == FULL:
        slug = keys.pool_slug(slug, tenant(), keys.run_id(creation.session_id, creation.model_seq_id))
    services().ring(message.kind, slug, tenant(), promise.request_id)
    return promise


def _create_fresh(asked: Mapping[str, Any]) -> Promise:
    lora_config, metadata = asked.get("lora_config"), asked["user_metadata"]
    kind = fine_tuning.of_new_run(_wanted(asked), lora_config)
    if kind == FULL:
        seed = (lora_config or {}).get("seed")
        message = CreateModel(
            base_model=asked["base_model"], rank=0, seed=seed, user_metadata=metadata, fine_tuning=FULL
        )
    else:
        assert lora_config is not None
        message = CreateModel(base_model=asked["base_model"], user_metadata=metadata, **lora_config)
    return create(Creation(session_id=asked["session_id"], model_seq_id=asked["model_seq_id"], message=message))


def _wanted(asked: Mapping[str, Any]) -> str:
    """Return the fine-tuning that a new run's metadata or its session asks for, "" for none."""
    try:
        session = registry().session(tenant(), asked["session_id"])
    except NotFound:  # the journal refuses it, in the same words for every new run
        return fine_tuning.check_metadata(asked["user_metadata"])
    return fine_tuning.wanted(asked["user_metadata"], fine_tuning.of_session(session.tags, session.user_metadata))


def _load_onto(asked: Mapping[str, Any]) -> Promise:
    for name in ("base_model", "optimizer_config"):
        if name in asked:
            raise InvalidRequest(f"{name} belongs to a new run; the run {shown(asked['model_id'])} keeps its own")
    run = own_run(asked["model_id"])
    checkpoint = _training_checkpoint(asked)
    _require_same_shape(run, checkpoint, is_first=asked["seq_id"] == 1)
    message = LoadWeights(
        checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=asked["optimizer"]
    )
    return enqueue(run, asked["seq_id"], message)


def _create_from(asked: Mapping[str, Any]) -> Promise:
    checkpoint = _training_checkpoint(asked)
    if "base_model" in asked and base_model(asked["base_model"]).name != checkpoint.base_model:
        raise InvalidRequest(
            f"base_model is {shown(asked['base_model'])}; the checkpoint was trained on {checkpoint.base_model!r}"
        )
    fine_tuning.require_type(checkpoint.fine_tuning, _wanted(asked))
    message = CreateModel(
        base_model=checkpoint.base_model,
        fine_tuning="" if checkpoint.is_lora else FULL,
        rank=checkpoint.rank,
        seed=None,
        train_attn=checkpoint.train_attn,
        train_mlp=checkpoint.train_mlp,
        train_unembed=checkpoint.train_unembed,
        checkpoint_path=checkpoint.uri,
        checkpoint_dir=checkpoint.directory,
        with_optimizer=asked["optimizer"],
        user_metadata=asked["user_metadata"],
    )
    return create(Creation(session_id=asked["session_id"], model_seq_id=asked["model_seq_id"], message=message))


def _training_checkpoint(asked: Mapping[str, Any]) -> Checkpoint:
    checkpoint = readable(asked["path"], asked.get(FIELD))[1]
    if not checkpoint.checkpoint_id.startswith(TRAINING_SEGMENT):
        raise InvalidRequest(
            f"path {shown(asked['path'])} is no training checkpoint; training loads tinker://<run>/{TRAINING_SEGMENT}<name>"
        )
    check_base(checkpoint, field="path")
    if asked["optimizer"] and not checkpoint.has_optimizer:
        raise InvalidRequest(f"optimizer is true, but {shown(asked['path'])} was saved without its optimizer's state")
    return checkpoint


def _require_same_shape(run: Run, checkpoint: Checkpoint, *, is_first: bool) -> None:
    """Refuse what a run can't take. Its first operation may change which modules it trains: so the oldest SDKs create
    a run from a checkpoint."""
    if run.fine_tuning != checkpoint.fine_tuning:
        raise InvalidRequest(
            f"path: the checkpoint is of {checkpoint.fine_tuning} fine-tuning, the run of {run.fine_tuning}; "
            "start a new run from it instead"
        )
    modules = () if is_first else ("train_attn", "train_mlp", "train_unembed")
    for name in ("base_model", "rank", *modules):
        mine, its = getattr(run, name), getattr(checkpoint, name)
        if mine != its:
            raise InvalidRequest(
                f"path: {name} of the checkpoint is {its!r}, of the run {mine!r}; start a new run from it instead"
            )
