"""Answers that wait outside of Flask."""

from __future__ import annotations

import pytest
from flask import Flask, Response, g, has_request_context, jsonify
from flask.testing import FlaskClient

from openrl.app import errors
from openrl.app.held import Held
from openrl.tasks.errors import Gone


@pytest.fixture
def seen() -> list[str]:
    """What happened, in order."""
    return []


@pytest.fixture
def client(seen: list[str]) -> FlaskClient:
    app = Flask(__name__)
    errors.register(app)

    @app.before_request
    def identify() -> None:
        g.tenant, g.request_id = "ada", "r-1"

    @app.after_request
    def number(response: Response) -> Response:
        response.headers["X-Request-Id"] = g.request_id
        return response

    @app.teardown_request
    def end(_: object) -> None:
        seen.append("end")

    def wait(ends: str) -> str:
        seen.append(f"waits, {'in' if has_request_context() else 'out of'} the request")
        if ends == "gone":
            raise Gone("it is gone")
        return ends

    def answer(found: str) -> Response:
        if found == "broken":
            raise ZeroDivisionError
        seen.append(f"answers, {'in' if has_request_context() else 'out of'} the request")
        return jsonify(found=found, tenant=g.tenant)

    @app.get("/<ends>")
    def view(ends: str) -> Response:
        return Held(lambda: wait(ends), answer)

    return app.test_client()


def test_an_answer_is_waited_for_and_built_when_the_request_has_left_flask(
    client: FlaskClient, seen: list[str]
) -> None:
    answer = client.get("/here", headers={"Accept": "text/x"})
    assert seen == ["end", "waits, out of the request", "answers, out of the request"]
    assert answer.status_code == 200 and answer.mimetype == "application/json"
    assert answer.get_json() == {"found": "here", "tenant": "ada"}


def test_headers_for_every_answer_are_on_one_that_waited(client: FlaskClient) -> None:
    for ends in ("here", "gone", "broken"):
        answer = client.get(f"/{ends}", headers={"Accept": "*/*"})
        assert answer.headers.getlist("X-Request-Id") == ["r-1"]
        assert len(answer.headers.getlist("Content-Type")) == 1


def test_what_a_wait_raises_is_answered_as_from_a_view(client: FlaskClient) -> None:
    answer = client.get("/gone")
    assert answer.status_code == 410
    assert answer.get_json()["error"] == {"code": "gone", "message": "it is gone", "request_id": "r-1"}


def test_an_answer_that_cannot_be_built_is_a_500_without_a_traceback(
    client: FlaskClient, caplog: pytest.LogCaptureFixture
) -> None:
    answer = client.get("/broken")
    assert answer.status_code == 500 and "ZeroDivision" not in answer.text
    assert "ZeroDivisionError" in caplog.text and "r-1" in caplog.text
