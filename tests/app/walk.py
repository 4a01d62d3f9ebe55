"""Every route of the API with things in it that are somebody's: one row a route, each with all the requests to try.

Two tests walk these rows: with another tenant's ids, and with texts that would leave the data directory if they could.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flask import Flask

from openrl.app.context import EXTENSION
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.celery import celery
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from tests.app.conftest import MODEL, Api, Worker, forward_backward

NOBODY = "s-" + "0" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Things:
    """The ids of a tenant's things, all of which follow from the session's."""

    session: str = NOBODY
    owner: str = "ada"
    name: str = "ck"

    @property
    def run(self) -> str:
        return f"{self.session}:train:0"

    @property
    def sampler(self) -> str:
        return f"{self.session}:sample:0"

    def uri(self, segment: str = "weights") -> str:
        return f"tinker://{self.run}/{segment}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mine:
    """What the tenant who asks has, and a number of the run that nobody has used yet."""

    session: str
    run: str
    number: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request. `status` is what it is answered with where the thing is not one's own."""

    path: str
    json: dict[str, Any] | None = None
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 404


Row = Callable[[Things, Mine], list[Ask]]

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
SAMPLE = {"seq_id": 0, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
LORA = {"model_seq_id": 5, "base_model": MODEL.name, "lora_config": {"rank": 4}}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
SEGMENTS = ("weights", "sampler_weights", "external_weights")


def nothing(_its: Things, _mine: Mine) -> list[Ask]:
    """Return no request: the route names nobody's thing, and answers with one's own."""
    return []


def checkpoints(end: str, json: dict[str, Any] | None = None) -> Row:
    """Return the row of a route under each kind of checkpoint of a run."""
    return lambda its, _: [
        Ask(path=f"/training_runs/{its.run}/checkpoints/{segment}/{its.name}{end}", json=json) for segment in SEGMENTS
    ]


def saves(route: str, **more: Any) -> Row:
    return lambda its, _: [Ask(path=route, json={"model_id": its.run, "seq_id": 9, **more})]


def loads(its: Things, mine: Mine) -> list[Ask]:
    load = {"path": its.uri(), "optimizer": False}
    onto, into = {"model_id": mine.run, "seq_id": next(mine.number)}, {"session_id": mine.session, "model_seq_id": 8}
    foreign = {"model_id": its.run, "seq_id": 9}
    return [
        Ask(path="/load_weights", json=load | onto),
        Ask(path="/load_weights", json=load | into),
        Ask(path="/load_weights", json=load | foreign),
        Ask(path="/load_weights", json=load | into | {"path": its.uri("external_weights")}),
    ]


def batches(route: str, wrapped: str) -> Row:
    data = [{"model_input": PROMPT, "loss_fn_inputs": {"target_tokens": {"data": [1, 2], "dtype": "int64"}}}]
    content = {wrapped: {"data": data, "loss_fn": "cross_entropy"}, "seq_id": 9}
    return lambda its, _: [Ask(path=route, json={**content, "model_id": its.run})]


def forward_backwards(its: Things, mine: Mine) -> list[Ask]:
    sent = forward_backward(its.run, 9)
    return [
        *batches("/forward_backward", "forward_backward_input")(its, mine),
        Ask(path="/forward_backward", body=sent, headers=PROTOBUF),
        Ask(path="/forward_backward", body=sent + b"\xff", headers=PROTOBUF, status=400),
    ]


def futures(route: str) -> Row:
    """Return the row of a route that takes a promise: of a run, of a sampler, of a sampler's sequence."""
    return lambda its, _: [
        Ask(path=route, json={"request_id": f"{parent}:{seq}"})
        for parent in (its.run, its.sampler)
        for seq in (0, 1, 2, 99, "0:0")
    ]


def openai(route: str, **asked: Any) -> Row:
    return lambda its, _: [
        Ask(path=f"/v1/{route}", json={"model": model, **asked}) for model in (its.uri("sampler_weights"), its.sampler)
    ]


def copies(its: Things, mine: Mine) -> list[Ask]:
    mine_too = {"session_id": mine.session, "model_seq_id": 7}
    return [
        Ask(path="/copy_weights", json={"source_path": its.uri(), "destination_project_id": "p"}),
        Ask(path="/copy_weights", json={"source_path": its.uri("external_weights"), **mine_too}),
        Ask(path="/copy_weights", json={"source_path": its.uri(), "session_id": its.session, "model_seq_id": 7}),
    ]


def samplers(its: Things, mine: Mine) -> list[Ask]:
    route, base = "/create_sampling_session", {"base_model": MODEL.name}
    return [
        Ask(path=route, json={"session_id": its.session, "sampling_session_seq_id": 5, **base}),
        Ask(
            path=route,
            json={
                "session_id": mine.session,
                "sampling_session_seq_id": 5,
                "model_path": its.uri("sampler_weights"),
            },
        ),
    ]


def many_futures(its: Things, _mine: Mine) -> list[Ask]:
    target = {"type": "sampling_session", "sampling_session_id": its.sampler, "cloned_sampler_id": 0}
    return [
        Ask(path="/retrieve_futures", json={"target": target, "prev_cursor": 0, "timeout": 0.0}),
        Ask(
            path="/retrieve_futures",
            json={"target": target, "timeout": 0.0, "retrieved_request_ids": [f"{its.sampler}:0"]},
        ),
    ]


def found(its: Things, _mine: Mine) -> list[Ask]:
    """A search says by an empty page that there is nothing."""
    return [
        Ask(path="/sessions/search", json={"session_id": its.session}, status=200),
        Ask(path="/sessions/search", json={"project_ids": ["project-of-ada"]}, status=200),
        Ask(path="/sessions/search", json={"display_name": "name-of-ada"}, status=200),
        Ask(path="/sessions/search", json={"user_metadata": {"of": "ada"}}, status=200),
    ]


ROWS: dict[str, Row] = {
    # the service
    "GET /healthz": nothing,
    "GET /openapi.json": nothing,
    "GET /docs": nothing,
    "POST /client/config": nothing,
    "POST /client/dynamic_config": nothing,
    "GET /get_server_capabilities": nothing,
    "POST /telemetry": lambda its, _: [Ask(path="/telemetry", json={"session_id": its.session}, status=200)],
    # keys
    "POST /auth/token": nothing,
    "GET /auth/apikey/me": nothing,
    "DELETE /auth/apikey/me": nothing,
    # sessions
    "POST /create_session": nothing,
    "POST /session_heartbeat": lambda its, _: [Ask(path="/session_heartbeat", json={"session_id": its.session})],
    "POST /sessions/{}/finish": lambda its, _: [Ask(path=f"/sessions/{its.session}/finish", json={})],
    "GET /sessions": nothing,
    "GET /sessions/{}": lambda its, _: [
        Ask(path=f"/sessions/{its.session}{query}") for query in ("", "?access_scope=accessible")
    ],
    "POST /sessions/search": found,
    "PUT /sessions/{}/project": lambda its, _: [Ask(path=f"/sessions/{its.session}/project", json={"project_id": "p"})],
    "GET /sessions/{}/trace_export": lambda its, _: [Ask(path=f"/sessions/{its.session}/trace_export")],
    "GET /traces/{}/{}": lambda its, _: [
        Ask(path=f"/traces/{its.owner}/{its.session}", status=401),
        Ask(path=f"/traces/{its.owner}/{its.session}?expires=9999999999&signature=x", status=403),
    ],
    # runs
    "POST /create_model": lambda its, _: [
        Ask(path="/create_model", json={"session_id": its.session, **LORA, **changes})
        for changes in ({}, {"lora_config": None}, {"user_metadata": {"openrl.fine_tuning_type": "full"}})
    ],
    "POST /load_weights": loads,
    "POST /unload_model": lambda its, _: [Ask(path="/unload_model", json={"model_id": its.run})],
    "POST /get_info": lambda its, _: [Ask(path="/get_info", json={"model_id": its.run})],
    "POST /forward_backward": forward_backwards,
    "POST /forward": batches("/forward", "forward_input"),
    "POST /optim_step": saves("/optim_step", adam_params={}),
    "GET /training_runs": nothing,
    "GET /training_runs/{}": lambda its, _: [
        Ask(path=f"/training_runs/{its.run}{query}") for query in ("", "?access_scope=accessible")
    ],
    # checkpoints
    "POST /save_weights": saves("/save_weights", path="x"),
    "POST /save_weights_for_sampler": lambda its, _: [
        Ask(path="/save_weights_for_sampler", json={"model_id": its.run, "seq_id": 9, "path": "x"}),
        Ask(path="/save_weights_for_sampler", json={"model_id": its.run, "seq_id": 9, "sampling_session_seq_id": 3}),
    ],
    "POST /save_weights_external": saves("/save_weights_external", path="x"),
    "POST /copy_weights": copies,
    "POST /weights_info": lambda its, _: [
        Ask(path="/weights_info", json={"tinker_path": its.uri(segment)}) for segment in SEGMENTS
    ],
    "GET /checkpoints": nothing,
    "GET /training_runs/{}/checkpoints": lambda its, _: [Ask(path=f"/training_runs/{its.run}/checkpoints")],
    "DELETE /training_runs/{}/checkpoints/{}/{}": checkpoints(""),
    "PUT /training_runs/{}/checkpoints/{}/{}/ttl": checkpoints("/ttl", {"ttl_seconds": None}),
    "POST /training_runs/{}/checkpoints/{}/{}/publish": checkpoints("/publish"),
    "DELETE /training_runs/{}/checkpoints/{}/{}/publish": checkpoints("/publish"),
    "GET /training_runs/{}/checkpoints/external_weights/{}/external_weights_urls": lambda its, _: [
        Ask(path=f"/training_runs/{its.run}/checkpoints/external_weights/{its.name}/external_weights_urls")
    ],
    "GET /training_runs/{}/checkpoints/{}/{}/archive": checkpoints("/archive"),
    "GET /exports/{}/{}": lambda its, _: [
        Ask(path=f"/exports/{its.owner}/runs/{its.run}/external_weights/{its.name}.1/adapter_config.json", status=401)
    ],
    # sampling
    "POST /create_sampling_session": samplers,
    "POST /join_sampling_session": lambda its, _: [
        Ask(path="/join_sampling_session", json={"sampling_session_id": its.sampler})
    ],
    "GET /samplers/{}": lambda its, _: [Ask(path=f"/samplers/{its.sampler}")],
    "POST /asample": lambda its, _: [Ask(path="/asample", json={"sampling_session_id": its.sampler, **SAMPLE})],
    # results
    "POST /retrieve_future": futures("/retrieve_future"),
    "POST /retrieve_futures": many_futures,
    "POST /cancel_future": futures("/cancel_future"),
    # the tenant's books
    "GET /audit": nothing,
    "GET /billing/usage/events": nothing,
    "GET /billing/usage/checkpoints/current": nothing,
    # clients of OpenAI's API
    "GET /v1/models": nothing,
    "GET /v1/models/{}": lambda its, _: [
        Ask(path=f"/v1/models/{model}") for model in (its.uri("sampler_weights"), its.sampler)
    ],
    "POST /v1/completions": openai("completions", prompt="a", max_tokens=1),
    "POST /v1/chat/completions": openai("chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=1),
}
"""By the names that `openrl.app.scopes` has for the routes. A new route has its row here, or a test fails."""


@contextmanager
def serving(store_url: str, data_dir: Path) -> Iterator[tuple[Flask, Store]]:
    """Serve over an empty store, for as many tests as like to share it."""
    store = Store.connect(StoreSettings(redis_url=store_url, data_dir=data_dir, inline_bytes=1024))
    store.redis.flushall()
    Registry(store).add_model(MODEL)
    celery.conf.broker_url = store.settings.broker_url
    app = create_app(AppSettings(poll_min_s=0.01, poll_max_s=0.02, remember_s=0), store=store)
    yield app, store
    app.extensions[EXTENSION].close()
    store.close()


@contextmanager
def working(store: Store) -> Iterator[Worker]:
    """Play a trainer for a while; afterwards nothing writes to the store but what asks."""
    lease = Lease(store, "w1", kind="trainer", slug=MODEL.slug)
    yield Worker(store, lease)
    lease.close()


def method_of(name: str) -> str:
    return name.partition(" ")[0]


def send(api: Api, name: str, ask: Ask) -> Any:
    """Send one request of a row."""
    prefix = "" if ask.path.startswith("/v1/") else "/api/v1"
    headers = {"X-API-Key": api.key, **ask.headers} if api.key else dict(ask.headers)
    given = {"json": ask.json} if ask.json is not None else {"data": ask.body}
    return api.client.open(f"{prefix}{ask.path}", method=method_of(name), headers=headers, **given)


def furnished(api: Api, worker: Worker, tenant: str) -> Things:
    """Give a tenant one of each thing, and return their ids."""
    session = api.ok(
        api.post(
            "/create_session",
            {"tags": [], "project_id": "project-of-ada", "display_name": "name-of-ada", "user_metadata": {"of": "ada"}},
        )
    )["session_id"]
    its = Things(session=session, owner=tenant)
    api.ok(api.create_model(session))
    api.ok(api.post("/save_weights", {"model_id": its.run, "path": its.name, "seq_id": 1}))
    api.ok(api.post("/save_weights_for_sampler", {"model_id": its.run, "path": its.name, "seq_id": 2}))
    api.ok(api.post("/save_weights_external", {"model_id": its.run, "path": its.name, "seq_id": 3}))
    kinds = {"save_weights": "training", "save_weights_for_sampler": "sampler", "save_weights_external": "external"}
    worker.step({kind: worker.save(tenant, its.run, its.name, stored) for kind, stored in kinds.items()})
    api.ok(api.optim_step(its.run, 4))
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": its.uri("sampler_weights")}
    api.ok(api.post("/create_sampling_session", sampling))
    for seq in range(2):
        api.ok(api.post("/asample", {"sampling_session_id": its.sampler, **SAMPLE, "seq_id": seq}))
    return its


def poisoned(its: Things, text: str) -> Iterator[Things]:
    """Yield things of which one id at a time is `text`."""
    for name in ("session", "owner", "name"):
        yield replace(its, **{name: text})
