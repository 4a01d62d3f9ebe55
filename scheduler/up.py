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
from pathlib import Path

from openrl.scheduler import models as base_models
from openrl.scheduler import report
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.resources import Workload
from openrl.scheduler.settings import UpSettings
from openrl.scheduler.supervisor import PROCESSES, Program, Supervisor
from openrl.tasks import datadir, embedded
from openrl.tasks.errors import OpenRLError, StoreUnavailable
from openrl.tasks.ownership import new_epoch
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants

API, SCHEDULER, STORE = "api", "scheduler", "store"

ANY_V4, ANY_V6 = str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))
"""Addresses that mean all of the machine's own."""

STOP_BOUNDS_S = {API: 6.0, "workers": 12.0, STORE: 14.0}
"""When, in seconds after the signal, what is left of each stage is killed. All of it within 15 s."""

IDLE_STOP_S = 120.0
"""How long a worker that is no longer wanted may take to hand back its runs."""

API_TIMEOUT_S = 60.0
LOOK_S = 0.1
WANTED_S = 0.5


class Refused(OpenRLError):
    """The service can't start as asked; nothing was started. Mend what the line names."""


class Failed(OpenRLError):
    """A part of the service didn't come up; everything was ended again."""


class _Asked(Exception):
    """A signal asked to leave during the start."""


