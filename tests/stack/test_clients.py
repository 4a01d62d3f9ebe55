"""Sessions, copies of sampling clients and abandoned samples, through the unmodified SDK."""

from __future__ import annotations

import json
import pickle
import time
import urllib.request
from collections.abc import Iterator

import httpx
import pytest
import tinker
from tinker import types

from tests.stack import wire
from tests.stack.conftest import MODEL, Service

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::tinker.ExperimentalWarning"),
    pytest.mark.timeout(180),
]

PROMPT = types.ModelInput.from_ints(list(b"the quick brown fox"))


@pytest.fixture
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url, display_name="Nightly copies") as client:
        yield client


def drawn(client: tinker.SamplingClient, seed: int) -> list[types.SampledSequence]:
    params = types.SamplingParams(max_tokens=6, seed=seed, stop=[])
    return list(client.sample(PROMPT, 2, params).result().sequences)


def check_copies(api: tinker.ServiceClient) -> None:
    original = api.create_sampling_client(base_model=MODEL).result()
    copies = [
        pickle.loads(pickle.dumps(original)),
        tinker.SamplingClient.from_sampler_handle(original.get_sampler_handle(), api_key="tml-local"),
    ]
    answers = [drawn(client, seed=3) for client in (original, *copies, original)]
    assert len({tuple(map(tuple, (one.tokens for one in answer))) for answer in answers}) == 1
    names = [one.sequence_id for answer in answers for one in answer]
    assert len(set(names)) == len(names) == 8
    numbers = {int(name.split(":")[3]) // 1_000_000_000 for name in names}
    assert numbers == {0, 1, 2}
    params = types.SamplingParams(max_tokens=4, stop=[])
    many = [client.sample(PROMPT, 1, params) for client in (original, *copies) for _ in range(8)]
    assert {len(future.result().sequences[0].tokens) for future in many} == {4}
    for copy in copies:
        copy.holder.close()


def test_copies_of_a_sampling_client_draw_the_same_under_numbers_of_their_own(api: tinker.ServiceClient) -> None:
    check_copies(api)


def check_abandoned(api: tinker.ServiceClient, http: httpx.Client) -> None:
    """Abandon a sample that takes all slots for long, and see that others get them at once."""
    client = api.create_sampling_client(base_model=MODEL).result()
    drawn(client, seed=1)
    abandoned = client.sample(PROMPT, 256, types.SamplingParams(max_tokens=490, stop=[]))
    request_id = f"{client._sampling_session_id}:1"
    while not is_promised(http, request_id):
        time.sleep(0.05)
    abandoned.future().cancel()
    assert wire.poll(http, request_id).json() == {"error": "cancelled by its client", "category": "user"}
    assert len(drawn(client, seed=2)) == 2


def is_promised(http: httpx.Client, request_id: str) -> bool:
    try:
        return http.post("/retrieve_future", json={"request_id": request_id}, timeout=0.5).status_code != 404
    except httpx.ReadTimeout:  # it waits, so there is something to wait for
        return True


def test_a_sample_that_is_given_up_is_cancelled_and_others_are_drawn(
    api: tinker.ServiceClient, service: Service
) -> None:
    check_abandoned(api, service.http())


@pytest.mark.full
def test_copies_and_abandoned_samples_with_one_poll_for_all_of_a_client(own_service: Service) -> None:
    own_service.env["OPENRL_SAMPLE_USE_RETRIEVE_FUTURES"] = "true"
    own_service.start()
    with tinker.ServiceClient(api_key="tml-local", base_url=own_service.base_url) as api:
        check_copies(api)
        check_abandoned(api, own_service.http())
        client = api.create_sampling_client(base_model=MODEL).result()
        with pytest.raises(tinker.TinkerError, match="max_tokens"):
            client.sample(PROMPT, 1, types.SamplingParams(max_tokens=100_000)).result()
        futures = [client.sample(PROMPT, 1, types.SamplingParams(max_tokens=5, stop=[])) for _ in range(600)]
        assert {len(future.result().sequences[0].tokens) for future in futures} == {5}


def test_a_session_is_searched_moved_listed_and_exported_as_a_trace(
    api: tinker.ServiceClient, service: Service
) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4).result()
    training.save_state("kept").result()
    session = training.model_id.partition(":")[0]
    rest = tinker.RestClient(api_key="tml-local", base_url=service.base_url)
    rest.assign_session_project(session, "project-a").result()
    asked = types.SessionSearchRequest(display_name="copies nightly", project_ids=["project-a"], limit=1)
    (found,) = rest.search_sessions(asked).result().sessions
    assert (found.session_id, found.project_id, found.checkpoints_count) == (session, "project-a", 1)
    assert found.status is not None and found.status.type == "active" and found.created_at.tzinfo is not None
    runs = rest.list_training_runs(project_id="project-a").result()
    assert [run.training_run_id for run in runs.training_runs] == [training.model_id]
    assert runs.cursor.total_count == 1
    assert session in rest.list_sessions(access_scope="accessible").result().sessions
    assert rest.get_session(session, access_scope="owned").result().training_run_ids == [training.model_id]
    page, ids = types.SessionSearchRequest(limit=1), set()
    for _ in range(3):
        answer = rest.search_sessions(page).result()
        ids |= {one.session_id for one in answer.sessions}
        if answer.next_cursor is None:
            break
        page = page.model_copy(update={"cursor": answer.next_cursor})
    assert session in ids
    with urllib.request.urlopen(rest.export_session_trace(session).result()) as answer:
        events = json.load(answer)["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "b"} == {"create_model", "save_weights"}
