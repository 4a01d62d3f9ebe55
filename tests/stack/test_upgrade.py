"""A service that starts on what the previous version left behind, killed in the middle of its work.

`tests/data/schema_1/make.py` says how that was made, and by which version. Its `facts.json` is what a run saw that did
everything before the kill; the run here stopped half way, and must end in the same.
"""

from __future__ import annotations

import importlib.util
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openrl.tasks import schema
from tests.stack.conftest import Service

OLD = Path(__file__).parents[1] / "data" / "schema_1"
FACTS: dict[str, Any] = json.loads((OLD / "facts.json").read_text())
DONE_BEFORE = 8
"""Operations of the half-way run that had taken effect."""


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"openrl_tests_{name}", OLD / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


said = module("said")


def unpack(to: Path) -> None:
    with tarfile.open(OLD / "data.tar.xz") as archive:
        archive.extractall(to, filter="data")
    (to / "data").chmod(0o700)
    module("exact").fill(to / "model")


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`openrl up` of this version, on the old data. Gaps of it, whose clients are gone, are closed at once."""
    home = tmp_path_factory.mktemp("old")
    unpack(home)
    running = Service(home / "data", home / "model", said.MODEL, env={"OPENRL_GAP_TIMEOUT_S": "1"}).start()
    yield running
    status = running.stop()
    running.close()
    assert status == 0


@pytest.fixture(scope="module")
def ada(upgraded: Service) -> httpx.Client:
    return upgraded.http(headers={"X-API-Key": FACTS["keys"]["ada"]})


def result(http: httpx.Client, request_id: str) -> dict[str, Any]:
    while (answer := http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
        pass
    answer.raise_for_status()
    return dict(answer.json())


def post(http: httpx.Client, route: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post(f"/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def logprobs(found: dict[str, Any]) -> list[float]:
    return list(found["loss_fn_outputs"][0]["logprobs"]["data"])


def assert_same_metrics(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what the older version told, too; a newer one may tell more."""
    told = expected["metrics"]
    assert {name: found["metrics"].get(name) for name in told} == pytest.approx(told, rel=1e-3)


def assert_same_draw(found: dict[str, Any]) -> None:
    for mine, its in zip(found["sequences"], FACTS["drawn"]["sequences"], strict=True):
        assert mine["tokens"] == its["tokens"]
        assert mine["logprobs"] == pytest.approx(its["logprobs"], abs=1e-3)
    assert found["prompt_logprobs"][1:] == pytest.approx(FACTS["drawn"]["prompt_logprobs"][1:], abs=1e-3)


def test_what_was_acknowledged_takes_effect_as_if_nothing_had_happened(ada: httpx.Client) -> None:
    for seq, expected in list(enumerate(FACTS["results"], start=1))[DONE_BEFORE:]:
        found = result(ada, f"{FACTS['half']}:{seq}")
        assert_same_metrics(found, expected)
    assert logprobs(found) == pytest.approx(FACTS["logprobs"], abs=1e-3)


def test_a_sample_that_waited_is_drawn_from_the_weights_of_then(ada: httpx.Client) -> None:
    assert_same_draw(result(ada, f"{FACTS['session']}:sample:0:0"))


def test_what_is_sent_again_after_the_upgrade_is_the_same_promise(ada: httpx.Client) -> None:
    created = said.creation(FACTS["session"], int(FACTS["half"].rpartition(":")[2]))
    assert post(ada, "create_model", created)["model_id"] == FACTS["half"]
    for seq, (route, body) in enumerate(said.steps(FACTS["half"]), start=1):
        assert post(ada, route, body)["request_id"] == f"{FACTS['half']}:{seq}"
        other = {"adam_params": {"learning_rate": 0.5}, "model_id": FACTS["half"], "seq_id": seq}
        assert ada.post("/optim_step", json=other).status_code == 422
    assert post(ada, "asample", said.sample(f"{FACTS['session']}:sample:0", 0))["request_id"].endswith(":sample:0:0")


def test_the_run_goes_on(ada: httpx.Client) -> None:
    seq = len(FACTS["results"]) + 1
    route, body = said.steps(FACTS["half"])[-1]
    again = result(ada, post(ada, route, body | {"seq_id": seq})["request_id"])
    assert logprobs(again) == pytest.approx(FACTS["logprobs"], abs=1e-3)


def test_old_samplers_and_sampler_weights_give_the_same_tokens(ada: httpx.Client) -> None:
    assert_same_draw(result(ada, post(ada, "asample", said.sample(f"{FACTS['session']}:sample:1", 7))["request_id"]))
    named = f"tinker://{FACTS['half']}/sampler_weights/named"
    asked = {"session_id": FACTS["session"], "sampling_session_seq_id": 5, "model_path": named}
    sampler = post(ada, "create_sampling_session", asked)["sampling_session_id"]
    assert_same_draw(result(ada, post(ada, "asample", said.sample(sampler, 0))["request_id"]))


def test_an_old_checkpoint_is_loaded_with_its_optimizer(ada: httpx.Client) -> None:
    path = f"tinker://{FACTS['whole']}/weights/kept"
    asked = {"session_id": FACTS["session"], "model_seq_id": 7, "path": path, "optimizer": True}
    run = result(ada, post(ada, "load_weights", asked)["request_id"])["model_id"]
    (_, accumulate), (_, accumulate_too), (_, step) = said.steps(run)[8:11]
    for seq, (route, body) in enumerate(
        [("forward_backward", accumulate), ("forward_backward", accumulate_too), ("optim_step", step)], start=1
    ):
        found = result(ada, post(ada, route, body | {"seq_id": seq})["request_id"])
        assert_same_metrics(found, FACTS["results"][7 + seq])
    assert found["metrics"]["step"] == 3


def test_keys_still_open_what_is_their_tenants_own_and_nothing_else(upgraded: Service, ada: httpx.Client) -> None:
    bob = upgraded.http(headers={"X-API-Key": FACTS["keys"]["bob"]})
    runs = {who: http.get("/training_runs").json()["training_runs"] for who, http in (("ada", ada), ("bob", bob))}
    assert {FACTS["half"], FACTS["whole"]} <= {run["training_run_id"] for run in runs["ada"]}
    assert [run["training_run_id"] for run in runs["bob"]] == [FACTS["gap"]]
    assert bob.get(f"/training_runs/{FACTS['half']}").status_code == 404
    assert upgraded.http().get("/training_runs").status_code == 401
    # The first of its operations had never come: what stood behind it fails, as it would have without the upgrade.
    failed = result(bob, f"{FACTS['gap']}:2")
    assert failed["category"] == "user" and "seq 1 never arrived" in failed["error"]


def test_the_data_says_that_it_is_this_versions_now(upgraded: Service) -> None:
    assert json.loads((upgraded.data_dir / "schema.json").read_text()) == {"schema": schema.DATA}
