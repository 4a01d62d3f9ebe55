"""`openrl up`: what can't work is refused in one line, exit status 2, and nothing is left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from openrl.scheduler import cli, report
from openrl.scheduler.supervisor import PROCESSES
from openrl.scheduler.up import is_loopback
from openrl.tasks import datadir, embedded

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
    line = refused("--data-dir", tmp_path / "data")
    assert "--model" in line and "openrl model --help" in line
    assert not (tmp_path / "data").exists()


def test_an_unknown_model_is_named(tmp_path):
    assert "no directory" in refused("--data-dir", tmp_path / "data", "--model", f"x={tmp_path}/nowhere")
    assert not (tmp_path / "data").exists()


def test_models_can_come_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENRL_MODELS", f"a={tmp_path}/nowhere, b={tmp_path}/nowhere")
    assert "--model a=" in refused("--data-dir", tmp_path / "data")


def test_a_port_in_use_is_named(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = refused("--data-dir", tmp_path / "data", "--model", f"m={model}", "--port", port)
    assert f"127.0.0.1 port {port}" in line
    assert not (tmp_path / "data").exists()


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
    data_dir.mkdir()
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
    leftover.wait(timeout=5)
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


def test_a_directory_that_cannot_be_made_is_named(tmp_path, model):
    (tmp_path / "file").touch()
    line = refused("--data-dir", tmp_path / "file" / "data", "--model", f"m={model}", "--port", 0)
    assert f"cannot use --data-dir {tmp_path}/file/data" in line


@pytest.mark.parametrize("command", [cli.env, cli.flower, cli.celery_command])
def test_a_command_without_a_running_service_says_so(command, tmp_path):
    result = CliRunner().invoke(command, ["--data-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "no service runs on" in result.stderr


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


def test_loopback_is_told_from_the_rest():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "gpu-box")))


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
