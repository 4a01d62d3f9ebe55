"""What the journal promises, tried over raw HTTP against the running service."""

from __future__ import annotations

import time

import httpx
import pytest
import redis

from tests.stack import wire
from tests.stack.conftest import MODEL, Service

pytestmark = pytest.mark.timeout(180)

LARGEST_PASS = 8
"""Operations of one run in a pass: OPENRL_TRAINER_MAX_OPERATIONS."""

TOKENS = list(b"pack my box with five dozen liquor jugs")


@pytest.fixture
def http(service: Service) -> httpx.Client:
    return service.http()


@pytest.fixture
def run(http: httpx.Client) -> str:
    return wire.new_run(http, model=MODEL)


def loss(http: httpx.Client, request_id: str) -> float:
    return float(wire.poll(http, request_id).json()["metrics"]["loss:sum"])


def test_operations_take_effect_in_order_however_they_arrive(http: httpx.Client, run: str) -> None:
    straight = wire.new_run(http, model=MODEL, number=1, session=run.partition(":")[0])
    for target, order in ((run, (2, 3, 1)), (straight, (1, 2, 3))):
        for seq in order:
            if seq == 2:
                wire.optim_step(http, target, 2, learning_rate=0.01).raise_for_status()
            else:
                wire.forward_backward(http, target, seq, TOKENS).raise_for_status()
    assert loss(http, f"{run}:3") == loss(http, f"{straight}:3") < loss(http, f"{run}:1")


def test_a_repeated_submission_is_the_same_promise_and_runs_once(http: httpx.Client, run: str) -> None:
    answers = [wire.forward_backward(http, run, 1, TOKENS).json() for _ in range(3)]
    assert answers[0]["request_id"] == answers[1]["request_id"] == answers[2]["request_id"] == f"{run}:1"
    wire.optim_step(http, run, 2, learning_rate=0.0)
    once = wire.poll(http, f"{run}:2").json()["metrics"]["grad_norm"]
    assert wire.forward_backward(http, run, 1, TOKENS).json()["request_id"] == f"{run}:1"
    for seq in (3, 4):
        wire.forward_backward(http, run, seq, TOKENS)
    wire.optim_step(http, run, 5, learning_rate=0.0)
    twice = wire.poll(http, f"{run}:5").json()["metrics"]["grad_norm"]
    assert twice == pytest.approx(2 * once, rel=1e-4)


def test_a_different_operation_under_a_used_key_is_refused(http: httpx.Client, run: str) -> None:
    wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
    before = loss(http, f"{run}:1")
    for other in (wire.forward_backward(http, run, 1, TOKENS[::-1]), wire.optim_step(http, run, 1)):
        assert other.status_code == 422, other.text
    assert loss(http, f"{run}:1") == before


def test_a_refused_submission_uses_up_its_number_and_voids_the_gradient(http: httpx.Client, run: str) -> None:
    wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
    refused = wire.forward_backward(http, run, 2, [1, 2, 99_999])
    assert refused.status_code == 422 and "99999" in refused.text
    wire.optim_step(http, run, 3).raise_for_status()
    failed = wire.poll(http, f"{run}:3")
    assert failed.status_code == 200 and failed.json()["category"] == "user"
    wire.forward_backward(http, run, 4, TOKENS)
    wire.optim_step(http, run, 5)
    assert wire.poll(http, f"{run}:5").json()["metrics"]["grad_norm"] > 0


def test_a_body_that_cannot_be_decoded_uses_up_its_number_when_it_can_be_read(http: httpx.Client, run: str) -> None:
    torn = wire.forward_backward_body(run, 1, TOKENS)
    torn = torn.replace(b"cross_entropy", b"cross_entrop\xff")
    answer = http.post("/forward_backward", content=torn, headers={"Content-Type": wire.PROTO})
    assert answer.status_code in (400, 422) and answer.json()
    wire.forward_backward(http, run, 2, TOKENS).raise_for_status()
    assert loss(http, f"{run}:2") > 0


@pytest.mark.full
def test_a_waiting_operation_is_polled_seldom_and_answers_when_its_gap_fills(http: httpx.Client, run: str) -> None:
    wire.forward_backward(http, run, 2, TOKENS).raise_for_status()
    polls, started = 0, time.monotonic()
    while time.monotonic() - started < 30:
        answer = http.post("/retrieve_future", json={"request_id": f"{run}:2"})
        assert answer.status_code == 408 and answer.json()["queue_state"] == "active"
        polls += 1
    assert polls <= 4
    wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
    assert loss(http, f"{run}:2") > 0


