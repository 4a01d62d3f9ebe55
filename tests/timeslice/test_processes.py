"""Real processes take turns while they are killed, stopped and started again; the kernel's own lock is the monitor."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import redis

from openrl.timeslice.turn import Turns

PLAYER = Path(__file__).with_name("player.py")
KINDS = ("none", "child", "own")


class Field:
    """Some owners, each with a process, and what happens to them."""

    def __init__(self, url: str, directory: Path, seed: int, owners: int) -> None:
        self.url, self.directory, self.draw = url, directory, random.Random(seed)
        self.turns = Turns(redis.Redis.from_url(url))
        self.turns.redis.flushall()
        (directory / "violations").touch()
        (directory / "turns").touch()
        self.stopped: dict[str, float] = {}
        self.kills = self.stops = self.buried = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.orphans: list[int] = []
        for number in range(owners):
            self.start(f"owner-{number}")

    def start(self, owner: str) -> None:
        words = [self.url, owner, str(self.directory), str(self.draw.randrange(1 << 30)), self.draw.choice(KINDS)]
        self.processes[owner] = subprocess.Popen(
            [sys.executable, str(PLAYER), *words], start_new_session=True, stderr=subprocess.DEVNULL
        )

    def lines(self, name: str) -> list[str]:
        return (self.directory / name).read_text().splitlines()

    def kill(self, owner: str) -> None:
        """Kill the parent alone: an engine of its may still have the accelerator, and is killed a little later."""
        self.orphans += engines(self.processes[owner].pid)
        self.processes[owner].kill()
        self.processes[owner].wait()
        self.kills += 1
        self.stopped.pop(owner, None)
        self.start(owner)

    def step(self) -> None:
        """Let one thing happen, and the beat pass."""
        owner = self.draw.choice(list(self.processes))
        what = self.draw.random()
        if what < 0.12:
            self.kill(owner)
        elif what < 0.3 and len(self.stopped) < 2:
            os.kill(self.processes[owner].pid, signal.SIGSTOP)
            self.stopped[owner] = time.monotonic() + self.draw.uniform(0.05, 1.0)
            self.stops += 1
        for name, until in list(self.stopped.items()):
            if time.monotonic() > until:
                os.kill(self.processes[name].pid, signal.SIGCONT)
                del self.stopped[name]
        if self.orphans and self.draw.random() < 0.5:
            self.end_orphans()
        self.buried += self.turns.sweep("gpu-0")
        time.sleep(0.05)

    def end_orphans(self) -> None:
        for pid in self.orphans:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.orphans.clear()

    def everybody_is_served(self) -> bool:
        """Leave all in peace; each owner must have a turn."""
        for name in list(self.stopped):
            self.kill(name)
        self.end_orphans()
        seen, until = len(self.lines("turns")), time.monotonic() + 60
        while time.monotonic() < until:
            self.turns.sweep("gpu-0")
            if {line.split()[0] for line in self.lines("turns")[seen:]} >= set(self.processes):
                return True
            time.sleep(0.05)
        return False

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.end_orphans()


def engines(pid: int) -> list[int]:
    """Return the children of a process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def play(url: str, directory: Path, *, seconds: float, least: int, owners: int) -> Field:
    field = Field(url, directory, seed=8, owners=owners)
    try:
        assert field.everybody_is_served(), "before anything happened"
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(field.lines("turns")) < least:
            field.step()
        assert field.everybody_is_served(), "somebody was never served again"
    finally:
        field.close()
    assert field.lines("violations") == []
    tokens = [int(line.split()[1]) for line in field.lines("turns")]
    assert tokens == sorted(tokens)
    return field


def test_processes_that_are_killed_and_stopped_never_meet_on_the_accelerator(quick_url: str, tmp_path: Path):
    field = play(quick_url, tmp_path, seconds=0.5, least=6, owners=2)
    assert field.kills + field.stops > 0


@pytest.mark.full
def test_hundreds_of_turns_of_killed_and_stopped_processes_never_meet(quick_url: str, tmp_path: Path):
    field = play(quick_url, tmp_path, seconds=45, least=500, owners=5)
    assert field.kills > 20 and field.stops > 20 and field.buried > 5
