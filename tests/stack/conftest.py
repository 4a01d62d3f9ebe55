"""The whole service, started by `openrl up` as a user would, on a tiny model that loads in a second."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

MODEL = "tiny/llama"
START_S = 90.0


def _tiny() -> Any:
    path = Path(__file__).parent.parent / "tiny.py"
    spec = importlib.util.spec_from_file_location("openrl_tests_tiny", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama at a relative path that equals its served name, as the SDK's tokenizer lookup wants."""
    directory = tmp_path_factory.mktemp("models") / MODEL
    _tiny().make_tiny_model(directory)
    return directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Service:
    """One running `openrl up`."""

    data_dir: Path
    model_dir: Path
    model: str = MODEL
    port: int = field(default_factory=free_port)
    env: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    clients: list[httpx.Client] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Service:
        command = [
            sys.executable, "-m", "openrl.tasks.cli", "up", "--port", str(self.port), "--data-dir", str(self.data_dir),
            "--model", f"{self.model}={self.model_dir}", "--accelerators", "0", "--json", *self.options,
        ]  # fmt: skip
        environment = {**os.environ, "OPENRL_TORCH_THREADS": "1", "OPENRL_API_WORKERS": "1", **self.env}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.base_url}/api/v1/healthz", timeout=2).status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        self.stop()
        raise AssertionError(f"the service did not start; logs:\n{self.logs()}")

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = 60.0) -> int:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signum)
        return self.process.wait(timeout_s)

    def logs(self) -> str:
        parts = []
        for path in sorted((self.data_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-4000:]}")
        return "\n".join(parts)

    def http(self, **kwargs: Any) -> httpx.Client:
        self.clients.append(httpx.Client(base_url=f"{self.base_url}/api/v1", timeout=60, **kwargs))
        return self.clients[-1]

    def close(self) -> None:
        """Close what a test left open; end the service if it still runs."""
        for client in self.clients:
            client.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)

    def redis_url(self) -> str:
        return str(json.loads((self.data_dir / "service.json").read_text())["redis_url"])


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Service]:
    """The service that the tests of this session share: none of them stops it."""
    running = Service(tmp_path_factory.mktemp("service"), model_dir).start()
    yield running
    status = running.stop()
    running.close()
    assert status == 0


@pytest.fixture
def own_service(tmp_path: Path, model_dir: Path) -> Iterator[Service]:
    """A service of one test's own, not yet started."""
    owned = Service(tmp_path / "data", model_dir)
    yield owned
    owned.close()


@pytest.fixture(scope="session")
def _imports_kept() -> None:
    """Spare the collector what was imported: it would go through all of torch after every test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _sdk_sockets_collected(_imports_kept: None) -> Iterator[None]:
    """The SDK leaves closed-over sockets to the collector: collect them here, where that is no error."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True)
def _models_beside_us(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK finds a tokenizer at a relative path that equals the model's name."""
    monkeypatch.chdir(model_dir.parent.parent)
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
