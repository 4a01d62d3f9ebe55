"""`/api/v1` is frozen: what a client may send and read today, it may send and read tomorrow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from flask import Flask

from openrl.app.openapi import operations
from tests.app import contract


def test_nothing_that_v1_promised_is_broken() -> None:
    assert contract.breaks(contract.kept(), contract.current()) == []


def test_the_kept_document_is_that_of_the_code() -> None:
    """An addition is kept by `make openapi`; the difference then shows it to whoever reads the change."""
    assert contract.KEPT.read_text() == contract.written(contract.current()), "run `make openapi`"


def test_every_route_is_in_the_document(app: Flask) -> None:
    """What `/v1` takes and returns is described elsewhere: it is OpenAI's."""
    outside = {"/api/v1/openapi.json", "/api/v1/docs"}
    routes = {
        (rule.rule.replace("<path:", "<").replace("<", "{").replace(">", "}"), method.lower())
        for rule in app.url_map.iter_rules()
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
        if rule.rule.startswith("/api/v1/") and rule.rule not in outside
    }
    assert routes == {(path, method) for path, method, _ in operations(contract.current())}


CREATE, RUN = "/api/v1/create_model", "/api/v1/training_runs/{run_id}"


def _property(document: dict[str, Any], schema: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = document["components"]["schemas"][schema]["properties"][name]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda new: new["paths"].pop(CREATE), "POST /api/v1/create_model is gone"),
        (lambda new: new["paths"][RUN].pop("get"), "GET /api/v1/training_runs/{run_id} is gone"),
        (lambda new: new["components"]["schemas"]["CreateModel"]["properties"].pop("type"), "body.type is gone"),
        (
            lambda new: new["components"]["schemas"]["CreateModel"]["required"].append("user_metadata"),
            "body.user_metadata is required now",
        ),
        (lambda new: _property(new, "CreateModel", "base_model").update(maxLength=10), "had 4096"),
        (lambda new: _property(new, "CreateModel", "base_model").update(type="integer"), "was string and is integer"),
        (lambda new: _property(new, "CreateModel", "user_metadata").pop("nullable"), "may not be null any more"),
        (lambda new: _property(new, "LoraConfig", "rank").update(minimum=8), "body.lora_config.rank has minimum 8"),
        (lambda new: _property(new, "CreateModel", "base_model").update(enum=["a"]), "['a'] only"),
        (lambda new: new["components"]["schemas"]["Run"]["properties"].pop("lora_rank"), "answer.lora_rank is gone"),
        (lambda new: _property(new, "Run", "lora_rank").update(nullable=True), "answer.lora_rank may be null now"),
        (lambda new: _property(new, "Run", "lora_rank").update(type="string"), "was integer and is string"),
        (
            lambda new: new["components"]["schemas"]["Promise"]["required"].remove("request_id"),
            "answer.request_id may be absent now",
        ),
        (lambda new: new["paths"][RUN]["get"]["responses"].pop("200"), "isn't answered with application/json"),
        (lambda new: new["paths"]["/api/v1/healthz"]["get"].pop("security"), "needs a key now"),
    ],
)
def test_a_change_that_breaks_a_client_is_named(change: Callable[[Any], object], said: str) -> None:
    old = contract.kept()
    new = copy.deepcopy(old)
    change(new)
    assert any(said in line for line in contract.breaks(old, new)), contract.breaks(old, new)


def test_an_addition_breaks_nobody() -> None:
    old = contract.kept()
    new = copy.deepcopy(old)
    new["paths"]["/api/v1/more"] = copy.deepcopy(new["paths"][CREATE])
    schemas = new["components"]["schemas"]
    schemas["CreateModel"]["properties"]["more"] = {"type": "string"}
    schemas["Run"]["properties"]["more"] = {"type": "string"}
    schemas["CreateModel"]["required"].remove("base_model")
    _property(new, "LoraConfig", "rank").update(minimum=-(2**40))
    assert contract.breaks(old, new) == [] and old != new
