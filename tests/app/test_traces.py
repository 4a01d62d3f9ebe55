"""A session's trace: what ran in it and when, to whoever has its link."""

from __future__ import annotations

import json
from dataclasses import replace
from urllib.parse import urlsplit

from openrl.tasks.operations import Outcome
from tests.app.conftest import Api, Worker
from tests.app.test_sampling import asample, jobs

__all__ = ["jobs"]


def inside(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.path}?{parts.query}"


def test_a_trace_has_an_interval_for_each_operation_of_the_session(api: Api, worker: Worker, jobs) -> None:
    run = api.run()
    session = run.partition(":")[0]
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/random"}
    sampler = api.ok(api.post("/create_sampling_session", sampling))["sampling_session_id"]
    api.ok(api.forward_backward(run, 1))
    api.ok(api.optim_step(run, 2))
    worker.step({"optim_step": Outcome(error="the gradient is void")})
    api.ok(api.optim_step(run, 3))
    api.ok(api.post("/asample", asample(sampler)))
    jobs(Outcome(result=b"\x01"))
    export = api.ok(api.get(f"/sessions/{session}/trace_export"))
    assert export["status"] == "ready"
    answer = api.client.get(inside(export["url"]))
    assert answer.status_code == 200 and answer.mimetype == "application/json"
    assert f'filename="{session}.json"' in answer.headers["Content-Disposition"]
    trace = json.loads(answer.data)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert names == {1: run, 2: sampler}
    begun = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "b"}
    ended = {event["id"]: event for event in trace["traceEvents"] if event["ph"] == "e"}
    assert {name: event["name"] for name, event in begun.items()} == {
        f"{run}:0": "create_model",
        f"{run}:1": "forward_backward",
        f"{run}:2": "optim_step",
        f"{run}:3": "optim_step",
        f"{sampler}:0": "sample",
    }
    assert ended.keys() == begun.keys() - {f"{run}:3"}
    assert all(ended[name]["ts"] >= begun[name]["ts"] > 1e15 for name in ended)
    assert begun[f"{run}:1"]["args"]["tokens"] == 4
    assert begun[f"{run}:2"]["args"]["error"] == "the gradient is void"
    assert begun[f"{sampler}:0"]["cat"] == "sampling" and begun[f"{run}:0"]["cat"] == "training"


def test_a_long_trace_is_whole(api: Api, worker: Worker) -> None:
    run = api.run()
    for seq in range(1, 451):
        api.services.journal.refuse("local", run, seq, "optim_step", b"x", "no")
    session = run.partition(":")[0]
    url = api.ok(api.get(f"/sessions/{session}/trace_export"))["url"]
    events = json.loads(api.client.get(inside(url)).data)["traceEvents"]
    assert {event["id"] for event in events if event["ph"] == "b"} == {f"{run}:{seq}" for seq in range(451)}


def test_an_empty_session_has_an_empty_trace(api: Api) -> None:
    url = api.ok(api.get(f"/sessions/{api.session()}/trace_export"))["url"]
    assert json.loads(api.client.get(inside(url)).data)["traceEvents"] == []


def test_a_link_opens_one_trace_for_a_time_and_nothing_else(two: tuple[Api, Api], settings) -> None:
    ada, bob = two
    session, other = ada.session(), ada.session()
    assert bob.get(f"/sessions/{session}/trace_export").status_code == 404
    link = inside(ada.ok(ada.get(f"/sessions/{session}/trace_export"))["url"])
    nobody = replace(ada, key="").client
    assert nobody.get(link).status_code == 200
    assert nobody.get(link.replace(session, other)).status_code == 403
    assert nobody.get(link.replace("/ada/", "/bob/")).status_code == 403
    assert nobody.get(link.replace("/traces/", "/exports/")).status_code == 403
    assert nobody.get(link.partition("?")[0]).status_code == 401
    path, _, query = link.partition("?")
    expires = int(query.split("expires=")[1].split("&")[0])
    old = ada.services.signer.sign("GET trace", "ada", session, str(expires - 100_000))
    assert nobody.get(f"{path}?expires={expires - 100_000}&signature={old}").status_code == 410
