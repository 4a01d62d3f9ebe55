"""How `data.tar.xz` and `facts.json` were made: by the service of commit 71b8af7, which wrote data of schema 1.

    git archive 71b8af7 | tar -x -C OLD
    PYTHONPATH=OLD/.typing python tests/data/schema_1/make.py OLD tests/data/schema_1

Two tenants with keys. Of ada's two runs, which do the same, one did everything. The workers were stopped when the
other was half way: the rest was acknowledged (one body in a file, since it was large) and has not taken effect; nor
has a sample. Of bob's run the first operation is missing and the second waits for it. Then everything was killed.
`facts.json` says what the run that did everything has seen.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from exact import fill
from said import MODEL, creation, sample, steps

PORT = 18499
ENV = {
    "OPENRL_TORCH_THREADS": "1", "OPENRL_API_WORKERS": "1", "OPENRL_INLINE_BYTES": "2000",
    "OPENRL_TRAINER_SNAPSHOT_OPERATIONS": "5",
}  # fmt: skip


class Client:
    def __init__(self, key: str) -> None:
        address = f"http://127.0.0.1:{PORT}/api/v1"
        self.http = httpx.Client(base_url=address, timeout=60, headers={"X-API-Key": key})

    def post(self, route: str, content: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(f"/{route}", json=content)
        answer.raise_for_status()
        return dict(answer.json())

    def run(self, number: int, session: str) -> str:
        return str(self.wait(self.post("create_model", creation(session, number))["request_id"])["model_id"])

    def wait(self, request_id: str) -> dict[str, Any]:
        while (answer := self.http.post("/retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        answer.raise_for_status()
        return dict(answer.json())


def make(old: Path, work: Path) -> dict[str, Any]:
    model, data = work / "model", work / "data"
    sys.path.append(str(Path(__file__).parents[2]))
    importlib.import_module("tiny").make_tiny_model(model)
    (model / "model.safetensors").unlink()
    fill(model)
    openrl = [sys.executable, "-m", "openrl.tasks.cli"]
    secrets = [
        subprocess.check_output([*openrl, "keys", "create", "--tenant", who, "--data-dir", str(data)], text=True)
        for who in ("ada", "bob")
    ]
    up = subprocess.Popen(
        [*openrl, "up", "--port", str(PORT), "--data-dir", str(data), "--model", f"{MODEL}={model}",
         "--accelerators", "0"], env={**os.environ, **ENV},
    )  # fmt: skip
    ada, bob = (Client(secret.strip()) for secret in secrets)
    while not healthy(ada):
        time.sleep(0.1)
    session = ada.post("create_session", {"tags": ["old"], "user_metadata": {"exp": "before"}})["session_id"]
    half, whole = ada.run(0, session), ada.run(1, session)
    results = [ada.wait(ada.post(route, content)["request_id"]) for route, content in steps(whole)]
    for route, content in steps(half)[:8]:
        ada.wait(ada.post(route, content)["request_id"])
    sampler = f"{session}:sample:1"
    drawn = ada.wait(ada.post("asample", sample(sampler, 0))["request_id"])
    gap_session = bob.post("create_session", {})["session_id"]
    gap = bob.run(0, gap_session)
    processes = json.loads((data / "processes.json").read_text())
    pids = {process["name"].partition("-")[0]: process["pid"] for process in processes}
    for who in ("trainer", "sampler"):
        os.kill(pids[who], signal.SIGSTOP)
    for route, content in steps(half)[8:]:
        ada.post(route, content)
    ada.post("asample", sample(f"{session}:sample:0", 0))
    bob.post(*steps(gap)[1])
    time.sleep(1.0)
    for who in ("trainer", "sampler", "api", "scheduler", "store"):
        os.kill(pids[who], signal.SIGKILL)
    up.kill()
    up.wait()
    assert list((data / "spool").rglob("*")), "one body is large"
    return {
        "keys": {"ada": secrets[0].strip(), "bob": secrets[1].strip()}, "session": session, "half": half,
        "whole": whole, "gap": gap, "results": [brief(result) for result in results],
        "logprobs": results[-1]["loss_fn_outputs"][0]["logprobs"]["data"], "drawn": drawn,
    }  # fmt: skip


def brief(result: dict[str, Any]) -> dict[str, Any]:
    """Leave out the log-probabilities of each token."""
    return {name: value for name, value in result.items() if not name.startswith("loss_fn")}


def healthy(client: Client) -> bool:
    try:
        return client.http.get("/healthz").status_code == 200
    except httpx.TransportError:
        return False


def pack(work: Path, to: Path) -> None:
    for passing in ("logs", "scheduler", "service.json", "processes.json", "openrl.lock"):
        path = work / "data" / passing
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (work / "model" / "model.safetensors").unlink()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:xz", preset=9) as archive:
        for name in ("data", "model"):
            archive.add(work / name, arcname=name, filter=_nobodys)
    (to / "data.tar.xz").write_bytes(packed.getvalue())


def _nobodys(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def main(old: Path, to: Path) -> None:
    import openrl.tasks.store

    assert Path(openrl.tasks.store.__file__).resolve().is_relative_to(old.resolve()), "PYTHONPATH=OLD/.typing"
    with tempfile.TemporaryDirectory() as work:
        facts = make(old, Path(work))
        pack(Path(work), to)
    (to / "facts.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
