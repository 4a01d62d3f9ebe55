"""A whole service on this machine: the store, the API, the scheduler, and the workers that it wants.

Decides nothing about workers: it makes the processes so that the scheduler has written down. Everything
that can be refused is refused before anything is started, in one line.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from openrl.scheduler import engines, preflight, prepare, report
from openrl.scheduler import models as base_models
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.crew import Crew
from openrl.scheduler.environment import store_settings, told
from openrl.scheduler.misspelt import unread
from openrl.scheduler.priorities import Priorities
from openrl.scheduler.settings import UpSettings
from openrl.scheduler.supervisor import PROCESSES, Program, Supervisor
from openrl.scheduler.wanted import Wanted
from openrl.tasks import datadir, embedded, process, upgrade
from openrl.tasks.errors import OpenRLError, StoreFault, StoreUnavailable
from openrl.tasks.registry import BaseModel
from openrl.tasks.schema import DATA
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants

API, SCHEDULER, STORE = "api", "scheduler", "store"

ANY_V4, ANY_V6 = str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0))
"""Addresses that mean all of the machine's own."""

STOP_S, STORE_STOP_S = 12.0, 14.0
"""When, in seconds after the signal, what is left is killed: all but the store, then the store. Workers have their own
stop time from the first second on; nothing outlasts 15 s."""

API_TIMEOUT_S = SCHEDULER_TIMEOUT_S = 60.0
LOOK_S = 0.1


class Failed(OpenRLError):
    """A part of the service didn't come up; everything was ended again."""


class _Asked(Exception):
    """A signal asked to leave during the start."""


def run(settings: UpSettings) -> None:
    """Run the service until SIGINT, SIGTERM or SIGHUP; everything that it started is gone on return.

    Raises:
        preflight.Refused, DirectoryInUse, InvalidRequest, StoreUnavailable: nothing was started, or all of it was
            ended again.
        Failed: a part of it didn't come up.
    """
    process.raise_open_files()
    with ExitStack() as held:
        try:
            prepared = _prepare(settings, held)
        except OSError as error:
            raise preflight.Refused(f"cannot use --data-dir {settings.data_dir}: {error.strerror or error}") from error
        prepared.run()


def _prepare(settings: UpSettings, held: ExitStack) -> _Up:
    """Refuse what can be refused, and return a service of which nothing is started yet; `held` keeps what it needs."""
    for text in unread(os.environ, preflight.check_settings(settings)):
        report.line(text)
    preflight.check_directory(settings.data_dir)
    engine = engines.choose(
        settings.sampler,
        settings.sampler_python,
        own_python=sys.executable,
        has_gpu=bool(settings.devices),
        full=os.environ.get(engines.FULL_ENGINE) == engines.VLLM,
    )
    _end_leftovers(settings)
    listener = held.enter_context(preflight.listen(settings.host, settings.port))
    preflight.check_store(settings)
    # Last, since it may fetch gigabytes.
    models = engines.as_served(base_models.resolve(settings.models), engine, os.environ)
    for text in Priorities.from_env(os.environ).unserved(model.name for model in models):
        report.line(text)
    held.enter_context(datadir.hold(settings.data_dir))
    if not settings.redis_url:
        embedded.end_leftover(settings.data_dir)
    return _Up(settings, models, listener, engine)


def _end_leftovers(settings: UpSettings) -> None:
    """End what a killed service left behind: it may still listen on the port."""
    if datadir.held(settings.data_dir) or (settings.data_dir / PROCESSES).exists():
        with datadir.hold(settings.data_dir):
            _supervisor(settings).end_leftovers()


def _supervisor(settings: UpSettings) -> Supervisor:
    detail = report.line if settings.verbose else lambda text: None
    return Supervisor(settings.data_dir, say=report.line, detail=detail, longest_wait_s=settings.restart_max_s)


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
        self._epoch_of: int | None = None
        self._epoch_trouble: int | None = None
        self._store = Store.connect(store_settings(settings))
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
        preflight.check_keys(self._settings, self._store)

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
            raise preflight.Refused(report.refusal(name, self._supervisor.log_path(name)))

    # Running

    def _keep_running(self) -> None:
        wanted = Wanted(LocalCluster(self._store))
        crew = self._crew()
        wanted.start()
        while not self._signals:
            self._look()
            self._mark_epoch()
            if wanted.latest is not None:
                crew.follow(wanted.latest)
            wanted.running = crew.running()
            time.sleep(LOOK_S)
        wanted.stop()
        raise _Asked

    def _crew(self) -> Crew:
        return Crew(self._supervisor, self._engine, self._settings.devices, self._environment())

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
        """Return what every part gets: our own environment, and over it what they are told."""
        return os.environ | told(self._settings, port=self._port) | {"OPENRL_BROKER_URL": self._broker_url}

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
