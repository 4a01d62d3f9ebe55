"""One session of fine-tuning and reinforcement learning under each SDK that is supported, against one running service.

Each SDK has an environment of its own (`make test-sdks`) and runs `session.py`, which prints what it saw. Whatever the
SDK, the same run gives the same numbers; and one loads what another has saved.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import wire
from tests.stack.conftest import MODEL, Service
from tests.tiny import make_tiny_model
from tests.trainer.bench import computed

pytestmark = [pytest.mark.sdks, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
NEWEST = "0.38.0"
SDKS = ("0.6.3", "0.18.2", "0.24.1", "0.30.4", NEWEST)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the SDKs find the tokenizer by the model's name."""
    folder = tmp_path_factory.mktemp("sdks")
    make_tiny_model(folder / MODEL)
    return folder


@pytest.fixture(scope="module")
def service(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    running = Service(tmp_path_factory.mktemp("service"), workplace / MODEL).start()
    yield running
    status = running.stop()
    running.close()
    assert status == 0


def session(service: Service, workplace: Path, sdk: str, others: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the session with one SDK, and nothing of this environment's; return what it saw."""
    python = ROOT / f".venv-sdk-{sdk}" / "bin" / "python"
    assert python.is_file(), f"there is no environment for {sdk}: make test-sdks"
    env = {
        "PATH": os.environ["PATH"], "HOME": str(workplace), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1", "TINKER_TELEMETRY": "1",
    }  # fmt: skip
    script = ROOT / "tests" / "sdks" / "session.py"
    command = [python, "-W", "ignore", script, service.base_url, MODEL, json.dumps(others)]
    done = subprocess.run(command, cwd=workplace, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["sdk"] == sdk and Path(seen["where"]).is_relative_to(python.parents[1])
    return seen


@pytest.fixture(scope="module")
def oldest(service: Service, workplace: Path) -> dict[str, Any]:
    """What the oldest SDK saw, whose checkpoints the others read. From then on there is an export, too."""
    seen = session(service, workplace, SDKS[0])
    http = service.http()
    run = wire.new_run(http, model=MODEL)
    export = {"model_id": run, "path": "exported", "seq_id": 1}
    promise = http.post("/save_weights_external", json=export).raise_for_status().json()
    assert wire.poll(http, promise["request_id"]).json()["path"] == f"tinker://{run}/external_weights/exported"
    return seen


@pytest.fixture(scope="module", params=SDKS)
def seen(request: pytest.FixtureRequest, service: Service, workplace: Path, oldest: dict[str, Any]) -> dict[str, Any]:
    """What a session saw, which also used the oldest SDK's checkpoints."""
    others = {"training": oldest["kept"], "sampler": oldest["draw"]["path"]}
    return session(service, workplace, request.param, others)


def test_training_learns_whatever_is_sent_in_pieces_and_goes_on_after_a_refusal(seen: dict[str, Any]) -> None:
    losses = seen["train"]["losses"]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.1 * losses[0]
    assert seen["train"]["crowd"]["outputs"] == 150
    assert seen["train"]["crowd"]["loss"] == pytest.approx(seen["train"]["crowd"]["negative"], rel=1e-6)
    assert "99999" in seen["train"]["refusal"] and "target_tokens" in seen["train"]["refusal"]
    assert "no step was taken" in seen["train"]["void"] and "99999" in seen["train"]["void"]
    assert seen["train"]["after"] < losses[-1]


def test_every_way_back_to_a_checkpoint_takes_the_same_step_again(seen: dict[str, Any]) -> None:
    resume = seen["resume"]
    assert resume["path"] == f"tinker://{seen['info'][0]}/weights/middle"
    for name in ("load_state_with_optimizer", "create_training_client_from_state_with_optimizer"):
        assert computed(resume[name]) == computed(resume["went_on"]), name
    for name in ("load_state", "create_training_client_from_state"):
        alone, with_optimizer = resume[name], resume["went_on"]
        assert (alone["loss:sum"], alone["grad_norm"]) == (with_optimizer["loss:sum"], with_optimizer["grad_norm"])
        assert alone["step"] == 1 and alone["update_norm"] != with_optimizer["update_norm"]
    assert computed(seen["narrow"]["resumed"]) == computed(seen["narrow"]["went_on"])


def test_a_seed_draws_the_same_again_and_a_sample_ends_where_it_should(seen: dict[str, Any]) -> None:
    draw = seen["draw"]
    assert draw["once"] == draw["again"] != draw["other_seed"]
    assert len({tuple(each["tokens"]) for each in draw["once"]}) == 4
    [greedy], [whole] = draw["greedy"], draw["no_stop"]
    assert (greedy, greedy["stop_reason"], len(greedy["tokens"])) == (whole, "length", 12)
    for how in ("stop_token", "stop_text"):
        [stopped] = draw[how]
        assert stopped["stop_reason"] == "stop" and stopped["tokens"] == greedy["tokens"][:2]
        assert stopped["logprobs"] == pytest.approx(greedy["logprobs"][:2], abs=1e-4)


def test_a_prompt_is_worth_to_the_sampler_what_it_is_to_the_trainer(seen: dict[str, Any]) -> None:
    draw = seen["draw"]
    assert draw["prompt_logprobs"][0] is None and draw["compute_logprobs"] == draw["prompt_logprobs"]
    assert draw["prompt_logprobs"][1:] == pytest.approx(draw["trainer"], abs=1e-4)
    assert draw["best"][0] is None and all(len(row) == 3 for row in draw["best"][1:])
    assert all(row[0][1] >= worth - 1e-6 for row, worth in zip(draw["best"][1:], draw["trainer"], strict=True))


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo"])
def test_a_policy_step_makes_the_rewarded_sample_likelier(seen: dict[str, Any], loss_fn: str) -> None:
    found = seen[loss_fn]
    assert abs(found["metrics"]["loss:sum"]) < 1e-3, "at ratio 1 the advantages cancel"
    assert found["metrics"]["ratio:max"] == pytest.approx(1, abs=1e-3)
    assert found["after"][0] > found["before"][0]


def test_a_custom_loss_falls(seen: dict[str, Any]) -> None:
    squares = seen["custom"]["squares"]
    assert squares == sorted(squares, reverse=True) and squares[-1] < 0.5 * squares[0]


def test_the_service_tells_what_a_session_has_made(seen: dict[str, Any]) -> None:
    run, rest = seen["info"][0], seen["rest"]
    assert seen["models"] == [MODEL] and seen["info"][1:] == [MODEL, MODEL] and seen["tokenizer"] == list(b"fox")
    assert rest["run"] == [run, MODEL, 8, True] and rest["by_path"] == run and rest["weights_info"] == 8
    assert rest["listed"] is rest["sessions"] is True and rest["sampler"] == MODEL
    # Two resumed runs, one for the custom loss, two for some modules alone; weights saved once and for two policies.
    assert rest["session"] == {"runs": 6, "samplers": 3}
    knows_exports = "external" in seen
    mine = {"sampler_weights/final", "weights/kept", "weights/middle"}
    mine |= {"external_weights/shared"} if knows_exports else set()
    assert set(rest["checkpoints"]) == mine
    assert {f"tinker://{run}/{name}" for name in mine} <= set(rest["all"])
    assert any("/external_weights/exported" in path for path in rest["all"]) is knows_exports
    assert rest.get("ttl", "weights/middle") == "weights/middle"
    assert (rest["publish"], rest["unpublish"]) == (True, False)
    assert set(rest["left"]) == mine - {"weights/middle"}


def test_an_archive_holds_the_adapter(seen: dict[str, Any]) -> None:
    if "archive" not in seen["rest"]:
        assert seen["sdk"] == NEWEST, "the newest SDK alone has no call for it"
        return
    packed = httpx.get(seen["rest"]["archive"], timeout=60).raise_for_status().content
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names


def test_old_and_new_sdks_see_the_same_numbers(seen: dict[str, Any], oldest: dict[str, Any]) -> None:
    for one, other in (
        (seen["train"]["losses"], oldest["train"]["losses"]),
        (seen["draw"]["trainer"], oldest["draw"]["trainer"]),
        (seen["draw"]["compute_logprobs"][1:], oldest["draw"]["compute_logprobs"][1:]),
        (seen["custom"]["squares"], oldest["custom"]["squares"]),
    ):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-4)
    assert [each["tokens"] for each in seen["draw"]["once"]] == [each["tokens"] for each in oldest["draw"]["once"]]


def test_one_sdk_loads_and_samples_what_another_has_saved(seen: dict[str, Any], oldest: dict[str, Any]) -> None:
    shared = seen["shared"]
    assert shared["scored"][1:] == pytest.approx(oldest["draw"]["compute_logprobs"][1:], abs=1e-4)
    assert [each["tokens"] for each in shared["drawn"]] == [each["tokens"] for each in oldest["draw"]["once"][:2]]
    # These weights are later ones than those that the sampler has.
    assert shared["logprobs"] != oldest["draw"]["trainer"] and len(shared["logprobs"]) == 42
