"""Samples asked for together: in the order in which they ended, once each, for each clone of a client by itself."""

from __future__ import annotations

import json
import threading

import pytest

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.operations import PROTOBUF, Outcome
from openrl.tasks.store import Store
from openrl.tasks.wire import codec
from tests.app.conftest import Api
from tests.app.test_sampling import asample, jobs, sampler

__all__ = ["jobs"]

BILLION = 1_000_000_000
RESULT = codec.encode_sample_response(
    [codec.SampledSequence(tokens=[1], logprobs=[-1.0], stop_reason="length", topk=None)] * 2, None, None, None, None
)
DONE = Outcome(result=RESULT, content_type=PROTOBUF)


def submit(api: Api, name: str, *seqs: int) -> list[str]:
    return [api.ok(api.post("/asample", asample(name, seq)))["request_id"] for seq in seqs]


def ask(api: Api, name: str, cursor: int = 0, clone: int = 0, **fields):
    target = {"type": "sampling_session", "sampling_session_id": name, "cloned_sampler_id": clone}
    return api.post("/retrieve_futures", {"target": target, "prev_cursor": cursor} | fields)


def told(answer: dict) -> list[str]:
    return [one["request_id"] for one in answer["completions"]]


def test_what_has_ended_is_told_with_its_size_and_again_until_the_cursor_is_past_it(api: Api, jobs) -> None:
    name = sampler(api)
    assert api.ok(ask(api, name)) == {"completions": [], "cursor": 0}
    first, second = submit(api, name, 0, 1)
    jobs(DONE)
    answer = api.ok(ask(api, name))
    assert answer["completions"] == [
        {"state": "finished", "request_id": one, "response_payload_uncompressed_size": len(RESULT)}
        for one in (first, second)
    ]
    for request_id in (first, second):
        fetched = api.poll(request_id, headers={"Accept": PROTOBUF})
        assert fetched.data == RESULT
    assert told(api.ok(ask(api, name))) == [first, second]
    assert api.ok(ask(api, name, answer["cursor"])) == {"completions": [], "cursor": answer["cursor"]}
    assert told(api.ok(ask(api, name))) == []


def test_a_failed_and_a_cancelled_sample_are_told_as_failed(api: Api, jobs) -> None:
    name = sampler(api)
    failed, cancelled = submit(api, name, 0, 1)
    api.ok(api.post("/cancel_future", {"request_id": cancelled}))
    jobs(Outcome(error="no", category="server"))
    completions = api.ok(ask(api, name))["completions"]
    assert [(one["request_id"], one["state"]) for one in completions] == [(cancelled, "failed"), (failed, "failed")]


def test_each_clone_hears_of_its_own_samples_only(api: Api, jobs) -> None:
    name = sampler(api)
    submit(api, name, 0, 3 * BILLION + 1, BILLION - 1)
    jobs(DONE)
    assert sorted(told(api.ok(ask(api, name)))) == [f"{name}:0", f"{name}:999999999"]
    assert told(api.ok(ask(api, name, clone=3))) == [f"{name}:3000000001"]
    assert told(api.ok(ask(api, name, clone=2))) == []


def test_who_polls_one_by_one_leaves_nothing_in_line(api: Api, jobs, store: Store) -> None:
    name = sampler(api)
    (request_id,) = submit(api, name, 0)
    jobs(DONE)
    assert store.redis.keys("*:done:*")
    api.ok(api.poll(request_id))
    assert store.redis.keys("*:done:*") == []


def test_a_result_that_is_acknowledged_is_soon_gone_and_only_ones_own_can_be(api: Api, jobs, store: Store) -> None:
    name = sampler(api)
    kept, acknowledged = submit(api, name, 0, 1)
    jobs(DONE)
    cursor = api.ok(ask(api, name))["cursor"]
    api.ok(ask(api, name, cursor, timeout=0.0, retrieved_request_ids=[acknowledged]))
    ttls = [store.redis.pttl(f"openrl:t:local:future:{one}") for one in (kept, acknowledged)]
    assert ttls[0] > 3600_000 and 0 < ttls[1] <= 60_000
    for foreign in (f"{name}:{BILLION}", "s-1:sample:0:1", f"{name}:x", name):
        refused = ask(api, name, cursor, timeout=0.0, retrieved_request_ids=[kept, foreign])
        assert refused.status_code == 422 and "retrieved_request_ids" in refused.get_json()["detail"]
    assert store.redis.pttl(f"openrl:t:local:future:{kept}") > 3600_000


