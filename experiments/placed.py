"""The service with its workers placed by hand: store, API, and each worker where the caller says.

`openrl up` has a scheduler that decides which workers run and where; an experiment about places must decide that.
Everything else is as there: the same processes with the same settings, and the unmodified SDK as the client.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tinker

from openrl.scheduler import models as base_models
from openrl.tasks import datadir, embedded, keys, upgrade
from openrl.tasks.ownership import new_epoch
from openrl.tasks.process import PARENT_PID
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.timeslice.turn import Turns

START_S, STOP_S = 60.0, 15.0


@dataclass
class Placed:
    """A service that runs. `accelerator_bytes`: how much each simulated accelerator holds."""

    data_dir: Path
    env: dict[str, str]
    accelerator_bytes: int
    store: Store
    workers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def base_url(self) -> str:
        """Where the API is."""
        return f"http://127.0.0.1:{self.env['OPENRL_PORT']}"

    @property
    def turns(self) -> Turns:
        """The turns of its accelerators."""
        return Turns(self.store.redis)

    def client(self) -> tinker.ServiceClient:
        """Return a client of the service."""
        return tinker.ServiceClient(base_url=self.base_url, api_key="tml-local")

    def start(self, kind: str, base: str, *, accelerator: str = "", pool: str = "", name: str = "") -> str:
        """Start a worker on an accelerator, "" for one that is its own; return its name."""
        name = name or f"{kind}-{pool or keys.slug(base)}"
        turns = {"OPENRL_ACCELERATOR": accelerator, "OPENRL_ACCELERATOR_BYTES": str(self.accelerator_bytes)}
        argv = [sys.executable, "-m", f"openrl.workers.{kind}", "--base", base, "--name", name]
        argv += ["--pool", pool] if pool else []
        self.workers[name] = self._run(argv, turns if accelerator else {}, name)
        return name

    def log(self, name: str) -> str:
        """Return what a worker has said so far."""
        return (self.data_dir / f"{name}.log").read_text()

    def stop(self, name: str) -> None:
        """End a worker as `openrl up` does."""
        process = self.workers.pop(name)
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _run(self, argv: list[str], env: Mapping[str, str], name: str) -> subprocess.Popen[bytes]:
        with (self.data_dir / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                argv,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env={**self.env, **env, PARENT_PID: str(os.getpid())},
                start_new_session=True,
            )


@contextmanager
def placed(
    models: Mapping[str, Path],
    data_dir: Path,
    *,
    accelerator_bytes: int,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Placed]:
    """Run a service of these base models, without any worker yet, in a new directory."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENRL_", "TINKER_"))}
    env = {
        **kept,
        "OPENRL_REDIS_URL": embedded.url(data_dir),
        "OPENRL_DATA_DIR": str(data_dir),
        "OPENRL_HOST": "127.0.0.1",
        "OPENRL_PORT": str(_free_port()),
        "OPENRL_API_WORKERS": "1",
        "OPENRL_TORCH_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **(settings or {}),
    }
    store = Store.connect(StoreSettings.from_env(env))
    service = Placed(data_dir, env, accelerator_bytes, store)
    parts: list[subprocess.Popen[bytes]] = []
    try:
        with datadir.hold(data_dir):
            parts.append(service._run(list(embedded.command(data_dir)), {}, "store"))
            _wait(lambda: embedded.answers(data_dir), "the store")
            upgrade.upgrade(store, alone=True)
            new_epoch(store, 0)
            for model in base_models.resolve([f"{name}={path}" for name, path in models.items()]):
                Registry(store).add_model(model)
            parts.append(service._run([sys.executable, "-m", "openrl.app"], {}, "api"))
            _wait(lambda: _healthy(service.base_url), "the API")
            yield service
    finally:
        for name in list(service.workers):
            service.stop(name)
        store.close()
        for part in reversed(parts):
            part.terminate()
            part.wait(STOP_S)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _wait(ready: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + START_S
    while not ready():
        if time.monotonic() > until:
            raise TimeoutError(f"{what} did not come up within {START_S:g} s")
        time.sleep(0.05)


def _healthy(base_url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{base_url}/api/v1/healthz", timeout=2) as answer:  # noqa: S310  # our own
            return bool(answer.status == 200)
    except OSError:
        return False
