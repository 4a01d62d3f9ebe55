"""The disk under a service fills up, all the way, and is emptied again: nothing acknowledged is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.stack import wire
from tests.stack.conftest import MODEL, Service
from tests.stack.test_faults import until

pytestmark = [pytest.mark.timeout(180), pytest.mark.full]

TOKENS = list(b"waltz, bad nymph, for quick jigs vex")
DISK_MIB = 24


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of a few MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m,mode=0700", "tmpfs", str(mounted)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip(f"needs a small disk of its own, which root alone can mount: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", "--lazy", str(mounted)], check=True)


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
            assert wire.poll(http, f"{run}:{seq}").json() == wire.poll(http, f"{twin}:{seq}").json()
        assert service.stop() == 0
    finally:
        service.close()


def is_down(http: httpx.Client) -> bool:
    """Tell whether the store doesn't answer: an answer that needs it is 503."""
    return http.get("/sessions").status_code == 503


def store_log(service: Service) -> str:
    path = service.data_dir / "logs" / "store.log"
    return path.read_text(errors="replace") if path.exists() else ""
