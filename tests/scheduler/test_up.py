"""`openrl up`: what can't work is refused in one line, exit status 2, and nothing is left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from openrl.scheduler import cli, engines, preflight, report, supervisor, up
from openrl.scheduler.settings import UpSettings
from openrl.scheduler.supervisor import PROCESSES
from openrl.tasks import datadir, embedded
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.trainer.settings import TrainerSettings

CONFIG = {
    "model_type": "llama",
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
}


@pytest.fixture
def model(tmp_path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return directory


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OPENRL_")]:
        monkeypatch.delenv(name)


def refused(*arguments: object) -> str:
    """Run `openrl up` and return the one line that it refused with."""
    result = CliRunner().invoke(cli.up, [str(argument) for argument in arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    assert line.startswith("openrl: ")
    return line


def test_without_a_model_the_line_says_how_to_get_one(tmp_path):
    line = refused("--data-dir", tmp_path / "data", "--port", 0)
    assert "--model" in line and "openrl model --help" in line
    assert not (tmp_path / "data").exists()


def test_an_unknown_model_is_named(tmp_path):
    assert "no directory" in refused("--data-dir", tmp_path / "data", "--model", f"x={tmp_path}/nowhere", "--port", 0)
    assert not (tmp_path / "data").exists()


def test_models_can_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRL_MODELS", f"a={tmp_path}/nowhere, b={tmp_path}/nowhere")
    assert "--model a=" in refused("--data-dir", tmp_path / "data", "--port", 0)


def test_a_port_in_use_is_named(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", port)
    assert f"127.0.0.1 port {port}" in line
    assert not (tmp_path / "data").exists()


def test_what_is_cheap_is_checked_before_a_model_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    unknown = ["--model", "nobody/knows"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused("--data-dir", tmp_path / "data", *unknown, "--port", port)
    (tmp_path / "file").touch()
    assert "cannot use --data-dir" in refused("--data-dir", tmp_path / "file" / "data", *unknown, "--port", 0)
    assert "no API key" in refused("--data-dir", tmp_path / "data", *unknown, "--port", 0, "--host", "0.0.0.0")


def test_a_directory_that_others_can_enter_is_refused(tmp_path, model):
    (tmp_path / "data").mkdir(mode=0o755)
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0)
    assert f"chmod 700 {tmp_path}/data" in line
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize("text", ["", "\0\0\0", "seven"])
def test_an_epoch_that_a_power_cut_damaged_is_refused_with_what_to_do(tmp_path, model, text):
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "epoch").write_text(text)
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0)
    assert f"{tmp_path}/data/epoch is damaged" in line and "remove that file" in line


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OPENRL_LEASE_S", "abc"),
        ("OPENRL_LEASE_S", "-1"),
        ("OPENRL_LEASE_S", "nan"),
        ("OPENRL_INLINE_BYTES", "inf"),
        ("OPENRL_LOG_LEVEL", "LOUD"),
        ("OPENRL_DOORBELL_THREADS", "0"),
        ("OPENRL_ORPHAN_AGE_S", "1"),
        ("OPENRL_POLL_MIN_S", "x"),
        ("OPENRL_MAX_BODY_BYTES", "0"),
        ("OPENRL_TRAINER_POLL_S", "0"),
        ("OPENRL_TORCH_THREADS", "many"),
        ("OPENRL_SAMPLER_KV_TOKENS", "3"),
    ],
)
def test_a_setting_of_any_part_that_makes_no_sense_is_refused_before_anything_exists(
    tmp_path, model, monkeypatch, name, value
):
    monkeypatch.setenv(name, value)
    assert name in refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("obstacle", ["openrl.lock", "processes.json", "epoch"])
def test_a_directory_in_which_something_is_in_the_way_is_named(tmp_path, model, obstacle):
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / obstacle).mkdir()
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0)
    assert f"cannot use --data-dir {tmp_path}/data: " in line


def test_a_directory_in_which_nothing_can_be_made_is_named_even_to_root(model):
    line = refused("--data-dir", "/proc/openrl", "--model", f"m={model}", "--port", 0)
    assert "cannot use --data-dir /proc/openrl: " in line


def test_a_port_that_is_taken_is_refused_to_whoever_comes_second():
    with preflight.listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(preflight.Refused, match=str(port)):
            preflight.listen("127.0.0.1", port)


def test_too_few_open_files_for_the_api_are_told_in_one_line_before_anything_starts(tmp_path, model):
    code = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (200, 200))\nfrom openrl.scheduler.cli import up; up()"
    command = [sys.executable, "-c", code, "--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", "0"]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    [line] = result.stderr.splitlines()
    assert "OPENRL_WORKER_CONNECTIONS" in line and "ulimit -Hn" in line
    assert not datadir.held(tmp_path / "data")


def failed(*arguments: object) -> str:
    """Run `openrl up` as a process of its own and return what it said when it failed."""
    code = "from openrl.scheduler.cli import up; up()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr.partition("did not come up")[0]
    return result.stderr


def test_a_part_that_refuses_its_settings_ends_the_service_and_is_named_with_its_reason(tmp_path):
    settings = UpSettings(host="127.0.0.1", port=0, data_dir=tmp_path, models=("m",))
    with preflight.listen("127.0.0.1", 0) as listener:
        service = up._Up(settings, [], listener, engines.Engine(name=engines.TORCH, python=sys.executable))
        reason = "OPENRL_THIS must be at least 1"
        code = f"import sys; sys.stderr.write('starting\\n{reason}\\n'); sys.exit({supervisor.REFUSED})"
        service._supervisor.start(supervisor.Program(name="api", argv=[sys.executable, "-c", code]))
        with pytest.raises(preflight.Refused, match=f"^the api refuses its settings: {reason}$"):
            service._wait("api", lambda: False, timeout_s=30)


def test_a_scheduler_that_does_not_come_up_is_noticed(tmp_path, model):
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    (data_dir / "scheduler").touch()
    said = failed("--data-dir", data_dir, "--model", f"m={model}", "--port", 0, "--api-workers", 1)
    assert "the scheduler did not come up" in said
    assert not datadir.held(data_dir)


def test_a_store_that_takes_nothing_once_it_is_in_use_is_a_failure_and_no_refusal(tmp_path, model, store):
    store.redis.config_set("min-replicas-to-write", 1)
    try:
        url = store.settings.redis_url
        said = failed("--data-dir", tmp_path / "other", "--model", f"m={model}", "--port", 0, "--redis-url", url)
    finally:
        store.redis.config_set("min-replicas-to-write", 0)
    assert "the store does not do its part" in said


def test_workers_have_their_own_stop_time_within_the_bound_whatever_the_api_takes():
    together, store = up.stop_stages({"api", "scheduler", "trainer-m", "sampler-m", "store"})
    assert together[0] == {"api", "scheduler", "trainer-m", "sampler-m"} and store[0] == {"store"}
    own_s = max(TrainerSettings().stop_s, SamplerSettings().stop_s)
    assert own_s < together[1] < store[1] < 15


def test_a_second_service_on_the_same_directory_is_refused(tmp_path, model):
    with datadir.hold(tmp_path / "data"):
        line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0)
    assert "is in use by" in line


def test_another_address_without_keys_is_refused_before_anything_exists(tmp_path, model):
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0, "--host", "0.0.0.0")
    assert "openrl keys create" in line
    assert not (tmp_path / "data").exists()


def test_another_address_without_keys_is_refused_on_a_directory_that_has_a_store(tmp_path, model):
    data_dir = tmp_path / "data"
    with embedded.running(data_dir):
        pass
    arguments = ["--data-dir", data_dir, "--model", f"m={model}", "--port", "0", "--host", "0.0.0.0"]
    code = "from openrl.scheduler.cli import up; up()"
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2
    [line] = result.stderr.splitlines()
    assert "there is no API key" in line
    assert not datadir.held(data_dir)
    assert not embedded.answers(data_dir)
    embedded.tidy(data_dir)


def test_a_store_that_does_not_answer_is_refused_without_its_address(tmp_path, model):
    line = refused(
        "--data-dir",
        tmp_path / "data",
        "--model",
        f"m={model}",
        "--port",
        0,
        "--redis-url",
        f"unix://{tmp_path}/secret",
    )
    assert "doesn't answer" in line and "secret" not in line
    assert not (tmp_path / "data").exists()


def test_a_leftover_that_still_holds_the_port_is_ended_first(tmp_path, model):
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(600)"
    )
    leftover = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    port = leftover.stdout.readline().strip()
    row = {"pid": leftover.pid, "start_time": psutil.Process(leftover.pid).create_time(), "name": "api"}
    (data_dir / PROCESSES).write_text(json.dumps([row]))
    result = CliRunner().invoke(
        cli.up,
        [
            "--data-dir",
            str(data_dir),
            "--model",
            f"m={model}",
            "--port",
            port,
            "--redis-url",
            f"unix://{tmp_path}/none",
        ],
    )
    leftover.wait(timeout=60)
    leftover.stdout.close()
    said, refusal = result.stderr.splitlines()
    assert "ending api" in said
    assert "doesn't answer" in refusal


def test_a_store_of_an_unknown_kind_is_refused(tmp_path, model):
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0, "--redis-url", "http://x")
    assert "redis://" in line


def test_more_accelerators_than_there_are_is_refused(tmp_path, model, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", 0, "--accelerators", 2)
    assert "--accelerators 2: found 1" in line


def test_where_there_are_no_devices_accelerators_are_simulated():
    assert cli.chosen_devices(2, ()) == ("", "")
    assert (cli.chosen_devices(None, ()), cli.chosen_devices(0, ("0",))) == ((), ())
    assert cli.chosen_devices(1, ("3", "5")) == ("3",)


def test_a_directory_that_cannot_be_made_is_named(tmp_path, model):
    (tmp_path / "file").touch()
    line = refused("--data-dir", tmp_path / "file" / "data", "--model", f"m={model}", "--port", 0)
    assert f"cannot use --data-dir {tmp_path}/file/data" in line


@pytest.mark.parametrize("command", [cli.env, cli.flower, cli.celery_command])
def test_a_command_without_a_running_service_says_so(command, tmp_path):
    result = CliRunner().invoke(command, ["--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "no service runs on" in result.stderr


def test_celery_asks_the_service_that_the_environment_names_where_none_runs_on_the_directory(tmp_path):
    """As in a pod, where no `openrl up` has written down where its service is."""
    command = [sys.executable, "-m", "openrl.tasks.cli", "celery", "report"]
    named = {"OPENRL_REDIS_URL": "redis://:secret@store.example:6380/0", "OPENRL_DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(command, env=os.environ | named, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "broker_url: 'redis://:********@store.example:6380/0'" in done.stdout


def test_env_prints_what_another_shell_needs(tmp_path):
    with datadir.hold(tmp_path):
        service = datadir.Service(
            pid=1, redis_url="unix:///a b", broker_url="redis+socket:///a b", base_url="http://127.0.0.1:1", started=0.0
        )
        datadir.publish(tmp_path, service)
        result = CliRunner().invoke(cli.env, ["--data-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "export TINKER_BASE_URL=http://127.0.0.1:1",
        f"export OPENRL_DATA_DIR={tmp_path}",
        "export OPENRL_REDIS_URL='unix:///a b'",
        "export OPENRL_BROKER_URL='redis+socket:///a b'",
    ]


def test_a_priority_of_a_model_that_is_not_served_is_named(tmp_path, model, monkeypatch, capfd):
    monkeypatch.setenv("OPENRL_MODEL_PRIORITY", "m=3,n=4")
    settings = UpSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data", models=(f"m={model}",))
    with ExitStack() as held:
        up._prepare(settings, held)
    [said] = [line for line in capfd.readouterr().err.splitlines() if "OPENRL_MODEL_PRIORITY" in line]
    assert "'n'" in said and "'m'" not in said


def test_the_report_holds_the_lines_to_copy():
    service = report.Started(
        base_url="http://127.0.0.1:8000",
        data_dir=Path("/data"),
        store="embedded",
        models=(("Org/Tiny", Path("/m")),),
        accelerators=0,
        has_keys=False,
    )
    text = "\n".join(report.as_text(service))
    for wanted in (
        "export TINKER_BASE_URL=http://127.0.0.1:8000",
        "export TINKER_API_KEY=tml-local",
        "openrl flower --data-dir /data",
    ):
        assert wanted in text
    assert json.loads(report.as_json(service))["models"] == [{"name": "Org/Tiny", "path": "/m"}]
