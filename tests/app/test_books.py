"""Usage, storage and the audit log over HTTP, as the SDK's own client and its command line read them; and quotas."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
import tinker
from click.testing import CliRunner
from flask import Flask
from tinker.cli.__main__ import main_cli
from werkzeug.serving import make_server

from openrl.tasks import audit, keys
from openrl.tasks.operations import Outcome, Usage
from openrl.tasks.quotas import Quotas
from openrl.tasks.store import Store
from openrl.tasks.tenants import SCOPES, Tenants
from openrl.tasks.usage import Usage as Books
from tests.app.conftest import MODEL, Api, Worker


@pytest.fixture
def admin(api: Api, store: Store) -> Api:
    return dataclasses.replace(api, key=Tenants(store).create_key("ada", "ada@example.org", scopes=list(SCOPES)))


@pytest.fixture
def base_url(app: Flask) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def hours() -> tuple[datetime, datetime]:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    return now - timedelta(hours=2), now + timedelta(hours=2)


def trained(api: Api, worker: Worker, store: Store) -> str:
    """Train, save and store something as `ada`; return the run."""
    session = {"tags": [], "user_metadata": {"exp": "sft"}, "project_id": "p1"}
    session_id = api.ok(api.post("/create_session", session))["session_id"]
    run = str(api.ok(api.create_model(session_id))["model_id"])
    api.ok(api.forward_backward(run, 1))
    api.ok(api.post("/save_weights", {"model_id": run, "path": "ck", "seq_id": 2}))
    worker.step(
        {
            "forward_backward": Outcome(result=b"{}", usage=Usage(seconds=2)),
            "save_weights": worker.save("ada", run, "ck", size_bytes=3 * 10**9),
        }
    )
    Books(store).meter()
    store.redis.hincrbyfloat(keys.account("ada"), "metered", -1800)
    Books(store).meter()
    return run


def test_the_sdks_admin_client_reads_usage_storage_and_the_audit_log(
    admin: Api, worker: Worker, store: Store, base_url: str
) -> None:
    run = trained(admin, worker, store)
    client = tinker.AdminClient(base_url=base_url, api_key=admin.key)
    usage = client.get_billing_usage(*hours()).result()
    infos = {event.event_info.type: event for event in usage.data}
    assert infos["training"].event_info.token_count == 4
    assert infos["training"].base_model == MODEL.name and infos["training"].project_id == "p1"
    assert infos["checkpoint"].event_info.count == 1
    stored = sum(event.event_info.gigabyte_hours for event in usage.data if event.event_info.type == "storage")
    assert 1.5 <= stored < 1.51 and infos["storage"].session_id is None
    session_id = run.partition(":")[0]
    assert usage.sessions[session_id].user_metadata == {"exp": "sft"}
    storage = client.get_current_checkpoint_storage_usage().result()
    ((project, count, size),) = [(row.project_id, row.checkpoint_count, row.size_gigabytes) for row in storage.data]
    assert (project, count, size) == ("p1", 1, 3.0)
    assert client.get_current_checkpoint_storage_usage(project_id="p2").result().data == []
    entries = client.get_audit_log("organizations", datetime.now(UTC).date()).result().entries
    assert [entry.event for entry in entries] == ["key_created"]
    assert client.get_audit_log("checkpoints").result().entries == []


def test_the_sdks_command_line_shows_usage_and_logs_in_and_says_who_one_is(
    admin: Api, worker: Worker, store: Store, base_url: str, monkeypatch, tmp_path
) -> None:
    trained(admin, worker, store)
    monkeypatch.setenv("TINKER_BASE_URL", base_url)
    monkeypatch.setenv("TINKER_API_KEY", admin.key)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    start, end = (at.isoformat() for at in hours())
    shown = CliRunner().invoke(main_cli, ["--format", "json", "billing", "usage", start, end])
    assert shown.exit_code == 0 and '"token_count": 4' in shown.output, shown.output
    shown = CliRunner().invoke(main_cli, ["--format", "json", "billing", "checkpoint-storage"])
    assert shown.exit_code == 0 and '"size_bytes": 3000000000' in shown.output, shown.output
    monkeypatch.delenv("TINKER_API_KEY")
    entered = CliRunner().invoke(main_cli, ["auth", "login"], input=admin.key + "\n")
    assert entered.exit_code == 0 and "Logged in as ada@example.org (ada)" in entered.output, entered.output
    left = CliRunner().invoke(main_cli, ["auth", "logout"])
    assert left.exit_code == 0, left.output


def test_the_sdk_trains_with_tokens_where_an_operator_says_so_and_knows_who_it_is(
    store: Store, admin: Api, base_url: str
) -> None:
    settings = admin.services.settings
    object.__setattr__(settings, "pjwt_auth_enabled", True)
    client = tinker.RestClient(base_url=base_url, api_key=admin.key)
    me = client.whoami().result()
    (key,) = Tenants(store).list_keys()
    assert me.user_urn == f"openrl:key:{key.key_id}" and me.email == "ada@example.org"
    assert me.org_urn == "tml:organization:ada"
    assert client.list_training_runs().result().training_runs == []


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/billing/usage/events", "starting_on"),
        ("/billing/usage/events?starting_on=2026-01-01T00:30:00Z&ending_before=2026-01-01T01:00:00Z", "full hour"),
        ("/billing/usage/events?starting_on=2026-01-01T00:00:00Z&ending_before=2026-02-01T00:00:00Z", "14 days"),
        ("/billing/usage/events?starting_on=2026-01-02T00:00:00Z&ending_before=2026-01-01T00:00:00Z", "14 days"),
        ("/billing/usage/events?starting_on=2999-01-01T00:00:00Z&ending_before=2999-01-01T01:00:00Z", "future"),
        ("/billing/usage/events?starting_on=x&ending_before=y", "starting_on"),
        ("/audit?event_type=secrets", "event_type"),
        ("/audit?day=yesterday", "day"),
        ("/audit?tenant=bob", "tenant"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_by_its_field(admin: Api, path: str, word: str) -> None:
    answer = admin.get(path)
    assert answer.status_code == 422 and word in answer.get_json()["detail"], answer.text


def test_a_tenant_reads_its_own_books_alone(admin: Api, worker: Worker, store: Store) -> None:
    trained(admin, worker, store)
    bob = dataclasses.replace(admin, key=Tenants(store).create_key("bob", scopes=["admin"]))
    start, end = (at.strftime("%Y-%m-%dT%H:%M:%SZ") for at in hours())
    usage = bob.ok(bob.get(f"/billing/usage/events?starting_on={start}&ending_before={end}"))
    assert usage == {"data": [], "sessions": {}}
    assert bob.ok(bob.get("/billing/usage/checkpoints/current"))["data"] == []
    assert [entry["event_details"]["key_id"] for entry in bob.ok(bob.get("/audit"))["entries"]] == [
        key.key_id for key in Tenants(store).list_keys() if key.tenant == "bob"
    ]


def test_a_deleted_checkpoint_is_in_the_audit_log_with_who_deleted_it(admin: Api, worker: Worker, store: Store) -> None:
    run = trained(admin, worker, store)
    answer = admin.client.delete(
        f"/api/v1/training_runs/{run}/checkpoints/weights/ck", headers={"X-API-Key": admin.key}
    )
    assert answer.status_code == 200
    (entry,) = audit.entries(store, "ada", since=0, before=time.time() + 1, kind="checkpoints")
    assert (entry.event, entry.details["tinker_path"]) == ("checkpoint_deleted", f"tinker://{run}/weights/ck")
    assert entry.details["actor"] == f"key:{Tenants(store).list_keys()[0].key_id}"


# quotas over HTTP


def test_over_its_runs_a_tenant_is_refused_for_good_and_may_end_a_session(
    api: Api, store: Store, worker: Worker
) -> None:
    Quotas(store).set("local", {"runs": 1})
    session = api.session()
    api.ok(api.create_model(session))
    worker.step()
    refused = api.create_model(session, 1)
    assert (refused.status_code, refused.get_json()["error"]["code"]) == (403, "quota_exceeded")
    assert "quota runs: 1 are allowed and 1 in use" in refused.text and "`openrl quota set`" in refused.text
    api.ok(api.post(f"/sessions/{session}/finish", {}))
    api.ok(api.create_model(api.session()))


def test_a_save_over_the_stored_bytes_fails_clearly_and_the_run_goes_on(api: Api, store: Store, worker: Worker) -> None:
    run = api.run()
    api.ok(api.post("/save_weights", {"model_id": run, "path": "a", "seq_id": 1}))
    worker.step({"save_weights": worker.save("local", run, "a", size_bytes=1000)})
    Quotas(store).set("local", {"stored_bytes": 1000})
    for seq, route in ((2, "save_weights"), (3, "save_weights_for_sampler"), (4, "save_weights_external")):
        refused = api.post(f"/{route}", {"model_id": run, "path": "b", "seq_id": seq})
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (403, "quota_exceeded"), refused.text
        assert "stored_bytes: 1000 are allowed" in refused.text
    api.ok(api.optim_step(run, 5))
    assert [done.seq_id for done in worker.step()] == [2, 3, 4, 5]


def test_out_of_tokens_samples_wait_by_429_and_training_by_its_queue_state(
    api: Api, store: Store, worker: Worker
) -> None:
    Quotas(store).set("local", {"tokens_per_minute": 2})
    run = api.run()
    session = run.partition(":")[0]
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": MODEL.name}
    sampler = api.ok(api.post("/create_sampling_session", sampling))["sampling_session_id"]
    api.ok(api.forward_backward(run, 1))
    worker.step()
    sample = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    refused = api.post("/asample", sample)
    assert refused.status_code == 429 and "tokens_per_minute" in refused.text
    assert 50 <= int(refused.headers["Retry-After"]) <= 60
    api.ok(api.forward_backward(run, 2))
    assert worker.step() == []
    pending = api.poll(f"{run}:2")
    assert (pending.status_code, pending.get_json()["queue_state"]) == (408, "paused_rate_limit")
    assert "goes on in" in pending.get_json()["queue_state_reason"]
    store.redis.hincrbyfloat(keys.account("local"), "tokens_at", -61)
    assert [done.seq_id for done in worker.step()] == [2]
    store.redis.hincrbyfloat(keys.account("local"), "tokens_at", -3600)
    api.ok(api.post("/asample", sample))
