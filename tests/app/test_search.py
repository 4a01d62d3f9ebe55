"""Sessions found by what they are, in pages, and moved between projects."""

from __future__ import annotations

import pytest

from openrl.tasks import keys
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker


def opened(api: Api, **fields) -> str:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"} | fields
    return str(api.ok(api.post("/create_session", body))["session_id"])


def search(api: Api, **fields) -> list[str]:
    return [one["session_id"] for one in api.ok(api.post("/sessions/search", fields))["sessions"]]


def test_a_search_without_conditions_shows_all_of_ones_own_newest_first_and_whole(two, worker: Worker) -> None:
    api, other = two
    opened(other)
    first = opened(api, user_metadata={"lr": 0.1, "name": "x"}, display_name="Nightly SFT", project_id="p1")
    second = opened(api)
    run = api.ok(api.create_model(first))["model_id"]
    for seq, kind in ((1, "save_weights"), (2, "save_weights_for_sampler")):
        api.ok(api.post(f"/{kind}", {"model_id": run, "seq_id": seq, "path": "a"}))
    worker.step(
        {
            "save_weights": worker.save("ada", run, "a"),
            "save_weights_for_sampler": worker.save("ada", run, "a", "sampler", size_bytes=7),
        }
    )
    found = api.ok(api.post("/sessions/search", {}))
    assert found["next_cursor"] is None
    newest, oldest = found["sessions"]
    assert newest.pop("created_at") > oldest.pop("created_at")
    assert newest == {
        "session_id": second,
        "owner": "ada",
        "project_id": "",
        "status": {"type": "active"},
        "checkpoints_count": 0,
        "display_name": None,
        "user_metadata": {},
        "checkpoint_storage_bytes": 0,
    }
    assert (oldest["checkpoints_count"], oldest["checkpoint_storage_bytes"]) == (2, 17)
    assert (oldest["display_name"], oldest["project_id"]) == ("Nightly SFT", "p1")
    assert oldest["user_metadata"] == {"lr": "0.1", "name": "x"}


def test_each_condition_finds_what_fulfils_it_and_all_must_hold(api: Api, store: Store) -> None:
    night = opened(api, display_name="Nightly SFT run", user_metadata={"lr": "1", "n": 2}, project_id="p1")
    day = opened(api, display_name="daily", user_metadata={"lr": "1"}, project_id="p2")
    plain = opened(api)
    api.ok(api.post(f"/sessions/{day}/finish", {"reason": {"type": "errored"}, "detail": "oom"}))
    store.redis.hset(keys.session("local", plain), "last_seen", 1.0)
    assert search(api, display_name="sft NIGHT") == [night]
    assert search(api, display_name="sft daily") == []
    assert search(api, session_id=plain) == [plain]
    assert search(api, session_id=plain, display_name="daily") == [plain, day]
    assert search(api, session_id="s-unknown") == search(api, session_id="a:b") == []
    assert search(api, project_ids=["p1", "p3"]) == [night]
    assert search(api, project_ids=["p1", "p2"], user_metadata={"lr": "1"}) == [day, night]
    assert search(api, user_metadata={"lr": "1", "n": "2"}) == [night]
    assert search(api, statuses=[{"type": "active"}]) == [night]
    assert search(api, statuses=[{"type": "failed"}, {"type": "cancelled"}]) == []
    assert search(api, statuses=[{"type": "client_finished"}]) == [day]
    assert search(api, statuses=[{"type": "client_finished", "reasons": ["success"]}]) == []
    assert search(api, statuses=[{"type": "client_finished", "reasons": ["success", "errored"]}]) == [day]
    assert search(api, owner={"type": "accessible"}) == [plain, day, night]
    assert search(api, owner={"type": "user", "owner_urns": ["local"]}) == [plain, day, night]
    assert search(api, owner={"type": "user", "owner_urns": ["somebody"]}) == []
    shown = {one["session_id"]: one["status"] for one in api.ok(api.post("/sessions/search", {}))["sessions"]}
    assert shown[plain] is None
    assert shown[day] == {"type": "client_finished", "reason": {"type": "errored"}, "detail": "oom"}


