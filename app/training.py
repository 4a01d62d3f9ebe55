"""Training: batches and steps of a run. Each is checked, journaled and promised, never run here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flask.views import MethodView
from marshmallow import ValidationError, fields, post_load, validates_schema

from openrl.app import checks, wire
from openrl.app.greenlets import off_loop
from openrl.app.schemas import BINARY, Definite, PromiseSchema, Sent, Text, Whole, tag
from openrl.app.submission import Submission, consumes_its_key, enqueue, own_run_and_model, submit
from openrl.tasks.errors import shown
from openrl.tasks.journal import Promise
from openrl.tasks.messages import Forward, ForwardBackward, OptimStep
from openrl.tasks.operations import JSON, PROTOBUF
from openrl.tasks.wire import codec

blp = wire.Blueprint("training", __name__, description="Runs: feed, step.")

# What is sent ------------------------------------------------------------------------------------


class AdamParamsSchema(Sent):
    """One AdamW step's parameters; absent ones are Tinker's."""

    learning_rate = Definite()
    beta1 = Definite()
    beta2 = Definite()
    eps = Definite()
    weight_decay = Definite()
    grad_clip_norm = Definite()


class OptimStepSchema(Sent):
    """One step of a run's optimizer."""

    model_id = Text(required=True)
    seq_id = Whole(required=True, least=1)
    adam_params = fields.Nested(AdamParamsSchema)
    optimizer_params = fields.Dict()
    type = tag("optim_step")

    @validates_schema
    def adam_only(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse other optimizers, and a step without parameters."""
        if "optimizer_params" in data:
            name = data["optimizer_params"].get("type")
            raise ValidationError(f"{shown(name)} isn't served: send adam_params for AdamW", "optimizer_params")
        if "adam_params" not in data:
            raise ValidationError("is required", "adam_params")

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Submission:
        """Build the message."""
        message = OptimStep(**data["adam_params"])
        checks.check_optim_step(message)
        return Submission(run_id=data["model_id"], seq_id=data["seq_id"], message=message)


class ForwardBackwardSchema(Sent):
    """The JSON body of older SDKs; newer ones send protobuf, whose fields are in `openrl.tasks.wire`."""

    model_id = Text(required=True)
    seq_id = Whole(required=True, least=1)
    forward_backward_input = fields.Dict()
    forward_input = fields.Dict()
    type = Text()


# Routes ------------------------------------------------------------------------------------------


@blp.route("/forward_backward")
class ForwardBackwardView(MethodView):
    @blp.doc(
        requestBody={
            "content": {JSON: {"schema": ForwardBackwardSchema}, PROTOBUF: {"schema": BINARY}},
            "required": True,
        }
    )
    @blp.response(200, PromiseSchema)
    @consumes_its_key(ForwardBackward.kind)
    def post(self) -> Promise:
        """Promise losses and logprobs of a batch; its gradient is added unless `forward_only` is set."""
        return _forward_backward(forward_only=False)


@blp.route("/forward")
class ForwardView(MethodView):
    @blp.doc(requestBody={"content": {JSON: {"schema": ForwardBackwardSchema}}, "required": True})
    @blp.response(200, PromiseSchema)
    @consumes_its_key(Forward.kind)
    def post(self) -> Promise:
        """Promise losses and logprobs of a batch, leaving no gradient (older SDKs)."""
        return _forward_backward(forward_only=True)


@blp.route("/optim_step")
class OptimStepView(MethodView):
    @blp.response(200, PromiseSchema)
    @consumes_its_key(OptimStep.kind)
    @blp.arguments(OptimStepSchema, location="wire")
    def post(self, asked: Submission) -> Promise:
        """Promise one AdamW step over the gradient accumulated since the last one."""
        return submit(asked)


def _forward_backward(*, forward_only: bool) -> Promise:
    asked = _decoded(forward_only)
    run, model = own_run_and_model(asked.model_id)
    off_loop(checks.check_forward_backward, asked, model, large=len(wire.body()) > wire.LARGE_BYTES)
    kind = Forward if asked.forward_only else ForwardBackward
    message = kind(data=asked.data, loss_fn=asked.loss_fn, loss_fn_config=asked.loss_fn_config)
    return enqueue(run, asked.seq_id, message)


def _decoded(forward_only: bool) -> codec.ForwardBackwardRequest:
    if wire.is_protobuf():
        return wire.decoded(codec.decode_forward_backward)
    large = len(wire.body()) > wire.LARGE_BYTES
    return off_loop(codec.decode_forward_backward_json, wire.json_object(), forward_only, large=large)
