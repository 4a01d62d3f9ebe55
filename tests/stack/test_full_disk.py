"""The disk under a service is full or read-only for a while: it is said, and nothing acknowledged is lost."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.stack import wire
from tests.stack.conftest import MODEL, Service
from tests.stack.test_faults import pid_of, until
from tests.trainer.bench import COSTS

pytestmark = [pytest.mark.timeout(180), pytest.mark.full]

TOKENS = list(b"waltz, bad nymph, for quick jigs vex")
DISK_MIB = 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few MiB."""
    with mounted(tmp_path / "disk", mib=DISK_MIB) as directory:
        yield directory


@contextmanager
def mounted(directory: Path, *, mib: int) -> Iterator[Path]:
    """Put a disk of its own there, until the end of the `with`."""
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    directory.mkdir(mode=0o700)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m,mode=0700", "tmpfs", str(directory)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"needs a small disk of its own, which root alone can mount: {made.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def remounted(disk: Path, how: str) -> bool:
    """Make the disk read-only (`ro`) or not (`rw`); False while a file on it is open for writing."""
    return (
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], capture_output=True, check=False).returncode == 0
    )


def outcome(http: httpx.Client, request_id: str) -> dict[str, Any]:
    """What an operation gave, without what its pass cost."""
    answer: dict[str, Any] = wire.poll(http, request_id).json()
    return answer | {"metrics": {name: value for name, value in answer["metrics"].items() if name not in COSTS}}


def read_only(disk: Path) -> None:
    """Let nothing more be written there."""
    until(lambda: remounted(disk, "ro"))


def writable(disk: Path) -> None:
    """Make room again, whatever took it."""
    assert remounted(disk, "rw")
    (disk / "filler").unlink(missing_ok=True)


def fill(disk: Path, *, but: int) -> None:
    """Leave so many bytes of the disk free."""
    found = os.statvfs(disk)
    with (disk / "filler").open("ab") as file:
        file.write(bytes(max(0, found.f_bavail * found.f_frsize - but)))


def test_a_full_disk_is_said_costs_nothing_acknowledged_and_service_resumes_when_there_is_room(
    disk: Path, model_dir: Path
) -> None:
    service = Service(disk / "data", model_dir)
    service.env = {"OPENRL_DISK_RESERVE_BYTES": str(4 << 20), "OPENRL_LEASE_S": "8"}
    try:
        http = service.start().http()
        run, twin = wire.new_run(http, model=MODEL), wire.new_run(http, model=MODEL)
        wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
        first = wire.poll(http, f"{run}:1").json()
        wire.forward_backward(http, run, 3, TOKENS).raise_for_status()  # waits, acknowledged, for number 2

        fill(disk, but=2 << 20)
        for refused in (wire.optim_step(http, run, 2, learning_rate=0.01), http.post("/create_session", json={})):
            assert refused.status_code == 503, refused.text
            assert "disk has" in refused.json()["error"]["message"] and "made room" in refused.json()["detail"]
            assert refused.headers["Retry-After"]
        assert wire.poll(http, f"{run}:1").json() == first  # what was accepted can still be had

        fill(disk, but=0)
        until(lambda: "store ended" in store_log(service) or is_down(http))
        (disk / "filler").unlink()
        until(lambda: not is_down(http) and wire.optim_step(http, run, 2, learning_rate=0.01).status_code == 200)
        assert wire.poll(http, f"{run}:1").json() == first
        for seq, step in ((1, False), (2, True), (3, False)):
            if step:
                wire.optim_step(http, twin, seq, learning_rate=0.01).raise_for_status()
            else:
                wire.forward_backward(http, twin, seq, TOKENS).raise_for_status()
        for seq in (2, 3):
            assert outcome(http, f"{run}:{seq}") == outcome(http, f"{twin}:{seq}")
        assert service.stop() == 0
    finally:
        service.close()


