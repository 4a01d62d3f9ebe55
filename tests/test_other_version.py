"""Data of a newer version: every process refuses it by name at its start, with exit status 2, and changes nothing."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from openrl.scheduler import up
from openrl.scheduler.settings import UpSettings
from openrl.tasks import embedded, keys, upgrade
from openrl.tasks.errors import OtherVersion
from openrl.tasks.schema import DATA
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

NEWER = DATA + 1
KNOWN = f"has data of schema {NEWER}, and this version knows {DATA} at most: start the version that wrote it"


def everything(store: Store) -> dict[bytes, bytes]:
    return {name: store.redis.dump(name) for name in sorted(store.redis.scan_iter())}


@pytest.fixture
def told(store: Store) -> dict[str, str]:
    """What a process is told about a store that a newer version has used."""
    store.redis.set(keys.SCHEMA, NEWER)
    return {"OPENRL_REDIS_URL": store.settings.redis_url, "OPENRL_DATA_DIR": str(store.settings.data_dir)}


@pytest.mark.parametrize("module", ["app", "scheduler"])
def test_api_and_scheduler_leave_a_newer_store_as_it_is(store: Store, told: dict[str, str], module: str) -> None:
    before = everything(store)
    env = {**os.environ, **told, "OPENRL_PORT": "0", "OPENRL_API_WORKERS": "1"}
    command = [sys.executable, "-m", f"openrl.{module}"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2, ended.stderr
    assert f"openrl.{module}: the store {KNOWN}" in ended.stderr and "Traceback" not in ended.stderr
    assert everything(store) == before


@pytest.mark.parametrize("kind", ["trainer", "sampler"])
def test_a_worker_leaves_a_newer_store_as_it_is_before_it_loads_a_model(
    store: Store, told: dict[str, str], kind: str
) -> None:
    before = everything(store)
    main = importlib.import_module(f"openrl.workers.{kind}.__main__").main
    ended = CliRunner(env=told).invoke(main, ["--base", "tiny/base", "--name", "w"])
    assert (ended.exit_code, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"openrl.workers.{kind}: the store {KNOWN}")
    assert everything(store) == before


@pytest.fixture
def settings(tmp_path: Path) -> UpSettings:
    model = tmp_path / "model"
    model.mkdir()
    config = {"model_type": "llama", "vocab_size": 260, "max_position_embeddings": 512, "hidden_size": 64}
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return UpSettings(host="127.0.0.1", port=0, data_dir=tmp_path / "data", models=(f"m={model}",))


def test_a_service_does_not_start_on_a_newer_directory(settings: UpSettings) -> None:
    settings.data_dir.mkdir(mode=0o700)
    (settings.data_dir / upgrade.MARKER).write_text(json.dumps({"schema": NEWER}))
    with pytest.raises(OtherVersion, match=f"the data directory {settings.data_dir} {KNOWN}"):
        up.run(settings)
    assert [path.name for path in settings.data_dir.iterdir()] == [upgrade.MARKER]


def test_a_service_does_not_start_on_a_newer_store(settings: UpSettings) -> None:
    settings.data_dir.mkdir(mode=0o700)
    with embedded.running(settings.data_dir) as url:
        store = Store.connect(StoreSettings(redis_url=url, data_dir=settings.data_dir))
        store.redis.mset({keys.SCHEMA: NEWER, keys.EPOCH: 5})
        before = everything(store)
        store.close()
    code = "import sys; from openrl.scheduler.cli import up; up()"
    command = [sys.executable, "-c", code, "--data-dir", settings.data_dir, "--model", *settings.models, "--port", "0"]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (2, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"openrl: the store {KNOWN}")
    with embedded.running(settings.data_dir) as url:
        store = Store.connect(StoreSettings(redis_url=url, data_dir=settings.data_dir))
        assert everything(store) == before
        store.close()
