"""Schemathesis over the OpenAPI document: whatever a client sends, an answer is one that the document names.

The short form is a few derandomised examples of each operation, well-formed and not, half of them aimed at things
that exist; the long form (`make test-full`) is many, new ones each time where CI is not set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from flask import Flask
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from openrl.app.context import EXTENSION
from openrl.app.openapi import operations
from openrl.tasks.tenants import LOCAL
from tests.app import contract, walk
from tests.app.conftest import Api, forward_backward

PREFIX = "/api/v1"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
INSIDE = ("Traceback", 'File "', "site-packages", "openrl.tasks", "redis.exceptions")
OPERATIONS = [(method.upper(), path) for path, method, _ in operations(contract.kept())]
Known = dict[str, Any]
MODES = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]


@pytest.fixture(scope="module")
def app(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    """One service for all operations: what one leaves behind is more that the others must bear."""
    with walk.serving(store_url, tmp_path_factory.mktemp("data")) as (app, _):
        yield app


@pytest.fixture
def known(app: Flask) -> Iterator[Known]:
    """Things that exist, by the names that parameters and fields have for them."""
    services = app.extensions[EXTENSION]
    with walk.working(services.store) as worker:
        its = walk.furnished(Api(app.test_client(), services), worker, LOCAL)
        yield {
            "run_id": its.run, "model_id": its.run, "session_id": its.session, "request_id": f"{its.run}:1",
            "sampler_id": its.sampler, "sampling_session_id": its.sampler, "kind": "weights", "name": its.name,
            "path": its.uri(), "tinker_path": its.uri(), "source_path": its.uri(), "base_model": walk.MODEL.name,
            "model_path": its.uri("sampler_weights"),
        }  # fmt: skip


def aimed(case: schemathesis.Case, known: Known, pick: Callable[[], bool]) -> schemathesis.Case:
    """Put things that exist in place of some names that were made up."""
    for part in (case.path_parameters, case.body):
        if isinstance(part, dict):
            part.update({name: known[name] for name in sorted(part.keys() & known.keys()) if pick()})
    return case


def modes(path: str) -> list[schemathesis.GenerationMode]:
    """Return how examples are made; nothing can be wrong with a question that says nothing."""
    return MODES[:1] if path == f"{PREFIX}/healthz" else MODES


def checking(app: Flask, operation: schemathesis.APIOperation, known: Known, mode: schemathesis.GenerationMode) -> Any:
    """Return a test of one operation, for hypothesis to run with its examples."""

    @given(case=operation.as_strategy(mode), data=st.data())
    def check(case: schemathesis.Case, data: st.DataObject) -> None:
        response = aimed(case, known, lambda: data.draw(st.booleans())).call(app=app)
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400:
            assert not [word for word in INSIDE if word in response.text], response.text

    return check


@pytest.fixture(scope="module")
def document() -> Any:
    """The document as schemathesis reads it; it doesn't search our code for words here, which takes its time."""
    return schemathesis.openapi.from_dict(contract.kept())


@pytest.fixture(autouse=True)
def _protobuf() -> None:
    schemathesis.openapi.media_type(
        "application/x-protobuf", st.binary(max_size=200) | st.just(forward_backward("s-0:train:0", 1))
    )


COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_one_that_the_document_names(
    app: Flask, document: Any, known: Known, method: str, path: str
) -> None:
    short = hypothesis.settings(**COMMON, max_examples=3, derandomize=True)
    for mode in modes(path):
        short(checking(app, document[path][method], known, mode))()


@pytest.mark.full
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_at_length_every_answer_is_one_that_the_document_names(
    app: Flask, known: Known, method: str, path: str
) -> None:
    long = hypothesis.settings(**COMMON, max_examples=80, print_blob=True)
    whole = schemathesis.openapi.from_wsgi(f"{PREFIX}/openapi.json", app)
    for mode in modes(path):
        long(checking(app, whole[path][method], known, mode))()