def test_sampling_numbers_past_two_to_the_53_stay_apart(http: httpx.Client) -> None:
    session = wire.new_session(http)
    sampler = http.post(
        "/create_sampling_session", json={"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL}
    ).json()["sampling_session_id"]
    ids = []
    for seq in (432543029000000001, 432543029000000002):
        answer = wire.asample(http, sampler, seq, TOKENS, max_tokens=4, temperature=1.0, seed=seq % 1000)
        answer.raise_for_status()
        ids.append(answer.json()["request_id"])
        assert answer.json()["sample_sequence_ids"] == [f"{sampler}:{seq}:0"]
    assert ids == [f"{sampler}:432543029000000001", f"{sampler}:432543029000000002"]
    assert all(len(wire.poll(http, each).json()["sequences"][0]["tokens"]) == 4 for each in ids)


@pytest.mark.parametrize("unknown", ["nope", "s-00000000000000000000000000000000:train:0:1", "a:b:c:d:e"])
def test_an_unknown_promise_is_404_at_once(http: httpx.Client, unknown: str) -> None:
    assert http.post("/retrieve_future", json={"request_id": unknown}).status_code == 404


def test_a_promise_not_yet_made_is_404(http: httpx.Client, run: str) -> None:
    assert http.post("/retrieve_future", json={"request_id": f"{run}:7"}).status_code == 404


def test_a_gap_that_is_never_filled_is_closed_as_failed(own_service: Service) -> None:
    own_service.env = {"OPENRL_GAP_TIMEOUT_S": "2"}
    http = own_service.start().http()
    run = wire.new_run(http, model=MODEL)
    wire.forward_backward(http, run, 1, TOKENS)
    wire.optim_step(http, run, 3).raise_for_status()
    failed = wire.poll(http, f"{run}:3").json()
    assert failed["category"] == "user" and "seq 2 never arrived" in failed["error"]
    late = wire.forward_backward(http, run, 2, TOKENS)
    assert late.status_code == 422, late.text
    wire.forward_backward(http, run, 4, TOKENS)
    wire.optim_step(http, run, 5)
    assert wire.poll(http, f"{run}:5").json()["metrics"]["grad_norm"] > 0
    assert own_service.stop() == 0


def test_a_failed_operation_is_told_in_one_poll(http: httpx.Client, run: str) -> None:
    wire.optim_step(http, run, 1).raise_for_status()
    answer = http.post("/retrieve_future", json={"request_id": f"{run}:1"})
    assert answer.status_code == 200, "one poll, held until the operation has ended"
    assert answer.json()["category"] == "user" and "forward_backward" in answer.json()["error"]


def test_a_wall_of_waiting_doorbells_delays_nobody_by_more_than_a_pass_and_no_shutdown(own_service: Service) -> None:
    own_service.env = {"OPENRL_DOORBELL_THREADS": "2"}
    http = own_service.start().http()
    wall, other = (wire.new_run(http, model=MODEL) for _ in range(2))
    for seq in range(2, 302):
        wire.forward_backward(http, wall, seq, TOKENS[:4]).raise_for_status()
    wire.forward_backward(http, other, 1, TOKENS).raise_for_status()
    assert loss(http, f"{other}:1") > 0
    # The gap is filled: 301 operations are executable at once, and one of the other run comes behind them.
    wire.forward_backward(http, wall, 1, TOKENS[:4]).raise_for_status()
    wire.forward_backward(http, other, 2, TOKENS).raise_for_status()
    assert loss(http, f"{other}:2") > 0
    assert loss(http, f"{wall}:301") > 0
    with redis.Redis.from_url(own_service.redis_url(), decode_responses=True) as store:
        submitted, finished = store.hmget(f"openrl:t:local:future:{other}:2", "submitted", "finished")
        times = [float(store.hget(f"openrl:t:local:future:{wall}:{seq}", "finished") or 0) for seq in range(1, 302)]
    before = [at for at in times if float(submitted) < at < float(finished)]
    # The pass that was under way, and its own.
    assert len(before) <= 2 * LARGEST_PASS, len(before)
    for seq in range(303, 603):
        wire.forward_backward(http, wall, seq, TOKENS[:4]).raise_for_status()
    stopping = time.monotonic()
    assert own_service.stop() == 0
    assert time.monotonic() - stopping < 15
