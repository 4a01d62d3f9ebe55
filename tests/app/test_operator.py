"""What an operator sets and sees at the command line: quotas, usage, the audit log, keys with scopes and an end."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from openrl.app.cli import keys as keys_command
from openrl.app.operator import audit, quota, usage
from openrl.tasks import walk
from openrl.tasks.quotas import Amounts, Quotas
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from tests.app.conftest import Api, Worker


@pytest.fixture
def openrl(store: Store, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENRL_REDIS_URL", store_url)

    def invoke(command: click.Command, *words: str) -> Result:
        return CliRunner().invoke(command, [*words, "--data-dir", str(tmp_path / "nothing")])

    return invoke


def said(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("words", [(usage,), (audit,), (quota, "show"), (keys_command, "list")])
def test_a_directory_that_is_no_services_is_refused_and_not_made(
    words: tuple[click.Command, *tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENRL_REDIS_URL", raising=False)
    command, *rest = words
    result = CliRunner().invoke(command, [*rest, "--data-dir", str(tmp_path / "misspelt")])
    assert result.exit_code == 2 and f"{tmp_path / 'misspelt'} has no store and no service" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_quotas_are_set_shown_and_taken_back(openrl, store: Store) -> None:
    Quotas(store).publish(Amounts(runs=9))
    words = ("--runs", "3", "--stored-bytes", "20G", "--tokens-per-minute", "100k", "--operations", "none")
    assert openrl(quota, "set", "ada", *words).exit_code == 0
    limits = {"runs": 3, "operations": 0, "stored_bytes": 20 * 10**9, "tokens_per_minute": 100_000}
    found = said(openrl(quota, "ada", "--json"))
    assert (found["tenant"], found["limits"], found["own"]) == ("ada", limits, sorted(limits))
    assert found["use"] == dict.fromkeys(limits, 0)
    assert [one["tenant"] for one in said(openrl(quota, "--json"))] == ["ada"]
    assert openrl(quota, "reset", "ada").exit_code == 0
    assert said(openrl(quota, "show", "ada", "--json"))["limits"] == {**dict.fromkeys(limits, 0), "runs": 9}
    events = [one["event"] for one in said(openrl(audit, "ada", "--json"))]
    assert events == ["quota_set", "quota_reset"]


def test_the_tables_can_be_read(openrl) -> None:
    assert openrl(quota, "set", "ada", "--runs", "3").exit_code == 0
    for command, word in ((quota, "stored_bytes"), (usage, "tokens"), (audit, "quota_set")):
        shown = openrl(command)
        assert shown.exit_code == 0 and word in shown.output, shown.output


@pytest.mark.parametrize(
    ("command", "words", "word"),
    [
        (quota, ("set", "ada", "--runs", "many"), "--runs is 'many'"),
        (quota, ("set", "ada"), "--tokens-per-minute"),
        (quota, ("set", "A/b", "--runs", "1"), "'A/b'"),
        (quota, ("nobody",), "no tenant 'nobody'"),
        (usage, ("nobody",), "no tenant 'nobody'"),
        (audit, ("--day", "soon"), "--day is 'soon'"),
        (keys_command, ("create", "--tenant", "ada", "--scope", "root"), "'root' is no scope"),
        (keys_command, ("create", "--tenant", "ada", "--expires", "soon"), "--expires is 'soon'"),
        (keys_command, ("create", "--tenant", "ada", "--expires", "2020-01-01"), "a time to come"),
        (keys_command, ("rotate", "nope"), "no API key 'nope'"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_2(
    openrl, store: Store, command: click.Command, words: tuple[str, ...], word: str
) -> None:
    result = openrl(command, *words)
    assert result.exit_code == 2
    assert word in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert Tenants(store).list_keys() == [] and walk.tenants(store) == []


def test_usage_is_shown_by_run_and_day(openrl, api: Api, worker: Worker) -> None:
    run = api.run()
    api.ok(api.forward_backward(run, 1))
    worker.step()
    rows = said(openrl(usage, "local", "--days", "2", "--json"))
    assert sum(row["trained_tokens"] for row in rows) == 4 and sum(row["operations"] for row in rows) == 2
    assert {(row["tenant"], row["run"]) for row in rows} == {("local", run)}


def test_a_key_is_made_with_scopes_and_an_end_and_is_rotated(openrl, store: Store) -> None:
    words = ("--tenant", "ada", "--scope", "read,sample", "--scope", "admin", "--expires", "12h", "--json")
    made = said(openrl(keys_command, "create", *words))
    assert made["scopes"] == ["read", "sample", "admin"] and 43_000 < made["expires"] - time.time() <= 43_200
    fresh = said(openrl(keys_command, "rotate", made["key_id"], "--grace", "0s", "--json"))
    assert fresh["replaces"] == made["key_id"] and fresh["scopes"] == made["scopes"]
    tenants = Tenants(store)
    assert (tenants.tenant_of(made["key"]), tenants.tenant_of(fresh["key"])) == (None, "ada")
    listed = openrl(keys_command, "list", "--json").stdout
    assert fresh["key"] not in listed and {row["expired"] for row in json.loads(listed)} == {True, False}
    assert openrl(keys_command, "list").exit_code == 0


def test_a_refused_key_of_nobodys_is_shown_on_its_own(openrl, api: Api, store: Store) -> None:
    Tenants(store).create_key("ada")
    assert api.get("/sessions", headers={"X-API-Key": "tml-wrong"}).status_code == 401
    (entry,) = said(openrl(audit, "--unknown", "--json"))
    assert entry["event"] == "login_refused" and "tml-wrong" not in json.dumps(entry)
