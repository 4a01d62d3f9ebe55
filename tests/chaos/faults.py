"""The faults that strike while clients work. Each is one function: it strikes, undoes what would stay, and returns.

What a fault returns, where it could not strike, says why. Nothing here looks at what became of the clients.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil

from openrl.tasks import boundaries
from tests.chaos.history import Progress
from tests.chaos.proxy import Proxy
from tests.chaos.service import LEASE_S, Service

REACH_S = 30.0
"""A boundary that nobody reaches in this time isn't on the way of these clients now."""
RIVAL_S = 25.0
"""A trainer that is stopped for 30 s is taken for hung and ended: its rival must have the runs before."""
BROKER = "openrl:celery:"


@dataclass(slots=True, kw_only=True)
class World:
    """What a fault may touch."""

    service: Service
    store_url: str
    boundaries: Path
    draw: random.Random
    progress: Progress
    proxy: Proxy | None = None
    disk: Path | None = None
    messages: dict[str, int] = field(default_factory=lambda: {"dropped": 0, "doubled": 0, "delayed": 0})
    rivals: int = 0


Fault = Callable[[World], str]


def kill(part: str, world: World) -> str:
    """SIGKILL a part of the service at a moment that nobody chose."""
    pid = world.service.pid(part)
    if pid is None:
        return f"there is no {part} now"
    if part == "api" and world.draw.random() < 0.5:  # a process that answers, in place of the one that watches over it
        pid = next((child.pid for child in psutil.Process(pid).children()), pid)
    time.sleep(world.draw.random() * 0.3)
    return _signal(pid, signal.SIGKILL)


def at_boundary(name: str, world: World, *, number: signal.Signals = signal.SIGKILL) -> str:
    """Let the next process that reaches a boundary end there."""
    passes = world.draw.randrange(3) if name not in _SELDOM else 0
    armed = boundaries.arm(world.boundaries, name, passes=passes, number=number)
    if name in _BY_SIGTERM:
        _signal(world.service.wait_for("trainer"), signal.SIGTERM)
    if name in _BY_TAKEOVER:
        _signal(world.service.wait_for("trainer"), signal.SIGKILL)
    deadline = time.monotonic() + REACH_S
    while armed.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    if armed.exists():
        armed.unlink(missing_ok=True)
        return "nobody came by"
    return ""


def both_workers(world: World) -> str:
    """Let the trainer end between a pass and its commit, and kill the sampler beside it: they start side by side."""
    return at_boundary("trainer.executed", world) or kill("sampler", world)


_BY_SIGTERM = ("trainer.handing_back", "trainer.handed_back")
_BY_TAKEOVER = ("trainer.restored", "trainer.repeated")
_SELDOM = ("weights.renamed", "weights.staged", "snapshot.written", "snapshot.registered", *_BY_SIGTERM, *_BY_TAKEOVER)


def pause(world: World, *, boundary: str = "") -> str:
    """Stop the trainer past its lease, let a rival take its runs over, and wake it in the midst of what it was at."""
    pid = world.service.wait_for("trainer")
    if boundary:
        if said := at_boundary(boundary, world, number=signal.SIGSTOP):
            return said
    elif said := _signal(pid, signal.SIGSTOP):
        return said
    stopped = time.monotonic()
    world.rivals += 1
    rival = world.service.worker("trainer", f"rival-{world.rivals}")
    try:
        time.sleep(LEASE_S * 1.5)
        taken = world.progress.all_since(time.monotonic(), timeout_s=stopped + RIVAL_S - time.monotonic())
        _signal(pid, signal.SIGCONT)
        time.sleep(world.draw.random())
    finally:
        _signal(pid, signal.SIGCONT)
        rival.send_signal(world.draw.choice((signal.SIGTERM, signal.SIGKILL)))
        try:
            rival.wait(15)
        except subprocess.TimeoutExpired:
            rival.kill()
            rival.wait(5)
    return "" if taken else "the rival had not taken over before the trainer woke"


def pause_briefly(part: str, world: World) -> str:
    """Stop a part for longer than a lease, and wake it; nobody takes its place meanwhile."""
    pid = world.service.pid(part)
    if pid is None:
        return f"there is no {part} now"
    if said := _signal(pid, signal.SIGSTOP):
        return said
    time.sleep(LEASE_S * 1.4)
    return _signal(pid, signal.SIGCONT)


