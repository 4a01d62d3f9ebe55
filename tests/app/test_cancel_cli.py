"""What an operator cancels, by the id that logs and Flower show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from openrl.app.cancel_cli import requests, runs
from tests.app.conftest import Api, Worker
from tests.app.test_sampling import asample, sampler


@pytest.fixture
def openrl(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENRL_REDIS_URL", store_url)

    def run(*words: str) -> Result:
        group = {"runs": runs, "requests": requests}[words[0]]
        return CliRunner().invoke(group, [*words[1:], "--data-dir", str(tmp_path / "nothing")])

    return run


def test_one_request_is_cancelled_whosever_it_is_and_its_client_is_told(two: tuple[Api, Api], openrl) -> None:
    ada, bob = two
    waiting, kept = (api.ok(api.post("/asample", asample(sampler(api))))["request_id"] for api in (ada, bob))
    done = openrl("requests", "cancel", waiting, "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"request_id": waiting, "state": "cancelled"})
    assert ada.ok(ada.poll(waiting)) == {"error": "cancelled by an operator", "category": "user"}
    assert bob.poll(kept).status_code == 408
    assert openrl("requests", "cancel", waiting).stdout == f"{waiting} had ended before\n"


def test_a_run_loses_what_it_has_waiting_and_goes_on(two: tuple[Api, Api], openrl, worker: Worker) -> None:
    ada, _ = two
    run = ada.run()
    worker.step()
    for seq in (1, 2):
        ada.ok(ada.forward_backward(run, seq))
    done = openrl("runs", "cancel", run)
    assert (done.exit_code, done.stdout) == (0, f"{run}: 0 cancelled, 2 more unless its trainer has begun them\n")
    assert [done.kind for done in worker.step()] == ["refused", "refused"]
    ada.ok(ada.forward_backward(run, 3))
    assert [done.kind for done in worker.step()] == ["forward_backward"]
    assert json.loads(openrl("runs", "cancel", run, "--json").stdout) == {"run_id": run, "cancelled": 0, "asked": 0}


@pytest.mark.parametrize("words", [("runs", "cancel", "s-1:train:0"), ("requests", "cancel", "x")])
def test_what_is_nobodys_is_one_clear_line_and_exit_2(api: Api, openrl, words: tuple[str, ...]) -> None:
    result = openrl(*words)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"openrl {words[0]}: no ") and result.stderr.count("\n") == 1
