"""Sampling: samplers bound to immutable weights, and the samples asked of them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import ValidationError, fields, validates_schema

from openrl.app import checks, wire
from openrl.app.context import base_model, check_base, model_of, registry, services, tenant
from openrl.app.greenlets import off_loop
from openrl.app.schemas import INT64_MAX, Definite, Flag, PromiseSchema, Sent, Text, Whole, tag, unicode_only
from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, NotFound, shown
from openrl.tasks.messages import Sample
from openrl.tasks.operations import Promise
from openrl.tasks.registry import Checkpoint, Sampler
from openrl.tasks.wire import codec

blp = wire.Blueprint("sampling", __name__, description="Sampling sessions and samples.")

SAMPLER_SEGMENT = "sampler_weights/"

_WHOLES = {"type": "array", "items": {"type": "integer"}}
_CHUNK = {"type": "object", "properties": {"type": {"type": "string"}, "tokens": _WHOLES}, "required": ["tokens"]}
_PROMPT = {
    "type": "object",
    "properties": {"chunks": {"type": "array", "items": _CHUNK}},
    "required": ["chunks"],
}
_STOPS = {"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]}}
_STOP = {"anyOf": [{"type": "string"}, _STOPS]}
_CELLS = {
    "type": "object",
    "properties": {
        "data": _WHOLES,
        "dtype": {"type": "string"},
        "shape": _WHOLES,
        "sparse_crow_indices": _WHOLES,
        "sparse_col_indices": _WHOLES,
    },
    "required": ["data", "dtype", "shape"],
}
"""How the document describes what the codec reads."""


class SamplingSessionSchema(Sent):
    """A sampler of a session: a base model, or weights that were saved for sampling."""

    session_id = Text(required=True)
    sampling_session_seq_id = Whole(required=True)
    base_model = Text()
    model_path = Text()
    type = tag("create_sampling_session")

    @validates_schema
    def something(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse a body that names no weights."""
        if not {"base_model", "model_path"} & data.keys():
            raise ValidationError("must have base_model or model_path")


class SamplingParamsSchema(Sent):
    """How to draw tokens. `openrl.app.checks` has the ranges."""

    max_tokens = Whole(load_default=None, least=-(2**31))
    seed = Whole(load_default=None, least=-(2**63), most=INT64_MAX)
    stop = fields.Raw(validate=unicode_only, metadata=_STOP)
    temperature = Definite(load_default=1.0)
    top_k = Whole(load_default=-1, least=-(2**31))
    top_p = Definite(load_default=1.0)


class JoinSchema(Sent):
    """A further client of a sampler."""

    sampling_session_id = Text(required=True)
    type = tag("join_sampling_session")


