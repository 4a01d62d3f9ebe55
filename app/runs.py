"""Runs as they stand: what one is, which there are."""

from __future__ import annotations

from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import fields

from openrl.app import wire
from openrl.app.checkpoints import ALL, CheckpointSchema
from openrl.app.context import registry, tenant
from openrl.app.creation import ADAMW
from openrl.app.schemas import CursorSchema, PageSchema, Sent, Text, Time, as_strings, tag
from openrl.app.submission import own_run_and_model
from openrl.tasks.errors import NotFound
from openrl.tasks.registry import BaseModel, Run

blp = wire.Blueprint("runs", __name__, description="Runs: describe, list.")


class RunIdSchema(Sent):
    """A run by its id."""

    model_id = Text(required=True)
    type = tag("get_info")


class ModelDataSchema(marshmallow.Schema):
    """A base model, as the SDK asks for it."""

    arch = fields.String()
    model_name = fields.String()
    tokenizer_id = fields.String()


class InfoSchema(marshmallow.Schema):
    """What a run really is."""

    type = fields.Constant("get_info")
    model_id = fields.String()
    model_data = fields.Nested(ModelDataSchema)
    model_name = fields.String()
    is_lora = fields.Boolean()
    lora_rank = fields.Integer()
    optimizer_config = fields.Dict()


class RunSchema(marshmallow.Schema):
    """A run as the SDK lists it."""

    training_run_id = fields.String(attribute="run_id")
    base_model = fields.String()
    model_owner = fields.String(attribute="tenant")
    is_lora = fields.Constant(True)
    lora_rank = fields.Integer(attribute="rank")
    corrupted = fields.Function(lambda run: run.state == "failed", metadata={"type": "boolean"})
    last_request_time = Time(attribute="last_request")
    last_checkpoint = fields.Function(lambda run: _newest(run, "training"))
    last_sampler_checkpoint = fields.Function(lambda run: _newest(run, "sampler"))
    user_metadata = fields.Function(lambda run: as_strings(run.user_metadata))


class RunListSchema(marshmallow.Schema):
    """A part of the list of runs."""

    training_runs = fields.List(fields.Nested(RunSchema))
    cursor = fields.Nested(CursorSchema)


@blp.route("/get_info")
class InfoView(MethodView):
    @blp.response(200, InfoSchema)
    @blp.arguments(RunIdSchema, location="wire")
    def post(self, asked: dict[str, str]) -> dict[str, Any]:
        """Say what a run is."""
        return _info(*own_run_and_model(asked["model_id"]))


@blp.route("/training_runs")
class RunListView(MethodView):
    @blp.response(200, RunListSchema)
    @blp.arguments(PageSchema, location="query")
    def get(self, page: dict[str, Any]) -> dict[str, Any]:
        """List one's own runs, newest first."""
        runs, total = registry().runs(tenant(), page["limit"], page["offset"])
        return {"training_runs": runs, "cursor": {**page, "total_count": total}}


@blp.route("/training_runs/<run_id>")
class RunView(MethodView):
    @blp.response(200, RunSchema)
    @blp.arguments(PageSchema(only=("access_scope",)), location="query")
    def get(self, _scope: dict[str, str], run_id: str) -> Run:
        """Show a run."""
        return registry().run(tenant(), run_id)


def _info(run: Run, model: BaseModel) -> dict[str, Any]:
    return {
        "model_id": run.run_id,
        "model_data": {"arch": model.arch, "model_name": model.name, "tokenizer_id": model.tokenizer_id},
        "model_name": model.name,
        "is_lora": True,
        "lora_rank": run.rank,
        "optimizer_config": {"type": ADAMW},
    }


def _newest(run: Run, kind: str) -> dict[str, Any] | None:
    try:
        found = registry().checkpoints(run.tenant, run.run_id, ALL, 0)[0]
    except NotFound:  # the run was deleted while the list was made
        return None
    newest = next((checkpoint for checkpoint in found if checkpoint.kind == kind), None)
    return None if newest is None else CheckpointSchema().dump(newest)
