"""The routes: GET /v1/models, POST /v1/completions, POST /v1/chat/completions.

They aren't in the service's own OpenAPI document: what they take and return is OpenAI's to describe.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from flask import Blueprint, Response, jsonify, request

from openrl.app import wire
from openrl.app.errors import request_id
from openrl.app.greenlets import off_loop
from openrl.app.held import Held
from openrl.app.openai import answers, errors, models
from openrl.app.openai.answers import Chat, Completion, Form
from openrl.app.openai.asked import Asked, ChatSchema, CompletionSchema
from openrl.app.openai.order import Order
from openrl.app.openai.plan import Plan, plan
from openrl.app.openai.stream import HEADERS, Stream

blp = Blueprint("openai", __name__)
errors.register(blp)

_parser = wire.WireParser()


@blp.get("/models")
def list_models() -> Response:
    """List what can be named as a model."""
    return jsonify(object="list", data=models.listed())


@blp.get("/models/<path:name>", merge_slashes=False)
def show_model(name: str) -> Response:
    """Show one of them."""
    return jsonify(models.described(name))


@blp.post("/completions")
@_parser.use_args(CompletionSchema, location="wire")
def complete(asked: Asked) -> Response:
    """Continue prompts."""
    planned = plan(asked)
    return _answered(planned, Completion(planned.tokenizer))


@blp.post("/chat/completions")
@_parser.use_args(ChatSchema, location="wire")
def chat(asked: Asked) -> Response:
    """Continue a conversation."""
    planned = plan(asked)
    return _answered(planned, Chat(planned.tokenizer))


def _answered(planned: Plan, form: Form) -> Response:
    order = Order(planned, request.environ.get("gunicorn.socket"))
    if planned.asked.stream:
        stream = Stream(planned, form, order, request_id())
        return Response(stream, mimetype="text/event-stream", headers=HEADERS)
    return Held(partial(_whole, planned, form, order, request_id()), jsonify)


def _whole(planned: Plan, form: Form, order: Order, number: str) -> dict[str, Any]:
    """Wait for all results and put the answer together."""
    try:
        for _ in order:
            pass
    finally:
        order.close()
    used = answers.usage(planned, order.results)["total_tokens"]
    return off_loop(answers.answer, planned, form, order.results, number, large=used > answers.LARGE_TOKENS)