@pytest.mark.parametrize(
    ("refuse", "said"), [(lambda disk: fill(disk, but=0), "disk is full"), (read_only, "disk is read-only")]
)
def test_a_save_that_the_disk_refuses_fails_alone_and_leaves_its_run_unharmed(
    tmp_path: Path, model_dir: Path, refuse: Callable[[Path], None], said: str
) -> None:
    service = Service(tmp_path / "data", model_dir)
    service.env = {"OPENRL_TRAINER_SNAPSHOT_OPERATIONS": "2"}
    with mounted(service.data_dir / "tenants", mib=8) as disk:
        try:
            http = service.start().http()
            run = wire.new_run(http, model=MODEL)
            for seq in (1, 3):
                wire.forward_backward(http, run, seq, TOKENS).raise_for_status()
                wire.optim_step(http, run, seq + 1, learning_rate=0.01).raise_for_status()
            wire.poll(http, f"{run}:4")

            refuse(disk)
            for seq, target in ((5, {"path": "a"}), (6, {"sampling_session_seq_id": 0})):
                told = http.post("/save_weights_for_sampler", json={"model_id": run, "seq_id": seq, **target})
                answer = wire.poll(http, told.raise_for_status().json()["request_id"]).json()
                assert answer["category"] == "server", answer
                assert f"{said}; ask for it again when the operator has made room" in answer["error"]
            wire.forward_backward(http, run, 7, TOKENS).raise_for_status()
            wire.optim_step(
                http, run, 8, learning_rate=0.0
            ).raise_for_status()  # a recovery snapshot is refused as well
            assert "error" not in wire.poll(http, f"{run}:8").json()

            writable(disk)
            http.post("/save_weights", json={"model_id": run, "seq_id": 9, "path": "a"}).raise_for_status()
            assert wire.poll(http, f"{run}:9").json()["path"] == f"tinker://{run}/weights/a"
            wire.forward_backward(http, run, 10, TOKENS).raise_for_status()
            assert outcome(http, f"{run}:10") == outcome(http, f"{run}:7")
            assert service.stop() == 0
        finally:
            service.close()


def test_a_store_that_finds_its_disk_read_only_is_said_and_comes_back_with_everything(
    tmp_path: Path, model_dir: Path
) -> None:
    service = Service(tmp_path / "data", model_dir)
    with mounted(service.data_dir / "store", mib=DISK_MIB) as disk:
        try:
            http = service.start().http()
            run = wire.new_run(http, model=MODEL)
            wire.forward_backward(http, run, 1, TOKENS).raise_for_status()
            first = wire.poll(http, f"{run}:1").json()
            wire.forward_backward(http, run, 3, TOKENS).raise_for_status()  # waits, acknowledged, for number 2

            assert service.process is not None
            service.process.send_signal(signal.SIGSTOP)  # so that no store is started meanwhile
            os.kill(pid_of(service, "store") or 0, signal.SIGKILL)
            read_only(disk)
            service.process.send_signal(signal.SIGCONT)
            until(lambda: "Read-only file system" in store_log(service))
            refused = wire.optim_step(http, run, 2, learning_rate=0.01)
            assert refused.status_code == 503 and "the store does not answer" in refused.json()["detail"], refused.text

            writable(disk)
            until(lambda: wire.optim_step(http, run, 2, learning_rate=0.01).status_code == 200)
            assert wire.poll(http, f"{run}:1").json() == first
            assert all("error" not in wire.poll(http, f"{run}:{seq}").json() for seq in (2, 3))
            assert service.stop() == 0
        finally:
            service.close()


def is_down(http: httpx.Client) -> bool:
    """Tell whether the store doesn't answer: an answer that needs it is 503."""
    return http.get("/sessions").status_code == 503


def store_log(service: Service) -> str:
    path = service.data_dir / "logs" / "store.log"
    return path.read_text(errors="replace") if path.exists() else ""
