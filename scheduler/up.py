"""A whole service on this machine: the store, the API, the scheduler, and the workers that it wants.

Decides nothing about workers: it makes the processes so that the scheduler has written down. Everything
that can be refused is refused before anything is started, in one line.
"""

from __future__ import annotations

import errno
import http.client
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.metadata import entry_points
from pathlib import Path

from openrl.scheduler import engines, prepare, report
from openrl.scheduler import models as base_models
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.resources import Process, Workload
from openrl.scheduler.settings import SchedulerSettings, UpSettings
from openrl.scheduler.supervisor import PROCESSES, Program, Supervisor
from openrl.tasks import datadir, embedded, process, upgrade
from openrl.tasks.errors import OpenRLError, StoreFault, StoreUnavailable
from openrl.tasks.loopback import is_loopback
from openrl.tasks.registry import BaseModel
from openrl.tasks.schema import DATA
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from openrl.workers.model import settings as placing

SETTINGS = "openrl.settings"
"""The entry points of settings that a part of the service reads from its environment."""

API, SCHEDULER, STORE = "api", "scheduler", "store"

ANY_V4, ANY_V6 = str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))
"""Addresses that mean all of the machine's own."""

STOP_S, STORE_STOP_S = 12.0, 14.0
"""When, in seconds after the signal, what is left is killed: all but the store, then the store. Workers have their own
stop time from the first second on; nothing outlasts 15 s."""

IDLE_STOP_S = 120.0
"""How long a worker that is no longer wanted may take to hand back its runs."""

HUNG_STOP_S = 5.0
"""How long a worker that hangs may take to prove that it doesn't."""

API_TIMEOUT_S = SCHEDULER_TIMEOUT_S = 60.0
BACKLOG = 2048
LOOK_S = 0.1
WANTED_S = 0.5


class Refused(OpenRLError):
    """The service can't run as asked; nothing of it runs. Mend what the line names."""


class Failed(OpenRLError):
    """A part of the service didn't come up; everything was ended again."""


class _Asked(Exception):
    """A signal asked to leave during the start."""


def run(settings: UpSettings) -> None:
    """Run the service until SIGINT, SIGTERM or SIGHUP; everything that it started is gone on return.

    Raises:
        Refused, DirectoryInUse, InvalidRequest, StoreUnavailable: nothing was started, or all of it was ended again.
        Failed: a part of it didn't come up.
    """
    process.raise_open_files()
    with ExitStack() as held:
        try:
            prepared = _prepare(settings, held)
        except OSError as error:
            raise Refused(f"cannot use --data-dir {settings.data_dir}: {error.strerror or error}") from error
        prepared.run()


def _prepare(settings: UpSettings, held: ExitStack) -> _Up:
    """Refuse what can be refused, and return a service of which nothing is started yet; `held` keeps what it needs."""
    _check_settings(settings)
    _check_directory(settings.data_dir)
    engine = engines.choose(
        settings.sampler,
        settings.sampler_python,
        own_python=sys.executable,
        has_gpu=bool(settings.devices),
        full=os.environ.get(engines.FULL_ENGINE) == engines.VLLM,
    )
    _end_leftovers(settings)
    listener = held.enter_context(_listen(settings.host, settings.port))
    _check_store(settings)
    # Last, since it may fetch gigabytes.
    models = engines.as_served(base_models.resolve(settings.models), engine, os.environ)
    held.enter_context(datadir.hold(settings.data_dir))
    if not settings.redis_url:
        embedded.end_leftover(settings.data_dir)
    return _Up(settings, models, listener, engine)


def _check_settings(settings: UpSettings) -> None:
    """Refuse what any part of the service would refuse: each package names its settings as entry points."""
    environ = os.environ | _environment(settings, port=settings.port)
    parts = [entry.load() for entry in entry_points(group=SETTINGS)]
    for part in (StoreSettings, SchedulerSettings, placing.AcceleratorSettings, *parts):
        try:
            part.from_env(environ)
        except ValueError as nonsense:
            raise Refused(str(nonsense)) from nonsense


