"""A process that takes turns until it is told to end; run as `python player.py URL OWNER DIRECTORY SEED ENGINE`.

Its state on the accelerator is a lock on the file `device`, which its engine process inherits: the kernel lets go of it
when the last of them is gone, and knows nothing of the scripts. Whoever finds it locked has met another's state, and
writes that down. ENGINE: none | child (in this session) | own (in a session of its own, named).
"""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import redis

from openrl.timeslice.seat import Seat
from openrl.timeslice.turn import Sharing, Turns

ENGINE = """
import socket, sys, time
with socket.socket(fileno=int(sys.argv[1])) as line:
    _, held, _, _ = socket.recv_fds(line, 1, 1)
    if not held:
        sys.exit()
    line.send(b"here")
while True:
    time.sleep(1)
"""


class Lock:
    """Something parkable: the lock is what lies on the accelerator."""

    def __init__(self, owner: str, directory: Path) -> None:
        self.owner, self.directory = owner, directory
        self.file: int | None = None
        self.seat: Seat | None = None
        self.engine: subprocess.Popen[bytes] | None = None
        self.kind = "none"

    @property
    def resident_bytes(self) -> int:
        return int(self.file is not None)

    def restore(self) -> None:
        self.file = os.open(self.directory / "device", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            note(self.directory / "violations", f"{self.owner} met another's state")
            raise
        if self.kind == "none":
            return
        ours, its = socket.socketpair()
        with ours, its:
            self.engine = subprocess.Popen(
                [sys.executable, "-S", "-c", ENGINE, str(its.fileno())], pass_fds=(its.fileno(),),
                start_new_session=self.kind == "own",
            )  # fmt: skip
            its.close()
            if self.kind == "own":
                # First its name is in the store, then it gets something of the accelerator.
                self.seat.name_processes(self.engine.pid)
            socket.send_fds(ours, [b"x"], [self.file])
            ours.recv(4)

    def park(self) -> None:
        if self.engine is not None:
            self.engine.kill()
            self.engine.wait()
            self.engine = None
        os.close(self.file)
        self.file = None


def note(path: Path, line: str) -> None:
    """Append a line, whole or not at all."""
    with open(path, "a") as file:
        file.write(line + "\n")


def main() -> None:
    url, owner, directory, seed, kind = sys.argv[1:]
    draw, lock = random.Random(int(seed)), Lock(owner, Path(directory))
    lock.kind = kind
    ended = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    turns = Turns(redis.Redis.from_url(url), Sharing(floor_s=0.01))
    with Seat(turns, "gpu-0", owner, lock) as seat:
        lock.seat = seat
        while not ended:
            began = time.monotonic()
            with seat.turn() as turn:
                note(lock.directory / "turns", f"{owner} {turn.token} {time.monotonic() - began:.3f}")
                time.sleep(draw.uniform(0, 0.02))
            if draw.random() < 0.5:
                time.sleep(draw.uniform(0, 0.05))


if __name__ == "__main__":
    main()
