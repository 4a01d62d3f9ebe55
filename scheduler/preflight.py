"""What is refused before a service on one machine starts: settings, directory, port, store, keys.

Each is one line that says what to mend. Nothing was started when it is raised, and nothing is held after it.
"""

from __future__ import annotations

import errno
import os
import socket
from importlib.metadata import entry_points
from pathlib import Path

from openrl.scheduler import prepare
from openrl.scheduler.environment import store_settings, told
from openrl.scheduler.noted import Noted
from openrl.scheduler.settings import SchedulerSettings, UpSettings
from openrl.tasks import datadir, embedded, upgrade
from openrl.tasks.errors import OpenRLError
from openrl.tasks.loopback import is_loopback
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from openrl.workers.model import settings as placing

SETTINGS = "openrl.settings"
"""The entry points of settings that a part of the service reads from its environment."""

BACKLOG = 2048


class Refused(OpenRLError):
    """The service can't run as asked; nothing of it runs. Mend what the line names."""


def check_settings(settings: UpSettings) -> set[str]:
    """Refuse what any part of the service would refuse: each package names its settings as entry points.

    Return the names of all settings that a part has asked for.
    """
    environ = Noted(os.environ | told(settings, port=settings.port))
    parts = [entry.load() for entry in entry_points(group=SETTINGS)]
    for part in (StoreSettings, SchedulerSettings, placing.AcceleratorSettings, *parts):
        try:
            part.from_env(environ)
        except ValueError as nonsense:
            raise Refused(str(nonsense)) from nonsense
    return environ.asked


def check_directory(data_dir: Path) -> None:
    """Refuse a directory that can't be used, or that would first have to be made where that can't be done."""
    datadir.check_private(data_dir)
    upgrade.check_directory(data_dir)
    prepare.lowest_epoch(data_dir)
    there = next(path for path in (data_dir, *data_dir.parents) if path.exists())
    if not there.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def check_store(settings: UpSettings) -> None:
    """Refuse a store that doesn't answer, and an open door without a key."""
    if settings.redis_url:
        store = Store.connect(store_settings(settings))
        if not store.ready():
            raise Refused(
                "the store given by --redis-url or OPENRL_REDIS_URL doesn't answer; leave it out for an embedded one"
            )
        check_keys(settings, store)
        store.close()
        return
    embedded.binary()
    if not is_loopback(settings.host) and not embedded.is_kept(settings.data_dir):
        raise Refused(_without_keys(settings))


def check_keys(settings: UpSettings, store: Store) -> None:
    """Refuse to be reached from other machines while nobody needs a key."""
    if not is_loopback(settings.host) and not Tenants(store).any_keys():
        raise Refused(_without_keys(settings))


def _without_keys(settings: UpSettings) -> str:
    return (
        f"--host {settings.host} can be reached from other machines and there is no API key: run `openrl keys create "
        f"--tenant NAME --data-dir {settings.data_dir}` first, or use --host 127.0.0.1"
    )


def listen(host: str, port: int) -> socket.socket:
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