def test_pages_follow_each_other_without_a_gap_also_where_sessions_are_as_old_as_each_other(
    api: Api, store: Store
) -> None:
    made = [opened(api, display_name=f"name {number % 2}") for number in range(9)]
    for session in made[2:6]:
        record = store.redis.hget(keys.session("local", session), "record").replace(
            b'"created": ', b'"created": 1.5, "x": '
        )
        store.redis.hset(keys.session("local", session), "record", record)
        store.redis.zadd(keys.sessions("local"), {session: 1.5})
    for conditions in ({}, {"display_name": "1"}):
        whole, pages, cursor = search(api, **conditions), [], None
        while True:
            page = api.ok(
                api.post("/sessions/search", conditions | {"limit": 2} | ({"cursor": cursor} if cursor else {}))
            )
            pages.append([one["session_id"] for one in page["sessions"]])
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert [session for page in pages for session in page] == whole
        assert {len(page) for page in pages[:-1]} == {2}
        assert len(whole) == (9 if not conditions else 4)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 201}, "limit"),
        ({"owner": {"type": "all"}}, "owner.type"),
        ({"owner": {"type": "user"}}, "owner_urns"),
        ({"owner": {"type": "own", "owner_urns": ["x"]}}, "owner_urns"),
        ({"statuses": []}, "statuses"),
        ({"statuses": [{"type": "odd"}]}, "statuses[0].type"),
        ({"statuses": [{"type": "active", "reasons": ["success"]}]}, "reasons"),
        ({"statuses": [{"type": "client_finished", "reasons": ["odd"]}]}, "reasons"),
        ({"cursor": {"last_created_at": "2026-01-01T00:00:00", "last_session_id": "x"}}, "last_created_at"),
        ({"cursor": {"last_created_at": "yesterday", "last_session_id": "x"}}, "last_created_at"),
        ({"cursor": {"last_session_id": "x"}}, "last_created_at"),
        ({"user_metadata": {"a": 1}}, "user_metadata"),
        ({"sort": "up"}, "sort"),
    ],
)
def test_a_search_that_makes_no_sense_is_refused_by_name(api: Api, fields: dict, word: str) -> None:
    answer = api.post("/sessions/search", fields)
    assert answer.status_code == 422 and word in answer.get_json()["detail"], answer.text


@pytest.mark.parametrize("moment", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_cursor_at_the_end_of_time_is_one_like_others(api: Api, moment: str) -> None:
    session = opened(api)
    found = search(api, cursor={"last_created_at": moment, "last_session_id": "x"})
    assert found == ([session] if moment.startswith("9") else [])


def test_a_session_is_moved_with_its_runs_and_stays_the_same_otherwise(two) -> None:
    api, other = two
    session = opened(api, project_id="old", display_name="mine")
    runs = [api.ok(api.create_model(session, number))["model_id"] for number in range(3)]
    elsewhere = api.run()

    def listed(project: str, page: str = "") -> tuple[list[str], int]:
        found = api.ok(api.get(f"/training_runs?project_id={project}{page}"))
        return [run["training_run_id"] for run in found["training_runs"]], found["cursor"]["total_count"]

    assert listed("old") == (runs[::-1], 3)
    assert (
        api.ok(api.client.put(f"/api/v1/sessions/{session}/project", json={"project_id": "new"}, headers=key(api)))
        == {}
    )
    assert listed("old") == ([], 0)
    assert listed("new", "&limit=2&offset=1") == (runs[1::-1], 3)
    assert api.ok(api.get("/training_runs"))["cursor"]["total_count"] == 4
    assert elsewhere not in listed("new")[0]
    assert search(api, project_ids=["new"]) == [session] and search(api, project_ids=["old"]) == []
    assert api.ok(api.get(f"/sessions/{session}"))["display_name"] == "mine"
    for wrong, status in (({}, 422), ({"project_id": " "}, 422), ({"project_id": "p", "x": 1}, 422)):
        answer = api.client.put(f"/api/v1/sessions/{session}/project", json=wrong, headers=key(api))
        assert answer.status_code == status and answer.get_json()["detail"]
    for foreign in (session, "s-made-up"):
        answer = other.client.put(f"/api/v1/sessions/{foreign}/project", json={"project_id": "p"}, headers=key(other))
        assert answer.status_code == 404 and answer.get_json()["detail"] == f"no session '{foreign}'"
    assert search(api, project_ids=["new"]) == [session]


def key(api: Api) -> dict[str, str]:
    return {"X-API-Key": api.key}