def run(settings: UpSettings) -> None:
    """Run the service until SIGINT, SIGTERM or SIGHUP; everything that it started is gone on return.

    Raises:
        Refused, DirectoryInUse, InvalidRequest, StoreUnavailable: nothing was started.
        Failed: a part of it didn't come up.
    """
    models = base_models.resolve(settings.models)
    try:
        port = _check(settings)
        settings.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(settings.data_dir, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise Refused(f"cannot use --data-dir {settings.data_dir}: {error.strerror}") from error
    with datadir.hold(settings.data_dir):
        _Up(settings, models, port).run()


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on is reachable from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check(settings: UpSettings) -> int:
    """Refuse what can be refused before the directory exists; return the port to listen on."""
    if datadir.held(settings.data_dir) or (settings.data_dir / PROCESSES).exists():
        # What a killed service left behind may still listen on the port.
        with datadir.hold(settings.data_dir):
            _supervisor(settings).end_leftovers()
    port = _free_port(settings.host, settings.port)
    if settings.redis_url:
        store = Store.connect(_store_settings(settings, settings.redis_url))
        if not store.ready():
            raise Refused(
                "the store given by --redis-url or OPENRL_REDIS_URL doesn't answer; leave it out for an embedded one"
            )
        _check_keys(settings, store)
        store.close()
        return port
    embedded.binary()
    if not is_loopback(settings.host) and not (settings.data_dir / "store").is_dir():
        raise Refused(_without_keys(settings))
    return port


def _check_keys(settings: UpSettings, store: Store) -> None:
    if not is_loopback(settings.host) and not Tenants(store).any_keys():
        raise Refused(_without_keys(settings))


def _without_keys(settings: UpSettings) -> str:
    return (
        f"--host {settings.host} can be reached from other machines and there is no API key: run `openrl keys create "
        f"--tenant NAME --data-dir {settings.data_dir}` first, or use --host 127.0.0.1"
    )


def _free_port(host: str, port: int) -> int:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise Refused(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port or --host"
        ) from error


def _supervisor(settings: UpSettings) -> Supervisor:
    detail = report.line if settings.verbose else lambda text: None
    return Supervisor(settings.data_dir, say=report.line, detail=detail)


def _store_settings(settings: UpSettings, redis_url: str) -> StoreSettings:
    try:
        return StoreSettings(redis_url=redis_url, data_dir=settings.data_dir, broker_url=settings.broker_url)
    except ValueError as nonsense:
        raise Refused(str(nonsense)) from nonsense


class _Up:
    """One life of a service. Holds the data directory's lock from outside."""

    def __init__(self, settings: UpSettings, models: list[BaseModel], port: int) -> None:
        self._settings = settings
        self._models = models
        self._port = port
        self._signals = 0
        self._workers: set[str] = set()
        self._epoch_of: int | None = None
        self._redis_url = settings.redis_url or embedded.url(settings.data_dir)
        self._store = Store.connect(_store_settings(settings, self._redis_url))
        self._supervisor = _supervisor(settings)

    def run(self) -> None:
        """Start everything, keep it running until asked to leave, end everything."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` has asked to ignore the terminal's end.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)
        try:
            self._start_store()
            self._register()
            self._start_services()
            report.started(self._report())
            self._keep_running()
        except _Asked:
            report.line("stopping")
        finally:
            self._end()

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1

    # Starting

    def _start_store(self) -> None:
        if self._settings.redis_url:
            self._new_epoch()
            return
        data_dir = self._settings.data_dir
        embedded.end_leftover(data_dir)
        self._supervisor.start(Program(name=STORE, argv=embedded.command(data_dir)))
        self._wait(STORE, lambda: embedded.answers(data_dir), timeout_s=embedded.START_TIMEOUT_S)
        self._mark_epoch()
        _check_keys(self._settings, self._store)

    def _register(self) -> None:
        registry = Registry(self._store)
        registry.remove_models()
        for model in self._models:
            registry.add_model(model)
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
        for name, module in ((API, "openrl.app"), (SCHEDULER, "openrl.scheduler")):
            argv = [sys.executable, "-m", module]
            self._supervisor.start(Program(name=name, argv=argv, env=self._environment()))
        self._wait(API, lambda: _healthy(self._base_url), timeout_s=API_TIMEOUT_S)

    def _wait(self, name: str, ready: Callable[[], bool], *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self._signals:
                raise _Asked
            self._supervisor.poll()
            if self._supervisor.crashes(name) or time.monotonic() > deadline:
                raise Failed(report.failure(name, self._supervisor.log_path(name)))
            time.sleep(LOOK_S / 2)

    # Running

    def _keep_running(self) -> None:
        wanted = _Wanted(LocalCluster(self._store))
        wanted.start()
        while not self._signals:
            self._supervisor.poll()
            self._mark_epoch()
            if wanted.latest is not None:
                self._follow(wanted.latest)
            time.sleep(LOOK_S)
        wanted.stop()
        raise _Asked

    def _follow(self, workloads: tuple[Workload, ...]) -> None:
        """Run the processes that are wanted, and no others."""
        wanted = {workload.name: workload for workload in workloads}
        for name in sorted(self._workers - wanted.keys()):
            self._supervisor.stop(name, grace_s=IDLE_STOP_S)
            self._workers.remove(name)
            report.line(f"{name}: no longer wanted, stopping")
        for name in sorted(wanted.keys() - self._supervisor.names()):
            self._supervisor.start(self._worker(wanted[name]))
            if name in self._supervisor.names():
                self._workers.add(name)
                report.line(f"{name}: starting, log {self._supervisor.log_path(name)}")

    def _worker(self, workload: Workload) -> Program:
        module = f"openrl.workers.{workload.kind}"
        # The same name after a crash: by taking the lease anew, the successor frees what the dead one owned at once.
        argv = [sys.executable, "-m", module, "--base", workload.base, "--name", workload.name]
        device = "" if workload.accelerator is None else self._settings.devices[workload.accelerator]
        return Program(name=workload.name, argv=argv, env={**self._environment(), "CUDA_VISIBLE_DEVICES": device})

    def _mark_epoch(self) -> None:
        """Tell the store that it was started anew: whoever wrote to it before must not be believed."""
        pid = self._supervisor.pid(STORE)
        if pid is None or pid == self._epoch_of or not embedded.answers(self._settings.data_dir):
            return
        try:
            self._new_epoch()
        except StoreUnavailable:
            return
        self._epoch_of = pid

    def _new_epoch(self) -> None:
        """Begin an epoch above every earlier one of this directory, even on a store that came back empty."""
        path = self._settings.data_dir / "epoch"
        floor = int(path.read_text()) + 1 if path.exists() else 0
        datadir.write_private(path, str(new_epoch(self._store, floor)))

    # Ending

    def _end(self) -> None:
        datadir.withdraw(self._settings.data_dir)
        self._store.close()
        others = self._supervisor.names() - {API, STORE}
        stages = [({API}, STOP_BOUNDS_S[API]), (others, STOP_BOUNDS_S["workers"]), ({STORE}, STOP_BOUNDS_S[STORE])]
        heard = max(self._signals, 1)
        self._supervisor.shutdown(stages, hurry=lambda: self._signals > heard)
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
        return {
            "OPENRL_REDIS_URL": self._redis_url,
            "OPENRL_BROKER_URL": self._broker_url,
            "OPENRL_DATA_DIR": str(self._settings.data_dir),
            "OPENRL_HOST": self._settings.host,
            "OPENRL_PORT": str(self._port),
            "OPENRL_API_WORKERS": str(self._settings.api_workers),
            "OPENRL_ACCELERATORS": str(len(self._settings.devices)),
            "OPENRL_IDLE_TIMEOUT_S": str(self._settings.idle_timeout_s),
        }

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


class _Wanted(threading.Thread):
    """Reads what is wanted, so that a store that doesn't answer never holds up the supervisor."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(name="wanted", daemon=True)
        self._cluster = cluster
        self._stopping = threading.Event()
        self.latest: tuple[Workload, ...] | None = None

    def run(self) -> None:
        """Read twice a second; while the store is away, what was wanted last is still wanted."""
        while not self._stopping.wait(WANTED_S):
            try:
                self.latest = self._cluster.workloads()
            except StoreUnavailable:
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
