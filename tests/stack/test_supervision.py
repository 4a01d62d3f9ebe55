"""`openrl up` as the only parent: what it starts, refuses, restarts, ends, and finds again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import httpx
import psutil
import pytest
import tinker
from tinker import types

from openrl.scheduler.clusters.local import LocalCluster
from openrl.tasks import embedded
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from tests.stack import wire
from tests.stack.conftest import MODEL, Service

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")]

TOKENS = list(b"sphinx of black quartz, judge my vow")


def processes_of(data_dir: Path, module: str = "") -> list[psutil.Process]:
    """Every process of this data directory, told by its environment or command line; of a module alone if named."""
    found = []
    for process in psutil.process_iter():
        try:
            env, words = process.environ(), " ".join(process.cmdline())
            ours = env.get("OPENRL_DATA_DIR") == str(data_dir) or str(data_dir) in words
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # it has ended meanwhile, or is nobody's that we know
        if ours and alive and module in words:
            found.append(process)
    return found


def wait_until_gone(data_dir: Path, *, timeout_s: float = 60.0) -> list[psutil.Process]:
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(data_dir)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


@pytest.mark.full
def test_nothing_is_left_after_ten_times_up_and_kill(own_service: Service) -> None:
    for cycle in range(10):
        own_service.start()
        if cycle % 3 == 0:
            wire.new_run(own_service.http(), model=MODEL)
        if cycle % 2:
            assert own_service.process is not None
            own_service.process.kill()
            own_service.process.wait(10)
        else:
            assert own_service.stop(signal.SIGINT if cycle % 4 else signal.SIGTERM, timeout_s=15) == 0
        left = wait_until_gone(own_service.data_dir, timeout_s=15 if cycle % 2 == 0 else 60)
        assert not left, [(process.pid, process.cmdline()) for process in left]


def test_a_restart_on_the_same_directory_finds_its_runs_and_checkpoints(own_service: Service) -> None:
    http = own_service.start().http()
    run = wire.new_run(http, model=MODEL)
    wire.forward_backward(http, run, 1, TOKENS)
    wire.optim_step(http, run, 2, learning_rate=0.01)
    wire.forward_backward(http, run, 3, TOKENS)
    http.post("/save_weights", json={"model_id": run, "path": "kept", "seq_id": 4}).raise_for_status()
    assert wire.poll(http, f"{run}:4").json()["path"] == f"tinker://{run}/weights/kept"
    gradient = None
    for how in (signal.SIGTERM, signal.SIGKILL):
        own_service.stop(how)
        wait_until_gone(own_service.data_dir)
        http = own_service.start().http()
        assert [row["checkpoint_id"] for row in http.get("/checkpoints").json()["checkpoints"]] == ["weights/kept"]
        assert [row["training_run_id"] for row in http.get("/training_runs").json()["training_runs"]] == [run]
        if gradient is None:
            # The gradient accumulated before the stop is still there.
            wire.optim_step(http, run, 5, learning_rate=0.0)
            gradient = wire.poll(http, f"{run}:5").json()["metrics"]["grad_norm"]
            assert gradient > 0
    wire.forward_backward(http, run, 6, TOKENS)
    wire.optim_step(http, run, 7, learning_rate=0.0)
    assert wire.poll(http, f"{run}:7").json()["metrics"]["grad_norm"] == pytest.approx(gradient, rel=1e-5)
    assert own_service.stop() == 0


@pytest.mark.full
def test_other_weights_under_the_name_of_a_model_that_has_runs_are_refused(
    own_service: Service, model_dir: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(model_dir, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) // 2 :] = bytes(len(weights) - len(weights) // 2)
    (other / "model.safetensors").write_bytes(weights)
    wire.new_run(own_service.start().http(), model=MODEL)
    assert own_service.stop() == 0
    directory = str(own_service.data_dir)
    refused(
        up("--data-dir", directory, "--model", f"{MODEL}={other}", "--port", "0"), f"--model {MODEL}", "another name"
    )
    assert not processes_of(own_service.data_dir)
    own_service.start()
    assert own_service.stop() == 0


def test_workers_start_on_demand_stop_when_idle_and_start_again(own_service: Service) -> None:
    own_service.options = ("--idle-timeout", "3")
    http = own_service.start().http()
    assert not workers(own_service.data_dir)
    run = wire.new_run(http, model=MODEL)
    wire.forward_backward(http, run, 1, TOKENS)
    assert workers(own_service.data_dir)
    deadline = time.monotonic() + 60
    while workers(own_service.data_dir) and time.monotonic() < deadline:
        time.sleep(0.3)
    assert not workers(own_service.data_dir)
    wire.optim_step(http, run, 2)
    assert wire.poll(http, f"{run}:2").json()["metrics"]["grad_norm"] > 0
    assert own_service.stop() == 0


def workers(data_dir: Path) -> list[psutil.Process]:
    return processes_of(data_dir, "openrl.workers.")


def train(http: httpx.Client, run: str, first: int, last: int) -> list[float]:
    """Odd numbers compute the loss, even ones step; each is read before the next is sent."""
    seen = []
    for seq in range(first, last + 1):
        if seq % 2:
            wire.forward_backward(http, run, seq, TOKENS).raise_for_status()
        else:
            wire.optim_step(http, run, seq, learning_rate=0.01).raise_for_status()
        metrics = wire.poll(http, f"{run}:{seq}", timeout_s=90).json()["metrics"]
        seen.append(metrics.get("loss:sum", metrics.get("grad_norm")))
    return seen


def test_a_killed_worker_is_replaced_and_its_run_ends_with_the_weights_of_an_undisturbed_one(
    own_service: Service,
) -> None:
    own_service.env = {"OPENRL_LEASE_S": "8"}
    http = own_service.start().http()

    run = wire.new_run(http, model=MODEL)
    before = train(http, run, 1, 5)
    for process in workers(own_service.data_dir):
        process.kill()
    after = train(http, run, 6, 9)
    assert before + after == train(http, wire.new_run(http, model=MODEL), 1, 9)
    assert after[-1] < before[0]
    assert own_service.stop() == 0


@pytest.mark.full
def test_a_worker_that_hangs_is_said_to_be_gone_and_is_replaced(own_service: Service) -> None:
    own_service.env = {"OPENRL_LEASE_S": "8", "OPENRL_POLL_MIN_S": "1", "OPENRL_POLL_MAX_S": "1"}
    http = own_service.start().http()
    run = wire.new_run(http, model=MODEL)
    [hung] = workers(own_service.data_dir)
    hung.suspend()
    wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
    reasons = set()
    while (answer := http.post("/retrieve_future", json={"request_id": f"{run}:1"})).status_code == 408:
        reasons.add(answer.json()["queue_state_reason"])
    assert answer.json()["metrics"]["loss:sum"] > 0
    assert f"no trainer answers for {MODEL}" in reasons
    [fresh] = workers(own_service.data_dir)
    assert fresh.pid != hung.pid and not hung.is_running()
    assert own_service.stop() == 0


@pytest.mark.full
def test_an_upgrade_under_a_running_service_replaces_its_workers_and_runs_that_train_lose_nothing(
    own_service: Service, tmp_path: Path
) -> None:
    # Of an installed version only its metadata differs here, so that losses can be compared.
    now, real = metadata.version("openrl-service"), metadata.distribution("openrl-service")
    said = tmp_path / "site" / "openrl_service-0.0.1.dist-info" / "METADATA"
    said.parent.mkdir(parents=True)
    said.write_text("Metadata-Version: 2.1\nName: openrl-service\nVersion: 0.0.1\n")
    (said.parent / "entry_points.txt").write_text(str(real.read_text("entry_points.txt")))
    own_service.env = {"OPENRL_LEASE_S": "8", "PYTHONPATH": str(said.parents[1])}
    http = own_service.start().http()
    at = {"OPENRL_REDIS_URL": embedded.url(own_service.data_dir), "OPENRL_DATA_DIR": str(own_service.data_dir)}
    cluster = LocalCluster(Store.connect(StoreSettings.from_env(at)))

    def upgrade() -> None:
        said.write_text(f"Metadata-Version: 2.1\nName: openrl-service\nVersion: {now}\n")
        [scheduler] = processes_of(own_service.data_dir, "-m openrl.scheduler")
        scheduler.terminate()

    run = wire.new_run(http, model=MODEL)
    losses = train(http, run, 1, 5)
    [before], [old] = cluster.workloads(), workers(own_service.data_dir)
    assert before.version == "0.0.1"
    upgrade()
    deadline = time.monotonic() + 60
    while old.is_running() and time.monotonic() < deadline:
        losses += train(http, run, len(losses) + 1, len(losses) + 1)
    losses += train(http, run, len(losses) + 1, len(losses) + 5)
    [after], [fresh] = cluster.workloads(), workers(own_service.data_dir)
    assert (after.version, after.generation) == (now, 1)
    assert fresh.pid != old.pid and not old.is_running()
    # No step was lost, and none done twice.
    assert losses == train(http, wire.new_run(http, model=MODEL), 1, len(losses))
    assert own_service.stop() == 0


def up(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "openrl.tasks.cli", "up", *options], capture_output=True, text=True, timeout=60
    )


def refused(result: subprocess.CompletedProcess[str], *words: str) -> None:
    assert result.returncode == 2, result
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and all(word in lines[0] for word in words), result.stderr


def test_what_cannot_work_is_refused_in_one_line(service: Service, tmp_path: Path) -> None:
    served = f"{MODEL}={service.model_dir}"
    refused(up("--data-dir", str(tmp_path / "a"), "--model", served, "--port", str(service.port)), str(service.port))
    refused(up("--data-dir", str(service.data_dir), "--model", served, "--port", "0"), str(service.data_dir))
    refused(up("--data-dir", str(tmp_path / "b"), "--model", "nobody/knows", "--port", "0"), "nobody/knows")
    refused(up("--data-dir", str(tmp_path / "c"), "--model", served, "--host", "0.0.0.0", "--port", "0"), "keys")
    assert httpx.get(f"{service.base_url}/api/v1/healthz").status_code == 200


def test_a_key_locks_everybody_else_out_and_tenants_are_apart(own_service: Service) -> None:
    own_service.start()
    open_http = own_service.http()
    open_run = wire.new_run(open_http, model=MODEL)
    keys = {}
    for tenant in ("red", "blue"):
        made = subprocess.run(
            [
                sys.executable, "-m", "openrl.tasks.cli", "keys", "create", "--tenant", tenant, "--json",
                "--data-dir", str(own_service.data_dir),
            ],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        start = made.stdout.index("tml-")
        keys[tenant] = made.stdout[start:].split('"')[0].split()[0]
    deadline = time.monotonic() + 60  # the API remembers for a second that there was no key
    while open_http.get("/sessions").status_code == 200 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert open_http.get("/sessions").status_code == 401
    assert own_service.http(headers={"X-API-Key": "tml-wrong"}).get("/sessions").status_code == 401
    red, blue = (own_service.http(headers={"X-API-Key": keys[tenant]}) for tenant in ("red", "blue"))
    run = wire.new_run(red, model=MODEL)
    for foreign in (run, open_run):
        assert blue.post("/get_info", json={"model_id": foreign}).status_code == 404
        assert blue.post("/retrieve_future", json={"request_id": f"{foreign}:0"}).status_code == 404
        assert wire.forward_backward(blue, foreign, 1, TOKENS).status_code == 404
        assert blue.get(f"/training_runs/{foreign}").status_code == 404
    wire.forward_backward(red, run, 1, TOKENS).raise_for_status()
    assert wire.poll(red, f"{run}:1").json()["metrics"]["loss:sum"] > 0
    with tinker.ServiceClient(api_key=keys["red"], base_url=own_service.base_url) as api:
        sampling = api.create_sampling_client(base_model=MODEL).result()
        assert sampling.sample(types.ModelInput.from_ints(TOKENS), 1, types.SamplingParams(max_tokens=2)).result()
    assert own_service.stop() == 0