class SampleSchema(Sent):
    """Some continuations of a prompt."""

    sampling_session_id = Text(required=True)
    seq_id = Whole(required=True, most=INT64_MAX)
    num_samples = Whole(load_default=1, least=-(2**31))
    prompt = fields.Raw(required=True, metadata=_PROMPT)
    sampling_params = fields.Nested(SamplingParamsSchema, required=True)
    prompt_logprobs = Flag(load_default=False)
    topk_prompt_logprobs = Whole(load_default=0, least=-(2**31))
    topk_sample_logprobs = Whole(load_default=0, least=-(2**31))
    target_prompt_logprobs = fields.Raw(metadata=_CELLS)
    prompt_alt_tokens_k = Whole(load_default=0, least=-(2**31))
    prompt_logprobs_last_n = Whole(load_default=None, least=-(2**31))
    record_stability_info = Flag(load_default=False)
    type = tag("sample")

    @validates_schema
    def served(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse what only stable_reinforce uses; the SDK always sends it, as false."""
        if data.get("record_stability_info"):
            raise ValidationError(
                "is for stable_reinforce, which isn't served: leave it out and train with importance_sampling or ppo",
                "record_stability_info",
            )


class SamplingSessionAnswerSchema(marshmallow.Schema):
    """A sampler's id."""

    type = fields.Constant("create_sampling_session")
    sampling_session_id = fields.String(attribute="sampler_id")


class JoinAnswerSchema(marshmallow.Schema):
    """A client's number: its `seq_id` counts from that many billions."""

    type = fields.Constant("join_sampling_session")
    client_counter = fields.Integer(required=True)


class SamplerSchema(marshmallow.Schema):
    """A sampler, as the SDK asks for it."""

    sampler_id = fields.String()
    base_model = fields.String()
    model_path = fields.Function(
        lambda sampler: sampler.model_path or None, metadata={"type": "string", "nullable": True}
    )


class SamplePromiseSchema(PromiseSchema):
    """What to poll, and the id of each continuation."""

    sample_sequence_ids = fields.List(fields.String(), required=True)


@blp.route("/create_sampling_session")
class SamplingSessionView(MethodView):
    @blp.response(200, SamplingSessionAnswerSchema)
    @blp.arguments(SamplingSessionSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> Sampler:
        """Bind weights to the sampler `<session>:sample:<n>`."""
        return create_sampler(asked)


@blp.route("/join_sampling_session")
class JoinView(MethodView):
    @blp.response(200, JoinAnswerSchema)
    @blp.arguments(JoinSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> dict[str, int]:
        """Give a further client of a sampler a number of its own, from 1."""
        return {"client_counter": services().deliveries.join(tenant(), asked["sampling_session_id"])}


@blp.route("/samplers/<sampler_id>")
class SamplerView(MethodView):
    @blp.response(200, SamplerSchema)
    def get(self, sampler_id: str) -> Sampler:
        """Show a sampler."""
        return registry().sampler(tenant(), sampler_id)


@blp.route("/asample")
class SampleView(MethodView):
    @blp.response(200, SamplePromiseSchema)
    @blp.arguments(SampleSchema, location="wire")
    def post(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Promise continuations of a prompt."""
        return _sample(known_sampler(asked["sampling_session_id"]), asked)


def known_sampler(sampler_id: str) -> Sampler:
    """Return a sampler of the tenant who asks; it may have been deleted a moment ago, which the journal looks at."""
    return services().known_samplers.get((tenant(), sampler_id), lambda: registry().sampler(tenant(), sampler_id))


def create_sampler(asked: Mapping[str, Any]) -> Sampler:
    """Bind the weights that a request names to a number of its session."""
    owner, checkpoint = _sampler_checkpoint(asked["model_path"]) if "model_path" in asked else ("", None)
    model = base_model(asked.get("base_model") or (checkpoint.base_model if checkpoint else ""))
    if checkpoint and checkpoint.base_model != model.name:
        raise InvalidRequest(f"base_model is {model.name!r}; the weights were trained on {checkpoint.base_model!r}")
    if checkpoint:
        check_base(checkpoint, field="model_path")
    return registry().create_sampler(
        tenant(),
        session_id=asked["session_id"],
        seq=asked["sampling_session_seq_id"],
        base_model=model.name,
        slug=model.slug if checkpoint is None or checkpoint.is_lora else registry().run(owner, checkpoint.run_id).pool,
        model_path=checkpoint.uri if checkpoint else "",
        adapter_dir=checkpoint.directory if checkpoint else "",
        run_id=checkpoint.run_id if checkpoint else "",
        base_digest=model.digest,
        weights_digest=checkpoint.weights_digest if checkpoint else "",
    )


def _sampler_checkpoint(path: str) -> tuple[str, Checkpoint]:
    """Return a version that may be sampled, and whose it is."""
    owner, checkpoint = registry().readable_by_uri(tenant(), path)
    if not checkpoint.checkpoint_id.startswith(SAMPLER_SEGMENT):
        raise InvalidRequest(
            f"model_path {shown(path)} isn't there to be sampled; save_weights_for_sampler makes tinker://<run>/{SAMPLER_SEGMENT}<name>"
        )
    return owner, checkpoint


def _sample(sampler: Sampler, asked: Mapping[str, Any]) -> dict[str, Any]:
    message = off_loop(_message, sampler, asked, large=len(wire.body()) > wire.LARGE_BYTES)
    checks.check_sample(message, model_of(sampler))
    promise = submit(sampler, asked["seq_id"], message)
    return {
        "request_id": promise.request_id,
        "sample_sequence_ids": [f"{promise.request_id}:{n}" for n in range(message.num_samples)],
    }


def submit(sampler: Sampler, seq_id: int, message: Sample) -> Promise:
    """Put a checked sample into the queue and ring for it."""
    place = (Sample.kind, sampler.slug, tenant())
    request_id = keys.request_id(sampler.sampler_id, seq_id)
    letter = services().doorbell.letter(*place, request_id)
    send = partial(services().journal.submit_sample, tenant(), sampler, seq_id, message, letter=letter)
    try:
        promise = services().expected.submit(tenant(), request_id, send)
    except NotFound:
        registry().sampler(tenant(), sampler.sampler_id)  # which says why it is no longer there
        raise
    services().ring(*place, promise.request_id, posted=letter is not None)
    return promise


def _message(sampler: Sampler, asked: Mapping[str, Any]) -> Sample:
    params = dict(asked["sampling_params"])
    stop_tokens, stop_strings, stop_at_eos = checks.parse_stop(params.pop("stop", None))
    if "target_prompt_logprobs" in asked:
        params |= _targets(codec.decode_cells_json(asked["target_prompt_logprobs"], "target_prompt_logprobs"))
    return Sample(
        adapter_dir=sampler.adapter_dir,
        weights_digest=sampler.weights_digest,
        prompt=codec.decode_prompt_json(asked["prompt"]),
        num_samples=asked["num_samples"],
        stop_tokens=stop_tokens,
        stop_strings=stop_strings,
        stop_at_eos=stop_at_eos,
        prompt_logprobs=asked["prompt_logprobs"],
        topk_prompt_logprobs=asked["topk_prompt_logprobs"],
        topk_sample_logprobs=asked["topk_sample_logprobs"],
        prompt_alt_tokens_k=asked["prompt_alt_tokens_k"],
        prompt_logprobs_last_n=asked["prompt_logprobs_last_n"],
        **params,
    )


def _targets(cells: codec.Cells) -> dict[str, tuple[int, ...]]:
    """Return `target_prompt_logprobs` as the fields of a Sample."""
    return {
        "target_ids": tuple(cells.values.tolist()),
        "target_shape": cells.shape,
        "target_crow": () if cells.crow is None else tuple(cells.crow.tolist()),
        "target_columns": () if cells.columns is None else tuple(cells.columns.tolist()),
    }
