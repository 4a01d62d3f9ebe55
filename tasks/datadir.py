"""The data directory of a service on one machine: who holds it, and where its store is.

`openrl up` holds the directory's lock for its whole life; the kernel lets go of it whatever ends the
process. `service.json` tells the other commands where the running service is. Knows neither Redis nor
what else lies in the directory.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from openrl.tasks import schema
from openrl.tasks.errors import OpenRLError

DEFAULT = Path("~/.openrl")
"""Where a service keeps its data unless --data-dir or OPENRL_DATA_DIR names another place."""

LOCK = "openrl.lock"
SERVICE = "service.json"


class DirectoryInUse(OpenRLError):
    """Another process holds this data directory: stop it, or use another directory."""


class DirectoryOpen(OpenRLError):
    """Other users of the machine can enter this data directory: close it with chmod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A running service, as `service.json` describes it.

    `started`: seconds since the epoch. The URLs may hold a password: the file is 0600.
    """

    pid: int
    redis_url: str
    broker_url: str
    base_url: str
    started: float


def resolve(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """Return the absolute data directory: the one given, else OPENRL_DATA_DIR, else the default."""
    chosen = data_dir or os.environ.get("OPENRL_DATA_DIR") or DEFAULT
    return Path(chosen).expanduser().resolve()


@contextmanager
def hold(data_dir: Path) -> Iterator[None]:
    """Hold the directory (made 0700 if missing) for the body of the `with`.

    Meanwhile whatever this process and its children make is for this user alone.

    Raises:
        DirectoryInUse: another process holds it; nothing was changed.
        DirectoryOpen: it was there, and others can enter it; nothing was changed.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(data_dir)
    descriptor = os.open(data_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    umask = os.umask(0o077)
    try:
        if not _lock(descriptor, patience_s=0.5):
            raise DirectoryInUse(_in_use(data_dir))
        yield
    finally:
        os.close(descriptor)
        os.umask(umask)


def check_private(data_dir: Path) -> None:
    """Check that nobody but this user can enter the directory, where it exists.

    Raises:
        DirectoryOpen: others can.
    """
    mode = data_dir.stat().st_mode if data_dir.exists() else 0
    if mode & 0o077:
        raise DirectoryOpen(
            f"other users can enter {data_dir} (mode {mode & 0o777:o}), which holds keys and checkpoints: run "
            f"`chmod 700 {shlex.quote(str(data_dir))}` first"
        )


def held(data_dir: Path) -> bool:
    """Say whether a process holds the directory now."""
    try:
        descriptor = os.open(data_dir / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        return not _lock(descriptor, patience_s=0.0)
    finally:
        os.close(descriptor)


def publish(data_dir: Path, service: Service) -> None:
    """Write `service.json` so that a reader sees either all of it or none."""
    write_private(data_dir / SERVICE, json.dumps(schema.SERVICE.numbered(asdict(service))))


def withdraw(data_dir: Path) -> None:
    """Remove `service.json`."""
    (data_dir / SERVICE).unlink(missing_ok=True)


def service(data_dir: Path, *, patience_s: float = 0.0) -> Service | None:
    """Return the running service of the directory, None where none runs.

    A service that holds the directory but has not said where its store is yet is waited for.
    """
    deadline = time.monotonic() + patience_s
    while held(data_dir):
        try:
            return Service(**schema.SERVICE.current(json.loads((data_dir / SERVICE).read_text())))
        except FileNotFoundError:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)
    return None


def write_private(path: Path, text: str) -> None:
    """Replace the file by `text`, readable by this user alone; it is on the disk before this returns."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(descriptor)
    scratch.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _lock(descriptor: int, *, patience_s: float) -> bool:
    """Take the lock; patience outlasts a command that only looks whether it is held."""
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)


def _in_use(data_dir: Path) -> str:
    try:
        pid = json.loads((data_dir / SERVICE).read_text())["pid"]
    except (FileNotFoundError, ValueError, KeyError):
        return f"{data_dir} is in use by another openrl process; stop it, or give another --data-dir"
    return f"{data_dir} is in use by `openrl up` (pid {pid}); stop it, or give another --data-dir"
