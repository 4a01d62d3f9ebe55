"""The one table from an error to an HTTP answer, and the answers themselves.

Every answer is JSON: `{"error": {"code", "message", "request_id"}, "detail"}`. Statuses follow what the
SDK does with them: it repeats 408, 409, 429 and 5xx for minutes, so nothing permanent is ever one of
those. A traceback goes to the log under the request id, never to a client. Only what is no HTTP at all never gets
here: gunicorn answers it by itself, with 400 and a line of HTML.
"""

from __future__ import annotations

import logging
import math

from flask import Flask, Response, g, jsonify
from werkzeug.exceptions import HTTPException

from openrl.tasks import errors

log = logging.getLogger(__name__)

TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (errors.TokenRejected, 401, "invalid_token"),
    (errors.Unauthorized, 401, "unauthorized"),
    (errors.OutOfScope, 403, "out_of_scope"),
    (errors.Forbidden, 403, "forbidden"),
    (errors.NotLocal, 403, "not_local"),
    (errors.Incomplete, 408, "incomplete"),
    (errors.TooLarge, 413, "too_large"),
    (errors.KeyReused, 422, "key_reused"),
    (errors.QuotaExceeded, 403, "quota_exceeded"),
    (errors.Undecodable, 400, "undecodable"),
    (errors.InvalidRequest, 422, "invalid_request"),
    (errors.OtherVersion, 422, "other_version"),
    (errors.NotFound, 404, "not_found"),
    (errors.Gone, 410, "gone"),
    (errors.Overloaded, 429, "overloaded"),
    (errors.NotServed, 503, "not_served"),
    (errors.DiskRefusal, 503, "disk_unavailable"),
    (errors.StoreUnavailable, 503, "store_unavailable"),
)
"""Looked through in order: a class comes before its base."""

RETRY_AFTER_S = 2
"""What a client that must wait is told."""


def register(app: Flask) -> None:
    """Make the table answer for every error that leaves a view."""
    app.register_error_handler(errors.OpenRLError, _domain_error)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(Exception, _unforeseen)


def answer(status: int, code: str, message: str) -> Response:
    """Build the answer of one error."""
    response = jsonify(error={"code": code, "message": message, "request_id": request_id()}, detail=message)
    response.status_code = status
    if status in (429, 503):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def request_id() -> str:
    """Return the id of the request in hand, which is also in the answer's header and in the log."""
    return str(g.get("request_id", ""))


def _domain_error(error: errors.OpenRLError) -> Response:
    for kind, status, code in TABLE:
        if isinstance(error, kind):
            if status >= 500:
                log.error("request %s: %s", request_id(), error)
            return _told(answer(status, code, str(error)), error)
    return _unforeseen(error)


def _told(response: Response, error: errors.OpenRLError) -> Response:
    """Add what a client's library acts on: when to try again, and that a new token will do."""
    if isinstance(error, errors.Overloaded):
        response.headers["Retry-After"] = str(math.ceil(error.retry_after_s))
    if isinstance(error, errors.TokenRejected):
        response.headers["WWW-Authenticate"] = 'Bearer error="invalid_token"'
    return response


def _http_error(error: HTTPException) -> Response:
    """Answer what Flask itself refuses: no such route, method or content type."""
    code = (error.name or "error").lower().replace(" ", "_")
    return answer(error.code or 500, code, error.description or error.name)


def _unforeseen(error: Exception) -> Response:
    log.error("request %s: unforeseen", request_id(), exc_info=error)
    return answer(500, "internal", f"The service failed; its log has the cause under request {request_id()}.")
