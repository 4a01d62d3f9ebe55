"""A disk that takes nothing, or little: what is new is refused with what to do, and what was accepted is finished."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from openrl.app.context import EXTENSION
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A mounted disk of one MiB."""
    mounted = tmp_path / "small"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(mounted)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"needs a small disk of its own, which root alone can mount: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)


@pytest.fixture
def on(store: Store, app: Flask, small_disk: Path) -> Iterator[Callable[..., Api]]:
    """Make APIs whose files lie on the small disk."""
    made: list[Api] = []

    def make(**settings: int) -> Api:
        other = Store(store.redis, replace(store.settings, data_dir=small_disk, **settings))
        flask = create_app(AppSettings(poll_min_s=0.05, poll_max_s=0.1), store=other)
        made.append(Api(flask.test_client(), flask.extensions[EXTENSION]))
        return made[-1]

    yield make
    for each in made:
        each.services.close()


def is_refused(answer: TestResponse, *words: str) -> None:
    assert answer.status_code == 503, answer.text
    message = answer.get_json()["error"]["message"]
    assert all(word in message for word in words), message
    assert answer.get_json()["error"]["code"] == "disk_unavailable" and answer.headers["Retry-After"]


def test_a_disk_with_little_left_takes_in_nothing_and_finishes_what_it_has(
    on: Callable[..., Api], worker: Worker, small_disk: Path
) -> None:
    roomy, tight = on(disk_reserve_bytes=1), on(disk_reserve_bytes=2 << 20)
    run = roomy.run()
    roomy.ok(roomy.forward_backward(run, 1))
    for answer in (tight.forward_backward(run, 2), tight.optim_step(run, 2), tight.post("/create_session", {})):
        is_refused(answer, "the service's disk has", "OPENRL_DISK_RESERVE_BYTES", "made room")
    assert [operation.seq_id for operation in worker.step()] == [0, 1]
    tight.ok(tight.poll(f"{run}:1"))
    roomy.ok(roomy.optim_step(run, 2))


def test_a_body_for_which_there_is_no_room_uses_nothing_up_and_leaves_no_file(
    on: Callable[..., Api], small_disk: Path
) -> None:
    api = on(disk_reserve_bytes=0, inline_bytes=1)
    run = api.run()
    before = sorted((small_disk / "spool").rglob("*-*"))
    found = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(found.f_bavail * found.f_frsize))
    is_refused(api.forward_backward(run, 1), "the service's disk is full", "made room")
    assert sorted(path for path in (small_disk / "spool").rglob("*") if path.is_file()) == before
    assert api.poll(f"{run}:1").status_code == 404
    (small_disk / "filler").unlink()
    api.ok(api.forward_backward(run, 1))
    assert api.poll(f"{run}:1").status_code == 408


def test_a_read_only_disk_is_called_so(on: Callable[..., Api], small_disk: Path) -> None:
    api = on()
    run = on(disk_reserve_bytes=0).run()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    is_refused(api.forward_backward(run, 1), "the service's disk is read-only", "made room")
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
    again = on(disk_reserve_bytes=0)
    again.ok(again.forward_backward(run, 1))
