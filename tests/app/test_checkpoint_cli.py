"""`openrl checkpoints`: what an operator sees and does, whosever the checkpoint is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from openrl.app.checkpoint_cli import checkpoints
from openrl.tasks.errors import NotFound
from tests.app.test_publishing import Shared, shared  # noqa: F401


@pytest.fixture
def openrl(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENRL_REDIS_URL", store_url)
    return lambda *words: CliRunner().invoke(checkpoints, [*words, "--data-dir", str(tmp_path / "nothing")])


def told(result: Result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_checkpoints_of_all_tenants_are_listed_and_of_one_alone(openrl, shared: Shared) -> None:  # noqa: F811
    listed = told(openrl("list", "--json"))
    assert {(one["tenant"], one["tinker_path"]) for one in listed} == {
        ("ada", shared.uri(kind)) for kind in ("weights", "sampler_weights", "external_weights")
    }
    assert told(openrl("list", "--tenant", "bob", "--json")) == []
    assert len(told(openrl("list", "--run", shared.run, "--json"))) == 3
    shown = openrl("list")
    assert shown.exit_code == 0 and "ada" in shown.output


def test_an_operator_publishes_keeps_and_deletes_what_any_tenant_has(openrl, shared: Shared) -> None:  # noqa: F811
    registry, uri = shared.ada.services.registry, shared.uri("weights")

    def found():
        return registry.checkpoint("ada", shared.run, "weights/ck")

    assert told(openrl("publish", uri, "--json"))["public"] is True
    assert found().public and registry.checkpoint_by_uri("bob", uri) == found()
    assert openrl("unpublish", uri).exit_code == 0 and not found().public
    for ttl, seconds in (("12h", 43200), ("3600", 3600), ("2d", 172800)):
        assert openrl("ttl", uri, ttl).exit_code == 0
        assert abs(found().expires_at - time.time() - seconds) < 60
    assert told(openrl("ttl", uri, "never", "--json"))["expires_at"] is None
    assert found().expires_at is None
    assert openrl("delete", uri).exit_code == 0
    with pytest.raises(NotFound):
        found()


def test_what_makes_no_sense_is_one_line_and_changes_nothing(openrl, shared: Shared) -> None:  # noqa: F811
    uri = shared.uri("weights")
    for words, said in (
        (("delete", "weights/ck"), "weights/ck"),
        (("publish", f"tinker://s-{'0' * 32}:train:0/weights/ck"), "no run"),
        (("ttl", uri, "10m"), "10m"),
        (("ttl", uri, "soon"), "soon"),
        (("delete", f"{uri}x"), "ckx"),
        (("list", "--tenant", "No One"), "No One"),
    ):
        result = openrl(*words)
        assert result.exit_code == 2 and said in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1 and "Traceback" not in result.output
    kept = shared.ada.services.registry.checkpoint("ada", shared.run, "weights/ck")
    assert not kept.public and kept.expires_at is None


def test_what_an_operator_does_is_in_the_tenants_audit_log(openrl, shared: Shared) -> None:  # noqa: F811
    from openrl.tasks import audit

    openrl("publish", shared.uri("weights"))
    openrl("delete", shared.uri("weights"))
    store = shared.ada.services.store
    entries = audit.entries(store, "ada", since=0, before=time.time() + 60, kind="checkpoints")
    assert [(each.event, each.details["actor"]) for each in entries] == [
        ("checkpoint_published", "operator"), ("checkpoint_deleted", "operator"),
    ]  # fmt: skip
