import base64
import json
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.operations import PROTOBUF, Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.store import Store
from openrl.tasks.wire import codec
from tests.app.conftest import MODEL, Api, Worker

ACCEPT = {"Accept": "application/x-protobuf"}

GOLDEN_OUTPUT = base64.b64decode(
    "Cg9Ub3JjaExvc3NSZXR1cm4SXwoPVG9yY2hMb3NzUmV0dXJuEkoKCGxvZ3Byb2JzEj4KIAAAgL8AAIC/AACAvwAAgL8AAIC/AACAvwAAgL8AAIC/"
    "EhgAAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAYARgCGhMKCGxvc3M6c3VtEQAAAAAAAPg/GhoKD251bV90b2tlbnM6bWVhbhEAAAAAAAAQQA=="
)
"""Two datums of four logprobs -1.0, as the SDK reads them."""


def test_a_pending_future_is_a_408_that_says_why(api: Api, store: Store) -> None:
    run = api.run()
    answer = api.poll(f"{run}:0")
    assert answer.status_code == 408
    assert answer.get_json() == {
        "type": "try_again",
        "request_id": f"{run}:0",
        "queue_state": "paused_capacity",
        "queue_state_reason": "no trainer answers for tiny/random",
    }
    with (
        Lease(store, "w1", kind="trainer", slug=MODEL.slug) as lease,
        Lease(store, "w2", kind="sampler", slug=MODEL.slug),
    ):
        starting = api.poll(f"{run}:0").get_json()
        assert (starting["queue_state"], starting["queue_state_reason"]) == (
            "paused_capacity",
            "a trainer for tiny/random is starting",
        )
        lease.set_state("ready")
        assert api.poll(f"{run}:0").get_json()["queue_state"] == "active"


def test_a_promise_behind_a_gap_waits(api: Api) -> None:
    run = api.run()
    api.ok(api.optim_step(run, 3))
    assert api.poll(f"{run}:3").status_code == 408
    assert api.poll(f"{run}:2").status_code == 404


@pytest.mark.parametrize("accept", ["application/x-protobuf", "application/json, application/x-protobuf"])
def test_a_training_result_is_protobuf_where_the_client_asks_for_it(api: Api, worker: Worker, accept: str) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    worker.step({"forward_backward": Outcome(result=GOLDEN_OUTPUT, content_type=PROTOBUF)})
    answer = api.poll(f"{run}:1", headers={"Accept": accept})
    assert (answer.status_code, answer.mimetype, answer.data) == (200, "application/x-protobuf", GOLDEN_OUTPUT)


def test_a_training_result_is_json_for_older_clients(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    worker.step({"forward_backward": Outcome(result=GOLDEN_OUTPUT, content_type=PROTOBUF)})
    answer = api.ok(api.poll(f"{run}:1", headers={"Accept": "application/json"}))
    assert answer["metrics"] == {"loss:sum": 1.5, "num_tokens:mean": 4.0}
    assert [each["logprobs"]["data"] for each in answer["loss_fn_outputs"]] == [[-1.0] * 4] * 2


def test_a_json_result_stays_json_whatever_is_accepted(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.optim_step(run, 1))
    worker.step({"optim_step": Outcome(result=b'{"metrics": {"grad_norm": 0.1}}')})
    for headers in (ACCEPT, {}):
        assert api.ok(api.poll(f"{run}:1", headers=headers)) == {"metrics": {"grad_norm": 0.1}}


def test_a_failed_operation_is_a_200_with_its_category(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    worker.step({"forward_backward": Outcome(error="the loss is not finite", category="server")})
    for headers in (ACCEPT, {}):
        answer = api.ok(api.poll(f"{run}:1", headers=headers))
        assert answer == {"error": "the loss is not finite", "category": "server"}


def test_a_result_may_be_fetched_again_and_is_gone_after_its_time(api: Api, worker: Worker, store: Store) -> None:
    run = api.run()
    worker.step()
    for _ in range(2):
        api.ok(api.poll(f"{run}:0"))
    kept_ms = store.redis.pttl(f"openrl:t:local:future:{run}:0")
    assert 0 < kept_ms <= 3600_000
    store.redis.pexpire(f"openrl:t:local:future:{run}:0", 1)
    time.sleep(0.01)
    assert api.poll(f"{run}:0").status_code == 410


def test_a_large_result_comes_back_whole(api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    large = codec.encode_forward_backward_output([np.full(50_000, -1.0, np.float32)], {"loss:sum": 3.0})
    worker.step({"forward_backward": Outcome(result=large, content_type=PROTOBUF)})
    assert api.poll(f"{run}:1", headers=ACCEPT).data == large


@pytest.fixture
def patient(app, store: Store) -> Api:
    """The API with polls that are held for long."""
    app = create_app(AppSettings(poll_min_s=40, poll_max_s=40), store=store)
    return Api(app.test_client(), app.extensions["openrl"])


def test_a_held_poll_answers_as_soon_as_the_operation_ends(patient: Api, worker: Worker) -> None:
    run = patient.run()
    answers: list = []
    poll = threading.Thread(target=lambda: answers.append(patient.poll(f"{run}:0")))
    poll.start()
    time.sleep(0.2)
    assert not answers
    worker.step({"create_model": Outcome(result=json.dumps({"model_id": run}).encode())})
    poll.join(20)
    assert not poll.is_alive(), "it is held for 40 s"
    assert patient.ok(answers[0]) == {"model_id": run}
    patient.services.close()


def test_a_process_that_leaves_answers_its_polls_at_once(patient: Api) -> None:
    run = patient.run()
    answers: list = []
    polls = [threading.Thread(target=lambda: answers.append(patient.poll(f"{run}:0"))) for _ in range(3)]
    for poll in polls:
        poll.start()
    time.sleep(0.2)
    patient.services.polls.release()
    for poll in polls:
        poll.join(20)
    assert not any(poll.is_alive() for poll in polls), "they are held for 40 s"
    assert [answer.status_code for answer in answers] == [408] * 3
    assert patient.poll(f"{run}:0").status_code == 408
    patient.services.close()


def test_another_tenants_poll_finds_nothing_and_harms_nothing(two: tuple[Api, Api], worker: Worker) -> None:
    ada, bob = two
    run = ada.run()
    assert bob.poll(f"{run}:0").status_code == 404
    worker.step()
    assert bob.poll(f"{run}:0").status_code == 404
    assert ada.poll(f"{run}:0").status_code == 200
    assert replace(bob, key="").poll(f"{run}:0").status_code == 401
