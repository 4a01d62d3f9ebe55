"""`openrl accelerators`: what an operator sees of turns, and what he may end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from openrl.app.accelerator_cli import accelerators
from openrl.tasks import audit
from openrl.tasks.store import Store
from openrl.timeslice.holder import Holder, Place, Process
from openrl.timeslice.turn import Turns

ELSEWHERE = Holder(
    place=Place(machine="", boot="another", pid_namespace="pid:[1]"), leader=Process(7, 7), group="session", uid=0
)


@pytest.fixture
def openrl(store: Store, store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("OPENRL_REDIS_URL", store_url)
    return lambda *words: CliRunner().invoke(accelerators, [*words, "--data-dir", str(tmp_path / "nothing")])


def test_holder_waiters_use_and_switches_are_shown(
    openrl: Callable[..., Result], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert json.loads(openrl("--json").stdout) == []
    turns = Turns(store.redis)
    first = turns.ask("gpu-0", "run-a/trainer", "one", ELSEWHERE)
    assert first is not None
    turns.note("gpu-0", first, state="resident", restore=0.25)
    assert turns.ask("gpu-0", "run-b/trainer", "two", ELSEWHERE) is None
    turns.release("gpu-0", first, busy_s=0.0, park_s=0.5)
    second = turns.ask("gpu-0", "run-b/trainer", "two", ELSEWHERE)
    assert turns.ask("gpu-0", "run-a/trainer", "three", ELSEWHERE) is None
    [found] = json.loads(openrl("--json").stdout)
    assert (found["present"]["owner"], found["present"]["token"]) == ("run-b/trainer", second)
    assert list(found["waiting"]) == ["run-a/trainer"] and found["turns"] == 2
    [switch] = found["switches"]
    assert (switch["owner"], switch["how"], switch["park_s"], switch["restore_s"]) == (
        "run-a/trainer", "released", 0.5, 0.25,
    )  # fmt: skip
    waits = {row["owner"]: (row["turns"], row["waits"]) for row in found["owners"]}
    assert waits == {"run-a/trainer": (1, 0), "run-b/trainer": (1, 1)}
    monkeypatch.setenv("COLUMNS", "160")
    shown = openrl()
    assert shown.exit_code == 0 and "run-b/trainer" in shown.output and "750.0 ms" in shown.output


def test_an_owner_that_once_left_the_line_is_shown_as_any_other(openrl: Callable[..., Result], store: Store) -> None:
    turns = Turns(store.redis)
    assert turns.ask("gpu-0", "run-a", "one", ELSEWHERE) is not None
    assert turns.ask("gpu-0", "run-b", "9ae6d2a7c09c3e97", ELSEWHERE) is None
    turns.withdraw("gpu-0", "run-b", "9ae6d2a7c09c3e97")
    shown = openrl("--json")
    assert shown.exit_code == 0 and {row["owner"] for row in json.loads(shown.stdout)[0]["owners"]} == {
        "run-a",
        "run-b",
    }


def test_an_operator_ends_the_turn_that_he_names_and_no_other(openrl: Callable[..., Result], store: Store) -> None:
    token = Turns(store.redis).ask("gpu-0", "run-a", "one", ELSEWHERE)
    refused = openrl("end", "gpu-0", "12")
    assert refused.exit_code == 2 and "turn 12 doesn't run" in refused.output
    assert openrl("end", "gpu-0", str(token)).exit_code == 0
    [found] = json.loads(openrl("--json").stdout)
    assert found["present"] is None and found["switches"][0]["how"] == "ended"
    [entry] = audit.entries(store, "", since=0, before=1e12)
    assert (entry.event, entry.details["owner"], entry.details["token"]) == (
        "accelerator_turn_ended",
        "run-a",
        str(token),
    )
    assert openrl("end", "no such", "1").exit_code == 2
