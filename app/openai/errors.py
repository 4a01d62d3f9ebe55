"""Refusals in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`.

Which error means what is `openrl.app.errors`'; here 422 becomes 400, as these clients know it, and a header tells them
whether another try can help: without it they would repeat every 5xx.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from flask import Blueprint, Response, jsonify
from marshmallow import ValidationError
from werkzeug.exceptions import HTTPException

from openrl.app.errors import RETRY_AFTER_S, TABLE, request_id
from openrl.tasks.errors import InvalidRequest, OpenRLError, Overloaded

log = logging.getLogger(__name__)

WORTH_A_RETRY = (408, 429, 503)

TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class Refused(InvalidRequest):
    """The request makes no sense in one field: mend it."""

    param: str | None = None
    code: str | None = None


class SampleFailed(OpenRLError):
    """The sampler failed on it: an operator finds the cause in the sampler's log."""


class ClientGone(OpenRLError):
    """Nobody is there to read the answer; what was asked for is cancelled."""


class TookTooLong(OpenRLError):
    """No sampler had answered in time; the samples are given up: send it again when one is there."""


OURS: tuple[tuple[type[Exception], int, str], ...] = (
    (SampleFailed, 500, "sample_failed"),
    (TookTooLong, 504, "timeout"),
    (ClientGone, 408, "client_gone"),
)


def refused(message: str, param: str, code: str | None = None) -> Refused:
    """Return a refusal that names its field."""
    refusal = Refused(message)
    refusal.param, refusal.code = param, code
    return refusal


def register(blp: Blueprint) -> None:
    """Answer for all that is raised on the way to a view of this blueprint, or in it."""
    blp.register_error_handler(OpenRLError, answer)
    blp.register_error_handler(HTTPException, _http_answer)
    blp.register_error_handler(Exception, answer)


def answer(error: Exception) -> Response:
    """Build the answer of an error."""
    status, body = described(error, request_id())
    response = _response(status, body)
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    return response


def described(error: Exception, number: str) -> tuple[int, dict[str, Any]]:
    """Return status and body of an error in request `number`; what nobody foresaw is logged."""
    for kind, status, code in (*OURS, *TABLE):
        if isinstance(error, kind):
            status = 400 if status == 422 else status
            if status >= 500:
                log.error("request %s: %s", number, error)
            return status, _body(status, str(error), CODES.get(status, code), error)
    log.error("request %s: unforeseen", number, exc_info=error)
    return 500, _body(500, f"The service failed; its log has the cause under request {number}.", "internal")


def _http_answer(error: HTTPException) -> Response:
    status = error.code or 500
    return _response(status, _body(status, error.description or error.name, error.name.lower().replace(" ", "_")))


def _body(status: int, message: str, code: str, error: Exception | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    cause = error.__cause__ if error is not None else None
    param = getattr(error, "param", None)
    if isinstance(cause, ValidationError):
        param = _first_field(cause)
    return {"error": {"message": message, "type": kind, "param": param, "code": getattr(error, "code", None) or code}}


def _first_field(error: ValidationError) -> str | None:
    messages: Any = error.messages
    messages = messages.get("wire", messages) if isinstance(messages, dict) else {}
    return next((str(name)[:80] for name in messages if name != "_schema"), None)


def _response(status: int, body: dict[str, Any]) -> Response:
    response = jsonify(body)
    response.status_code = status
    response.headers["x-should-retry"] = "true" if status in WORTH_A_RETRY else "false"
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
