"""Where weights lie under the data directory, and how a directory appears there whole or not at all.

Paths are relative and posix, so that the registry's rows survive a move of the data directory. A version is
`<name>.<token>`: the owner's fencing token keeps two owners from writing one directory, and the registry row,
not the rename, says which version counts. Without torch: the API reads these paths too.
"""

import os
import re
import secrets
import shutil
from pathlib import Path

from openrl.tasks.errors import InvalidRequest, NotFound

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}(:[A-Za-z0-9.-]{1,32}){0,4}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


def run_dir(tenant: str, run_id: str) -> str:
    """The home of one run; a run id holds no `_`, so that replacing its colons loses nothing."""
    return f"tenants/{_checked(_TENANT, tenant, 'tenant')}/runs/{_checked(_RUN, run_id, 'run').replace(':', '_')}"


def weights_dir(tenant: str, run_id: str, name: str, token: int) -> str:
    """A training checkpoint: adapter, optimizer moments, manifest."""
    return f"{run_dir(tenant, run_id)}/weights/{_version(name, token)}"


def sampler_dir(tenant: str, run_id: str, name: str, token: int) -> str:
    """A named version for samplers: adapter and manifest."""
    return f"{run_dir(tenant, run_id)}/sampler_weights/{_version(name, token)}"


def ephemeral_dir(tenant: str, run_id: str, number: int, token: int) -> str:
    """A version for the one sampler numbered `number`; no user-given name can begin with `@`."""
    return f"{run_dir(tenant, run_id)}/sampler_weights/@{int(number)}.{int(token)}"


def snapshot_dir(tenant: str, run_id: str, applied: int, token: int) -> str:
    """A recovery snapshot of everything the run is after operation `applied`."""
    return f"{run_dir(tenant, run_id)}/snapshots/{int(applied)}.{int(token)}"


def resolve(data_dir: str | Path, relative: str) -> Path:
    """The absolute path of `relative`, links followed, which lies under the data directory.

    Raises:
        InvalidRequest: it is absolute, or leads out of the data directory.
    """
    root = Path(data_dir).resolve()
    path = (root / relative).resolve()
    if Path(relative).is_absolute() or path == root or not path.is_relative_to(root):
        raise InvalidRequest(f"path {relative!r} is not inside the data directory")
    return path


def existing(data_dir: str | Path, relative: str) -> Path:
    """`resolve`, and it is a directory.

    Raises:
        NotFound: no such directory.
    """
    path = resolve(data_dir, relative)
    if not path.is_dir():
        raise NotFound(f"weights {relative!r} are no longer on disk")
    return path


def staging(final: Path) -> Path:
    """Make an empty directory beside `final`, to be filled and then published (or removed) under that name."""
    final.parent.mkdir(parents=True, exist_ok=True)
    path = final.parent / f".tmp-{final.name}-{secrets.token_hex(4)}"
    path.mkdir()
    return path


def publish(staged: Path, final: Path) -> Path:
    """Make a filled directory durable under its final name, all at once.

    Every file and directory is on the disk before the rename, and the rename is before this returns.

    Raises:
        FileExistsError: `final` is already there; versions are never replaced. The staged directory stays.
    """
    for folder, _, files in os.walk(staged):
        for name in files:
            _fsync(Path(folder) / name)
        _fsync(Path(folder))
    if final.exists():
        raise FileExistsError(f"version {final.name!r} was already published; versions are never replaced")
    staged.rename(final)
    _fsync_upwards(final.parent)
    return final


def remove(directory: Path) -> None:
    """Delete a version or a staged directory; one that is gone already is fine."""
    shutil.rmtree(directory, ignore_errors=True)


def _version(name: str, token: int) -> str:
    return f"{_checked(_NAME, name, 'name')}.{int(token)}"


def _checked(pattern: re.Pattern[str], value: str, what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value) or ".." in value:
        raise InvalidRequest(f"{what} {str(value)[:80]!r} is not allowed; it must match {pattern.pattern} without '..'")
    return value


def _fsync_upwards(directory: Path) -> None:
    """The directory and the few above it: any of them may have been made for this version."""
    for path in [directory, *list(directory.parents)[:5]]:
        _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
