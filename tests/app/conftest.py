"""The API on a real store, and a worker played by the journal's own take and commit."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

from openrl.app.context import EXTENSION, Services
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.celery import celery
from openrl.tasks.journal import Journal, Operation, Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import BaseModel, Checkpoint, Registry, checkpoint_row
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from openrl.tasks.wire import codec
from openrl.tasks.wire import openrl_pb2 as pb

MODEL = BaseModel(
    name="tiny/random",
    slug="tiny-random",
    path="/models/tiny",
    vocab_size=260,
    max_context=64,
    arch="llama",
    tokenizer_id="tiny/random",
    hidden_size=64,
    num_layers=2,
    tied_embeddings=True,
)

GOLDEN = base64.b64decode(
    "CgFtEAEadAoUChIKEAEAAAACAAAAAwAAAAQAAAASOAoNdGFyZ2V0X3Rva2VucxInCiACAAAAAAAAAAMAAAAAAAAABAAAAAAAAAAFAAAAAAAAABgC"
    "IgEEEiIKB3dlaWdodHMSFwoQAAAAAAAAgD8AAIA/AACAPxgBIgEEIg1jcm9zc19lbnRyb3B5"
)
"""A forward_backward as the SDK sends it: model "m", seq 1, tokens 1 2 3 4, targets 2 3 4 5, weights 0 1 1 1."""

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass
class Api:
    """Speaks to the API as the SDK does."""

    client: FlaskClient
    services: Services
    key: str = ""

    def post(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> TestResponse:
        headers = {"Content-Type": "application/json", **self._headers(options)}
        return self.client.post(f"/api/v1{path}", data=json.dumps(body or {}), headers=headers, **options)

    def send(self, path: str, body: bytes, **options: Any) -> TestResponse:
        return self.client.post(f"/api/v1{path}", data=body, headers=self._headers(options), **options)

    def get(self, path: str, **options: Any) -> TestResponse:
        return self.client.get(f"/api/v1{path}", headers=self._headers(options), **options)

    def poll(self, request_id: str, **options: Any) -> TestResponse:
        return self.post("/retrieve_future", {"request_id": request_id, "allow_metadata_only": True}, **options)

    def session(self) -> str:
        body = {"tags": [], "user_metadata": {"exp": "sft"}, "sdk_version": "0.38.0", "type": "create_session"}
        return str(self.ok(self.post("/create_session", body))["session_id"])

    def create_model(self, session: str, number: int = 0, **changes: Any) -> TestResponse:
        body = {
            "session_id": session,
            "model_seq_id": number,
            "base_model": "tiny/random",
            "lora_config": {"rank": 8, "seed": 0, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"},
            "type": "create_model",
        }
        return self.post("/create_model", body | changes)

    def run(self) -> str:
        return str(self.ok(self.create_model(self.session()))["model_id"])

    def forward_backward(self, run: str, seq: int, **changes: Any) -> TestResponse:
        return self.send("/forward_backward", forward_backward(run, seq, **changes), headers=PROTOBUF)

    def optim_step(self, run: str, seq: int, **params: Any) -> TestResponse:
        adam = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0} | params
        return self.post("/optim_step", {"model_id": run, "seq_id": seq, "type": "optim_step", "adam_params": adam})

    def ok(self, response: TestResponse) -> dict[str, Any]:
        assert response.status_code == 200, response.text
        found = response.get_json()
        assert isinstance(found, dict)
        return found

    def _headers(self, options: dict[str, Any]) -> dict[str, str]:
        return {**({"X-API-Key": self.key} if self.key else {}), **options.pop("headers", {})}


def forward_backward(run: str, seq: int, *, tokens: list[int] | None = None, loss_fn: str = "cross_entropy") -> bytes:
    """Return the golden request, addressed to a run."""
    call = pb.ForwardBackwardCall.FromString(GOLDEN)
    call.model_id, call.seq_id, call.loss_fn = run, seq, loss_fn
    if tokens is not None:
        packed = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
        call.data[0].model_input[0].encoded_text.tokens = packed
    return call.SerializeToString()


class Worker:
    """A trainer without a model: takes what the journal offers and commits what a test says."""

    def __init__(self, store: Store, lease: Lease) -> None:
        self.store, self.lease, self.journal = store, lease, Journal(store)

    def step(self, outcomes: dict[str, Outcome] | None = None, *, pool: str = MODEL.slug) -> list[Operation]:
        """Execute everything that can run now in a pool; `outcomes` by kind, else an empty success."""
        done: list[Operation] = []
        for piece in self.journal.take(pool, self.lease):
            for found, body in zip(piece.operations, self.journal.bodies(piece.operations), strict=True):
                assert isinstance(body, bytes)
                operation = replace(found, body=body)
                outcome = (outcomes or {}).get(operation.kind) or _outcome(operation)
                self.journal.commit(self.lease, operation, outcome, token=piece.token)
                done.append(operation)
        return done

    def save(self, tenant: str, run: str, name: str, kind: str = "training", **changes: Any) -> Outcome:
        """Return the outcome of a save that registers a checkpoint."""
        segment = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}[kind]
        values: dict[str, Any] = {
            "run_id": run,
            "checkpoint_id": f"{segment}/{name}",
            "kind": kind,
            "directory": f"tenants/{tenant}/{segment}/{name}",
            "size_bytes": 10,
            "created": 1_700_000_000.0,
            "base_model": MODEL.name,
            "rank": 8,
            "train_attn": True,
            "train_mlp": True,
            "train_unembed": True,
            "step": 1,
            "has_optimizer": kind == "training",
        }
        checkpoint = Checkpoint(**(values | changes))
        return Outcome(result=b'{"path": "%s"}' % checkpoint.uri.encode(), rows=(checkpoint_row(tenant, checkpoint),))


def _outcome(operation: Operation) -> Outcome:
    if operation.kind in ("refused", "missing"):
        return Outcome(error=operation.error, category="user")
    return Outcome(result=b"{}")


@pytest.fixture
def settings() -> AppSettings:
    """Short polls, and nothing remembered: tests play other processes, and look at once."""
    return AppSettings(poll_min_s=0.05, poll_max_s=0.1, remember_s=0)


@pytest.fixture
def app(store: Store, settings: AppSettings) -> Iterator[Flask]:
    Registry(store).add_model(MODEL)
    celery.conf.broker_url = store.settings.broker_url
    app = create_app(settings, store=store)
    yield app
    app.extensions[EXTENSION].close()


@pytest.fixture
def api(app: Flask) -> Api:
    return Api(app.test_client(), app.extensions[EXTENSION])


@pytest.fixture
def two(app: Flask, store: Store) -> tuple[Api, Api]:
    """Two tenants, each with a key."""
    first, second = (
        Api(app.test_client(), app.extensions[EXTENSION], Tenants(store).create_key(name)) for name in ("ada", "bob")
    )
    return first, second


@pytest.fixture
def worker(store: Store) -> Iterator[Worker]:
    lease = Lease(store, "w1", kind="trainer", slug=MODEL.slug)
    yield Worker(store, lease)
    lease.close()


@pytest.fixture
def training_result() -> bytes:
    """A forward_backward's result, as a trainer encodes it."""
    import numpy as np

    return codec.encode_forward_backward_output([np.full(4, -1.0, np.float32)], {"loss:sum": 3.0})
