"""Runs as they stand: what one is, which there are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import fields

from openrl.app import wire
from openrl.app.checkpoints import LORA_RANK, CheckpointSchema, listed
from openrl.app.context import registry, tenant
from openrl.app.creation import ADAMW
from openrl.app.schemas import TEXTS, CursorSchema, PageSchema, Sent, Text, Time, as_strings, tag
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


_NEWEST = {"allOf": [{"$ref": "#/components/schemas/Checkpoint"}], "nullable": True}


class RunSchema(marshmallow.Schema):
    """A run as the SDK lists it."""

    training_run_id = fields.String(attribute="run_id")
    base_model = fields.String()
    model_owner = fields.Function(lambda run: run.tenant if run.tenant == tenant() else "", metadata={"type": "string"})
    is_lora = fields.Boolean()
    lora_rank = LORA_RANK
    corrupted = fields.Function(lambda run: run.state == "failed", metadata={"type": "boolean"})
    last_request_time = Time(attribute="last_request")
    last_checkpoint = fields.Function(lambda run: _newest(run, "training"), metadata=_NEWEST)
    last_sampler_checkpoint = fields.Function(lambda run: _newest(run, "sampler"), metadata=_NEWEST)
    user_metadata = fields.Function(lambda run: as_strings(run.user_metadata), metadata=TEXTS)


class RunPageSchema(PageSchema):
    """Which part of the list of runs: of all, or of one project."""

    project_id = Text(load_default=None, most_chars=256)


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
    @blp.arguments(RunPageSchema, location="query")
    def get(self, page: dict[str, Any]) -> dict[str, Any]:
        """List runs, newest first: one's own, all or those of a project; and, if asked, others' published ones."""
        project_id = page.pop("project_id")
        others = page["access_scope"] == "accessible" and project_id is None
        runs, total = registry().runs(tenant(), page["limit"], page["offset"], project_id=project_id)
        if others:
            found = _of_others()
            runs += found[max(0, page["offset"] - total) :][: page["limit"] - len(runs)]
            total += len(found)
        return {"training_runs": runs, "cursor": {**page, "total_count": total}}


@blp.route("/training_runs/<run_id>")
class RunView(MethodView):
    @blp.response(200, RunSchema)
    @blp.arguments(PageSchema(only=("access_scope",)), location="query")
    def get(self, _scope: dict[str, str], run_id: str) -> Run:
        """Show a run of one's own, or one with a published checkpoint."""
        try:
            return registry().run(tenant(), run_id)
        except NotFound:
            found = _of_other(run_id)
            if found is None:
                raise
            return found


def _info(run: Run, model: BaseModel) -> dict[str, Any]:
    return {
        "model_id": run.run_id,
        "model_data": {"arch": model.arch, "model_name": model.name, "tokenizer_id": model.tokenizer_id},
        "model_name": model.name,
        "is_lora": run.is_lora,
        **({"lora_rank": run.rank} if run.is_lora else {}),
        "optimizer_config": {"type": ADAMW},
    }


def _newest(run: Run, kind: str) -> dict[str, Any] | None:
    try:
        found = listed(run.run_id)
    except NotFound:  # the run was deleted, or unpublished, while the list was made
        return None
    newest = next((checkpoint for checkpoint in found if checkpoint.kind == kind), None)
    return None if newest is None else CheckpointSchema().dump(newest)


def _of_others() -> list[Run]:
    """Return the runs of other tenants that have a published checkpoint, the latest published first."""
    return _published(registry().published_runs())


def _of_other(run_id: str) -> Run | None:
    """Return another tenant's run, if it has a published checkpoint."""
    found = _published([run_id])
    return found[0] if found else None


def _published(run_ids: list[str]) -> list[Run]:
    """Return those of some runs that are others' and have a published checkpoint, without what else they do."""
    found = registry().published_of(run_ids)
    theirs = [(owner, run_id) for run_id, (owner, _) in found.items() if owner != tenant()]
    return [
        replace(run, last_request=found[run.run_id][1][0].created, state="ready")
        for run in registry().runs_by_id(theirs)
    ]