def _environment(settings: UpSettings, *, port: int) -> dict[str, str]:
    """Return what all parts of the service are told."""
    return {
        "OPENRL_REDIS_URL": settings.redis_url or embedded.url(settings.data_dir),
        "OPENRL_BROKER_URL": settings.broker_url,
        "OPENRL_DATA_DIR": str(settings.data_dir),
        "OPENRL_HOST": settings.host,
        "OPENRL_PORT": str(port),
        "OPENRL_API_WORKERS": str(settings.api_workers),
        "OPENRL_ACCELERATORS": str(len(settings.devices)),
        "OPENRL_SAMPLER_REPLICAS": str(settings.sampler_replicas),
        "OPENRL_IDLE_TIMEOUT_S": str(settings.idle_timeout_s),
    }


def _check_directory(data_dir: Path) -> None:
    """Refuse a directory that can't be used, or that would first have to be made where that can't be done."""
    datadir.check_private(data_dir)
    upgrade.check_directory(data_dir)
    prepare.lowest_epoch(data_dir)
    there = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def _end_leftovers(settings: UpSettings) -> None:
    """End what a killed service left behind: it may still listen on the port."""
    if datadir.held(settings.data_dir) or (settings.data_dir / PROCESSES).exists():
        with datadir.hold(settings.data_dir):
            _supervisor(settings).end_leftovers()


def _check_store(settings: UpSettings) -> None:
    if settings.redis_url:
        store = Store.connect(_store_settings(settings))
        if not store.ready():
            raise Refused(
                "the store given by --redis-url or OPENRL_REDIS_URL doesn't answer; leave it out for an embedded one"
            )
        _check_keys(settings, store)
        store.close()
        return
    embedded.binary()
    if not is_loopback(settings.host) and not (settings.data_dir / "store").is_dir():
        raise Refused(_without_keys(settings))


def _check_keys(settings: UpSettings, store: Store) -> None:
    if not is_loopback(settings.host) and not Tenants(store).any_keys():
        raise Refused(_without_keys(settings))


def _without_keys(settings: UpSettings) -> str:
    return (
        f"--host {settings.host} can be reached from other machines and there is no API key: run `openrl keys create "
        f"--tenant NAME --data-dir {settings.data_dir}` first, or use --host 127.0.0.1"
    )