@pytest.mark.parametrize(
    ("fields", "status", "word"),
    [
        ({"cursor": 7}, 422, "prev_cursor"),
        ({"cursor": -1}, 422, "prev_cursor"),
        ({"clone": -1}, 422, "cloned_sampler_id"),
        ({"timeout": -1.0}, 422, "timeout"),
        ({"timeout": "1"}, 422, "timeout"),
        ({"surprise": 1}, 422, "surprise"),
    ],
)
def test_nonsense_is_refused_by_name(api: Api, fields: dict, status: int, word: str) -> None:
    answer = ask(api, sampler(api), **fields)
    assert answer.status_code == status and word in answer.get_json()["detail"]


def test_another_tenants_samples_are_not_found_and_stay_in_line(two: tuple[Api, Api], jobs) -> None:
    ada, bob = two
    name = sampler(ada)
    (request_id,) = submit(ada, name, 0)
    jobs(DONE)
    made_up = f"s-{'0' * 32}:sample:0"
    for ours, theirs in (
        (ask(bob, made_up), ask(bob, name)),
        (
            bob.post("/join_sampling_session", {"sampling_session_id": made_up}),
            bob.post("/join_sampling_session", {"sampling_session_id": name}),
        ),
        (
            bob.post("/cancel_future", {"request_id": f"{made_up}:0"}),
            bob.post("/cancel_future", {"request_id": request_id}),
        ),
    ):
        assert ours.status_code == theirs.status_code == 404
        assert ours.get_json()["detail"].replace(made_up, name) == theirs.get_json()["detail"]
    assert told(ada.ok(ask(ada, name))) == [request_id]
    assert ada.poll(request_id).status_code == 200


def test_a_held_request_answers_as_soon_as_any_sample_ends(app, store: Store, jobs) -> None:
    app = create_app(AppSettings(poll_min_s=20, poll_max_s=30), store=store)
    api = Api(app.test_client(), app.extensions["openrl"])
    name = sampler(api)
    answers: list = []
    poll = threading.Thread(target=lambda: answers.append(api.ok(ask(api, name))))
    poll.start()
    submit(api, name, 0, 1)
    jobs(DONE)
    poll.join(10)
    assert told(answers[0]) in ([f"{name}:0"], [f"{name}:0", f"{name}:1"])
    assert api.ok(ask(api, name, timeout=0.0, cursor=2)) == {"completions": [], "cursor": 2}
    api.services.close()


def test_clients_that_join_get_numbers_of_their_own(api: Api) -> None:
    name = sampler(api)
    body = {"sampling_session_id": name, "type": "join_sampling_session"}
    numbers = [api.ok(api.post("/join_sampling_session", body)) for _ in range(3)]
    assert numbers == [{"type": "join_sampling_session", "client_counter": number} for number in (1, 2, 3)]
    other = sampler(api)
    assert api.ok(api.post("/join_sampling_session", body | {"sampling_session_id": other}))["client_counter"] == 1


def test_a_cancelled_sample_is_answered_as_the_callers_failure(api: Api, jobs) -> None:
    name = sampler(api)
    (request_id,) = submit(api, name, 0)
    for state in ("cancelled", "finished"):
        answer = api.ok(api.post("/cancel_future", {"request_id": request_id}))
        assert answer == {"request_id": request_id, "state": state}
    assert api.ok(api.poll(request_id)) == {"error": "cancelled by its client", "category": "user"}
    assert jobs() == []
    assert api.post("/cancel_future", {"request_id": f"{name}:1"}).status_code == 404


def test_a_cancelled_operation_uses_its_number_up_and_a_creation_stays(api: Api, worker) -> None:
    run = api.run()
    refused = api.post("/cancel_future", {"request_id": f"{run}:0"})
    assert refused.status_code == 422 and "creates a run" in refused.get_json()["detail"]
    worker.step()
    worker.journal.release(worker.lease, "local", run, worker.lease.held[("local", run)])
    api.ok(api.forward_backward(run, 1))
    api.ok(api.optim_step(run, 2))
    assert api.ok(api.post("/cancel_future", {"request_id": f"{run}:1"}))["state"] == "cancelled"
    assert [(done.kind, done.seq_id) for done in worker.step()] == [("refused", 1), ("optim_step", 2)]
    assert api.ok(api.poll(f"{run}:1"))["category"] == "user"
    assert api.ok(api.post("/cancel_future", {"request_id": f"{run}:2"}))["state"] == "finished"


def test_a_session_that_is_finished_takes_its_unfinished_samples_with_it(api: Api, jobs, worker) -> None:
    name = sampler(api)
    session = name.partition(":")[0]
    running, waiting = submit(api, name, 0, 1)
    api.ok(api.create_model(session))
    jobs()
    api.ok(api.post(f"/sessions/{session}/finish", {"reason": {"type": "interrupted"}, "detail": None}))
    for request_id in (running, waiting):
        assert json.loads(api.poll(request_id).data)["error"] == "cancelled: its session was finished"
    assert [done.kind for done in worker.step()] == ["create_model"]