def messages(world: World) -> str:
    """Take doorbells out of the broker's queues before a worker does: drop some, double some, return some late."""
    store = world.service.store(world.store_url)
    late = []
    before = sum(world.messages.values())
    until = time.monotonic() + 2.0
    try:
        queues = [key for key in store.redis.keys(f"{BROKER}*") if store.redis.type(key) == b"list"]
        slugs = {key.split(b":")[-1] for key in store.redis.keys("openrl:queues:*")}
        for kind in ("train", "sample"):
            queues += [f"{BROKER}{kind}.{slug.decode()}.local".encode() for slug in slugs]
        while time.monotonic() < until:
            caught = store.redis.brpop(list(dict.fromkeys(queues)), timeout=0.2)
            if caught is None:
                continue
            what = world.draw.choice(("dropped", "doubled", "delayed"))
            world.messages[what] += 1
            if what != "dropped":
                late.append((caught, 2 if what == "doubled" else 1))
        for (queue, message), times in late:
            store.redis.lpush(queue, *[message] * times)
    finally:
        store.close()
    return "" if sum(world.messages.values()) > before else "no message passed"


def fill_disk(world: World) -> str:
    """Leave no byte on the disk of the data directory for some seconds."""
    assert world.disk is not None, "the campaign leaves this out where there is no small disk"
    ballast = world.disk / "ballast"
    try:
        with ballast.open("wb") as file:
            _fill(file.fileno())
            file.flush()
            time.sleep(2.5)
    finally:
        ballast.unlink(missing_ok=True)
    return ""


def cut(world: World) -> str:
    """Break every connection to the store."""
    return _net(world, lambda proxy: proxy.cut())


def half_close(world: World) -> str:
    """End the store's side of every connection."""
    return _net(world, lambda proxy: proxy.half_close())


def delay(world: World) -> str:
    """Let everything to and from the store take 0.3 s for a while."""

    def strike(proxy: Proxy) -> None:
        proxy.delay(0.3)
        time.sleep(3.0)
        proxy.delay(0.0)

    return _net(world, strike)


def refuse(world: World) -> str:
    """Cut every connection to the store and let none be made for longer than a lease."""

    def strike(proxy: Proxy) -> None:
        proxy.refuse(True)
        proxy.cut()
        time.sleep(LEASE_S * 1.3)
        proxy.refuse(False)

    return _net(world, strike)


def _net(world: World, strike: Callable[[Proxy], object]) -> str:
    if world.proxy is None:
        return "no proxy before this store"
    strike(world.proxy)
    return ""


def _kills(*parts: str) -> dict[str, Fault]:
    return {f"kill {part}": partial(kill, part) for part in parts}


def _boundaries(*names: str) -> dict[str, Fault]:
    return {f"kill at {name}": partial(at_boundary, name) for name in names}


ON_THE_WAY = tuple(name for name in boundaries.NAMES if not name.startswith("scheduler."))
"""The boundaries that clients lead a process to; the scheduler's are armed before the first worker starts."""

EMBEDDED: dict[str, Fault] = {
    **_kills("trainer", "sampler", "api", "scheduler", "store"),
    **_boundaries(*ON_THE_WAY),
    "pause trainer, take-over, wake": pause,
    "pause inside a save, take-over, wake": partial(pause, boundary="weights.renamed"),
    "pause sampler": partial(pause_briefly, "sampler"),
    "messages": messages,
    "fill disk": fill_disk,
}
"""What strikes a service with its own store."""

PROXIED: dict[str, Fault] = {
    "cut connections": cut,
    "half-close connections": half_close,
    "delay connections": delay,
    "refuse connections": refuse,
    **_kills("trainer", "sampler", "api", "scheduler"),
    "pause trainer": partial(pause_briefly, "trainer"),
    "messages": messages,
}
"""What strikes a service whose store is behind a proxy."""

SHORT: dict[str, Fault] = {
    **_kills("api", "store", "scheduler"),
    "kill at trainer.executed, and the sampler": both_workers,
    "messages": messages,
}
"""What strikes in `make test`."""


def _signal(pid: int, number: signal.Signals) -> str:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return ""
    return "it had ended by itself"


def _fill(descriptor: int) -> None:
    for piece in (1 << 20, 1 << 12, 1):
        with suppress(OSError):
            while True:
                if os.write(descriptor, bytes(piece)) < piece:
                    break


def room_for_disk(directory: Path, *, size_mb: int) -> str:
    """Mount a small disk of its own there; return why not, where that can't be done."""
    directory.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=700", "tmpfs", str(directory)],
        capture_output=True, text=True, check=False,
    ) if os.geteuid() == 0 else None  # fmt: skip
    if done is None:
        return f"a small disk can't be mounted: {os.strerror(errno.EPERM)}"
    return "" if done.returncode == 0 else f"a small disk can't be mounted: {done.stderr.strip()}"


def drop_disk(directory: Path) -> None:
    """Unmount what `room_for_disk` has mounted."""
    subprocess.run(["umount", "--lazy", str(directory)], check=False, capture_output=True)