def _listen(host: str, port: int) -> socket.socket:
    """Take the port for the whole life of the service: whoever comes second is refused, and no other can answer."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise Refused(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host"
        ) from error
    return listener


def _supervisor(settings: UpSettings) -> Supervisor:
    detail = report.line if settings.verbose else lambda text: None
    return Supervisor(settings.data_dir, say=report.line, detail=detail, longest_wait_s=settings.restart_max_s)


def _store_settings(settings: UpSettings) -> StoreSettings:
    return StoreSettings.from_env(os.environ | _environment(settings, port=settings.port))


class _Up:
    """One life of a service. Holds the data directory's lock from outside."""

    def __init__(
        self, settings: UpSettings, models: list[BaseModel], listener: socket.socket, engine: engines.Engine
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._models = models
        self._listener = listener
        self._port: int = listener.getsockname()[1]
        self._signals = 0
        self._workers: dict[str, Workload] = {}
        """What each worker was started for."""
        self._epoch_of: int | None = None
        self._epoch_trouble: int | None = None
        self._store = Store.connect(_store_settings(settings))
        self._redis_url = self._store.settings.redis_url
        self._supervisor = _supervisor(settings)

    def run(self) -> None:
        """Start everything, keep it running until asked to leave, end everything."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` has asked to ignore the terminal's end.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            self._start()
            self._keep_running()
        except _Asked:
            report.line("stopping")
        except (StoreUnavailable, StoreFault) as error:
            raise Failed(f"the store does not do its part: {error}") from error
        finally:
            self._end()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    # Starting

    def _start(self) -> None:
        try:
            self._start_store()
            self._register()
            self._start_services()
        except OSError as error:
            raise Failed(f"cannot use {error.filename or self._settings.data_dir}: {error.strerror}") from error
        report.started(self._report())

    def _start_store(self) -> None:
        if self._settings.redis_url:
            self._upgrade(alone=False)
            self._new_epoch()
            return
        data_dir = self._settings.data_dir
        self._supervisor.start(Program(name=STORE, argv=embedded.command(data_dir)))
        self._wait(STORE, lambda: embedded.answers(data_dir), timeout_s=embedded.START_TIMEOUT_S)
        self._upgrade(alone=True)
        self._mark_epoch()
        _check_keys(self._settings, self._store)

    def _upgrade(self, *, alone: bool) -> None:
        found = upgrade.upgrade(self._store, alone=alone)
        if found is not None:
            report.line(f"upgraded the data from schema {found} to {DATA}; an earlier version can't use it any more")

    def _register(self) -> None:
        prepare.check_weights(self._store, self._models)
        prepare.register(self._store, self._models)
        LocalCluster(self._store).clear()
        datadir.publish(
            self._settings.data_dir,
            datadir.Service(
                pid=os.getpid(),
                redis_url=self._redis_url,
                broker_url=self._broker_url,
                base_url=self._base_url,
                started=time.time(),
            ),
        )

    def _start_services(self) -> None:
        descriptor = self._listener.fileno()
        for name, module, env, files in (
            (API, "openrl.app", {"OPENRL_LISTEN_FD": str(descriptor)}, (descriptor,)),
            (SCHEDULER, "openrl.scheduler", self._engine.environ, ()),
        ):
            argv = [sys.executable, "-m", module]
            self._supervisor.start(Program(name=name, argv=argv, env={**self._environment(), **env}, files=files))
        self._wait(API, lambda: _healthy(self._base_url), timeout_s=API_TIMEOUT_S)
        self._wait(SCHEDULER, LocalCluster(self._store).is_watched, timeout_s=SCHEDULER_TIMEOUT_S)

    def _wait(self, name: str, ready: Callable[[], bool], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._signals:
                raise _Asked
            self._look()
            if self._supervisor.crashes(name) or time.monotonic() > deadline:
                raise Failed(report.failure(name, self._supervisor.log_path(name)))
            time.sleep(LOOK_S / 2)

    def _look(self) -> None:
        """Look after the processes once. One that refuses its settings would do so for ever: nothing goes on then."""
        self._supervisor.poll()
        for name in self._supervisor.refused():
            raise Refused(report.refusal(name, self._supervisor.log_path(name)))

    # Running

    def _keep_running(self) -> None:
        wanted = _Wanted(LocalCluster(self._store))
        wanted.start()
        while not self._signals:
            self._look()
            self._mark_epoch()
            if wanted.latest is not None:
                self._follow(wanted.latest)
            wanted.running = self._running()
            time.sleep(LOOK_S)
        wanted.stop()
        raise _Asked

    def _follow(self, workloads: tuple[Workload, ...]) -> None:
        """Run the processes that are wanted, and no others."""
        wanted = {workload.name: workload for workload in workloads}
        for name, started in sorted(self._workers.items()):
            if name not in wanted:
                self._let_go(name, "no longer wanted, stopping", grace_s=IDLE_STOP_S)
            elif wanted[name].generation == started.generation:
                continue
            elif wanted[name].version != started.version:
                self._let_go(name, f"makes place for version {wanted[name].version}", grace_s=IDLE_STOP_S)
            else:
                self._let_go(name, "gives no sign of life; ending it, a fresh one follows", grace_s=HUNG_STOP_S)
        for name in sorted(wanted.keys() - self._supervisor.names()):
            self._supervisor.start(self._worker(wanted[name]))
            if name in self._supervisor.names():
                self._workers[name] = wanted[name]
                report.line(f"{name}: starting, log {self._supervisor.log_path(name)}")

    def _let_go(self, name: str, why: str, *, grace_s: float) -> None:
        self._supervisor.stop(name, grace_s=grace_s)
        del self._workers[name]
        report.line(f"{name}: {why}")

    def _running(self) -> dict[str, Process]:
        """Return the processes of the workers, but those on their way out."""
        pids = {name: self._supervisor.pid(name) for name in self._workers}
        return {
            name: Process(pid=pid, generation=self._workers[name].generation, version=self._workers[name].version)
            for name, pid in pids.items() if pid is not None
        }  # fmt: skip

    def _worker(self, workload: Workload) -> Program:
        module = f"openrl.workers.{workload.kind}"
        # The same name after a crash: by taking the lease anew, the successor frees what the dead one owned at once.
        samples = workload.kind == "sampler" and (self._engine.full or not workload.pool.is_full)
        engine = self._engine if samples else engines.Engine(name=engines.TORCH, python=sys.executable)
        argv = [engine.python, "-m", module, "--base", workload.base, "--name", workload.name]
        argv += ["--pool", workload.slug] if workload.pool.is_full else []
        device = "" if workload.accelerator is None else self._settings.devices[workload.accelerator]
        env = {**self._environment(), **engine.environ, "CUDA_VISIBLE_DEVICES": device, **self._turns(workload, engine)}
        return Program(name=workload.name, argv=argv, env=env)

    def _turns(self, workload: Workload, engine: engines.Engine) -> dict[str, str]:
        """Let a worker take turns at its claim; where no device is behind that, on one of a bounded size.

        vLLM takes none yet: it lies beside whoever has the turn, and both must fit.
        """
        if workload.accelerator is None or engine.name == engines.VLLM:
            return {placing.VARIABLE: ""}
        turns = {placing.VARIABLE: workload.claim or ""}
        if not self._settings.devices[workload.accelerator] and not os.environ.get(placing.BYTES):
            turns[placing.BYTES] = str(placing.half_of_memory() // len(self._settings.devices))
        return turns

    def _mark_epoch(self) -> None:
        """Tell the store that it was started anew: whoever wrote to it before must not be believed."""
        pid = self._supervisor.pid(STORE)
        if pid is None or pid == self._epoch_of or not embedded.answers(self._settings.data_dir):
            return
        try:
            self._new_epoch()
        except (StoreUnavailable, StoreFault):
            return
        except OSError as error:
            if self._epoch_trouble != error.errno:
                report.line(f"cannot write {self._settings.data_dir / prepare.EPOCH}: {error.strerror}; trying again")
            self._epoch_trouble = error.errno
            return
        self._epoch_of, self._epoch_trouble = pid, None

    def _new_epoch(self) -> None:
        """Begin an epoch above every earlier one of this directory, even on a store that came back empty."""
        prepare.begin_epoch(self._store)

    # Ending

    def _end(self) -> None:
        datadir.withdraw(self._settings.data_dir)
        self._listener.close()
        self._store.close()
        heard = max(self._signals, 1)
        self._supervisor.shutdown(stop_stages(self._supervisor.names()), hurry=lambda: self._signals > heard)
        if not self._settings.redis_url:
            embedded.tidy(self._settings.data_dir)

    # What it says and passes on

    @property
    def _base_url(self) -> str:
        host = self._settings.host.strip("[]")
        shown = {ANY_V4: "127.0.0.1", ANY_V6: "::1"}.get(host, host)
        return f"http://{f'[{shown}]' if ':' in shown else shown}:{self._port}"

    @property
    def _broker_url(self) -> str:
        return self._store.settings.broker_url

    def _environment(self) -> dict[str, str]:
        told = {"OPENRL_BROKER_URL": self._broker_url}
        return _environment(self._settings, port=self._port) | told

    def _report(self) -> report.Started:
        return report.Started(
            base_url=self._base_url,
            data_dir=self._settings.data_dir,
            store="given by --redis-url" if self._settings.redis_url else f"embedded Valkey, {self._redis_url}",
            models=tuple((model.name, Path(model.path)) for model in self._models),
            accelerators=len(self._settings.devices),
            has_keys=Tenants(self._store).any_keys(),
            as_json=self._settings.as_json,
        )


def stop_stages(names: set[str]) -> list[tuple[set[str], float]]:
    """Return what ends together, and by when: nothing waits for the API but the store, which all others need."""
    return [(names - {STORE}, STOP_S), ({STORE}, STORE_STOP_S)]


class _Wanted(threading.Thread):
    """Reads what is wanted and writes what runs, so that a store that doesn't answer never holds up the supervisor."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(name="wanted", daemon=True)
        self._cluster = cluster
        self._stopping = threading.Event()
        self.latest: tuple[Workload, ...] | None = None
        self.running: dict[str, Process] = {}

    def run(self) -> None:
        """Look twice a second; while the store is away, what was wanted last is still wanted."""
        while not self._stopping.wait(WANTED_S):
            try:
                self._cluster.report(self.running)
                self.latest = self._cluster.wanted()
            except (StoreUnavailable, StoreFault):
                continue

    def stop(self) -> None:
        """Stop reading; a read under way may still end."""
        self._stopping.set()


def _healthy(base_url: str) -> bool:
    """Ask the API itself, never through a proxy of the environment."""
    connection = http.client.HTTPConnection(base_url.removeprefix("http://"), timeout=2.0)
    try:
        connection.request("GET", "/api/v1/healthz")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
