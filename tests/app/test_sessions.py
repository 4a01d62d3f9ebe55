from datetime import datetime

from tests.app.conftest import Api


def test_a_session_is_opened_kept_alive_and_finished(api: Api) -> None:
    session = api.session()
    beat = {"session_id": session, "type": "session_heartbeat"}
    assert api.ok(api.post("/session_heartbeat", beat)) == {"type": "session_heartbeat"}
    finish = {"reason": {"type": "success"}, "detail": None}
    for _ in range(2):
        assert api.ok(api.post(f"/sessions/{session}/finish", finish)) == {}
    assert api.post("/session_heartbeat", beat).status_code == 410
    assert api.create_model(session).status_code == 410


def test_a_repeated_opening_is_the_same_session(api: Api) -> None:
    body = {"tags": ["a"], "user_metadata": None, "sdk_version": "0.38.0", "type": "create_session"}
    headers = {"X-Idempotency-Key": "stainless-python-retry-1"}
    first, again = (api.ok(api.post("/create_session", body, headers=headers))["session_id"] for _ in range(2))
    other = api.ok(api.post("/create_session", body, headers={"X-Idempotency-Key": "stainless-python-retry-2"}))
    assert first == again != other["session_id"]
    assert len(first) >= 34


def test_unknown_sessions_are_not_found(api: Api) -> None:
    for name in ("bogus", "s-" + "0" * 32, "a:b", "%00", "x" * 500):
        assert api.post("/session_heartbeat", {"session_id": name}).status_code == 404
        assert api.get(f"/sessions/{name}").status_code == 404
        assert api.post(f"/sessions/{name}/finish", {}).status_code == 404


def test_sessions_are_listed_newest_first_and_in_pages(api: Api) -> None:
    made = [api.session() for _ in range(3)]
    page = api.ok(api.get("/sessions?limit=2&offset=0&access_scope=owned"))
    assert page["sessions"] == made[:0:-1]
    assert page["cursor"] == {"offset": 0, "limit": 2, "total_count": 3}
    assert api.ok(api.get("/sessions?limit=2&offset=2"))["sessions"] == made[:1]


def test_a_session_shows_what_it_made_with_metadata_as_text(api: Api) -> None:
    body = {"tags": [], "user_metadata": {"n": 3, "s": "x", "l": [1]}, "sdk_version": "", "display_name": "mine"}
    session = api.ok(api.post("/create_session", body))["session_id"]
    api.ok(api.create_model(session, 0))
    api.ok(api.create_model(session, 1))
    api.ok(
        api.post(
            "/create_sampling_session",
            {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/random"},
        )
    )
    shown = api.ok(api.get(f"/sessions/{session}?access_scope=owned"))
    assert shown == {
        "training_run_ids": [f"{session}:train:0", f"{session}:train:1"],
        "sampler_ids": [f"{session}:sample:0"],
        "user_metadata": {"n": "3", "s": "x", "l": "[1]"},
        "display_name": "mine",
    }


def test_runs_carry_the_time_of_their_last_request_with_its_zone(api: Api) -> None:
    run = api.run()
    shown = api.ok(api.get(f"/training_runs/{run}"))
    assert datetime.fromisoformat(shown["last_request_time"]).tzinfo is not None
