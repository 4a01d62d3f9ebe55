"""One `openrl up` under chaos: started, its processes found by the names of their parts, ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

LEASE_S = 3.0
START_S, STOP_S = 90.0, 20.0


class Service:
    """`openrl up` on a free port."""

    def __init__(
        self,
        data_dir: Path,
        model: str,
        model_dir: Path,
        *,
        env: Mapping[str, str] | None = None,
        redis_url: str = "",
        restart_max_s: float = 0.2,
    ) -> None:
        self.data_dir = data_dir
        self.model = model
        self.said: list[tuple[float, str]] = []
        self.redis_url = redis_url
        command = [
            sys.executable, "-m", "openrl.tasks.cli", "up", "--port", "0", "--data-dir", str(data_dir), "--json",
            "--model", f"{model}={model_dir}", "--accelerators", "0", "--restart-max", f"{restart_max_s:g}",
        ]  # fmt: skip
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENRL_", "TINKER_"))}
        self.env = {
            **kept, "PYTHONFAULTHANDLER": "1",
            "OPENRL_TORCH_THREADS": "1", "OPENRL_API_WORKERS": "1", "OPENRL_LEASE_S": f"{LEASE_S:g}",
            "OPENRL_VERSION_LAST": "1000", "OPENRL_DISK_RESERVE_BYTES": "4194304", **(env or {}),
        }  # fmt: skip
        if redis_url:
            self.env["OPENRL_REDIS_URL"] = redis_url
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env, start_new_session=True
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.base_url = self._await_start()

    @property
    def alive(self) -> bool:
        """Tell whether `openrl up` itself still runs."""
        return self._process.poll() is None

    def pid(self, part: str) -> int | None:
        """Return the process of a part (store, api, scheduler, trainer, sampler), None while it has none."""
        with suppress(FileNotFoundError, ValueError):
            for row in json.loads((self.data_dir / "processes.json").read_text()):
                if row["name"].startswith(part) and _runs(row["pid"]):
                    return int(row["pid"])
        return None

    def wait_for(self, part: str, *, timeout_s: float = 60.0) -> int:
        """Return the process of a part as soon as it has one."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (pid := self.pid(part)) is not None:
                return pid
            time.sleep(0.05)
        raise AssertionError(f"there is no {part}")

    def store(self, url: str = "") -> Store:
        """Connect to the service's store, past whatever lies between it and the service."""
        found = json.loads((self.data_dir / "service.json").read_text())["redis_url"]
        return Store.connect(StoreSettings(redis_url=url or found, data_dir=self.data_dir))

    def worker(self, kind: str, name: str) -> subprocess.Popen[bytes]:
        """Start one more worker, which nobody supervises."""
        found = json.loads((self.data_dir / "service.json").read_text())
        env = {
            **self.env, "OPENRL_REDIS_URL": found["redis_url"], "OPENRL_BROKER_URL": found["broker_url"],
            "OPENRL_DATA_DIR": str(self.data_dir),
        }  # fmt: skip
        with (self.data_dir / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"openrl.workers.{kind}", "--base", self.model, "--name", name],
                stdout=log, stderr=log, env=env, start_new_session=True,
            )  # fmt: skip

    def stop(self) -> int:
        """End the service; return its exit status."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._listener.join(5)
            for pipe in (self._process.stdout, self._process.stderr):
                if pipe is not None:
                    pipe.close()

    def crashes(self) -> list[str]:
        """Return what `openrl up` said of parts that ended by a signal that no fault sends, and how it ended itself."""
        lines = [line for _, line in self.said if "killed by SIG" in line and "SIGKILL" not in line]
        status = self._process.poll()
        return lines + ([f"`openrl up` ended with status {status}"] if status else [])

    def logs(self) -> str:
        """Return the end of every log."""
        parts = [line for _, line in self.said]
        for path in sorted((self.data_dir / "logs").glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}")
        return "\n".join(parts)

    def _await_start(self) -> str:
        assert self._process.stdout is not None
        report = self._process.stdout.readline()
        if not report:
            raise AssertionError(f"the service did not start: {self.logs()}")
        url: str = json.loads(report)["base_url"]
        httpx.get(f"{url}/api/v1/healthz", timeout=START_S).raise_for_status()
        return url

    def _listen(self) -> None:
        stream: Any = self._process.stderr
        with suppress(ValueError):
            for line in stream:
                self.said.append((time.monotonic(), line.rstrip()))


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
