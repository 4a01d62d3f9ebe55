"""Where weights lie under the data directory, and how a directory appears there whole or not at all.

Paths are relative and posix, so that the registry's rows survive a move of the data directory. A version is
`<name>.<token>`: the owner's fencing token keeps two owners from writing one directory, and the registry row,
not the rename, says which version counts. Without torch: the API reads these paths too.
"""

import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from openrl.tasks import keys
from openrl.tasks.boundaries import reach
from openrl.tasks.errors import InvalidRequest, NotFound

log = logging.getLogger(__name__)

_FLUSHERS = 12
_SEGMENTS = ("weights", "sampler_weights", "external_weights", "snapshots")


def tenant_dir(tenant: str) -> str:
    """The home of one tenant: all its files lie under it, and nobody else's."""
    return f"tenants/{keys.check_tenant(tenant)}"


def run_dir(tenant: str, run_id: str) -> str:
    """The home of one run; a run id holds no `_`, so that replacing its colons loses nothing."""
    return f"{tenant_dir(tenant)}/runs/{keys.check_run(run_id).replace(':', '_')}"


def weights_dir(tenant: str, run_id: str, name: str, token: int) -> str:
    """A training checkpoint: adapter, optimizer moments, manifest."""
    return f"{run_dir(tenant, run_id)}/weights/{_version(name, token)}"


def sampler_dir(tenant: str, run_id: str, name: str, token: int) -> str:
    """A named version for samplers: adapter and manifest."""
    return f"{run_dir(tenant, run_id)}/sampler_weights/{_version(name, token)}"


def ephemeral_dir(tenant: str, run_id: str, number: int, token: int) -> str:
    """A version for the one sampler numbered `number`; no user-given name can begin with `@`."""
    return f"{run_dir(tenant, run_id)}/sampler_weights/@{int(number)}.{int(token)}"


def external_dir(tenant: str, run_id: str, name: str, token: int) -> str:
    """An export: the adapter as PEFT's files, and a manifest."""
    return f"{run_dir(tenant, run_id)}/external_weights/{_version(name, token)}"


def snapshot_dir(tenant: str, run_id: str, applied: int, token: int) -> str:
    """A recovery snapshot of everything the run is after operation `applied`."""
    return f"{run_dir(tenant, run_id)}/snapshots/{int(applied)}.{int(token)}"


def copy_dir(tenant: str, run_id: str, checkpoint_id: str, token: int) -> str:
    """A copy of a checkpoint, under the same segment and name in another run."""
    segment, _, name = checkpoint_id.partition("/")
    if segment not in _SEGMENTS:
        raise InvalidRequest(f"{checkpoint_id!r} is no checkpoint's name; it is <segment>/<name>")
    return f"{run_dir(tenant, run_id)}/{segment}/{_version(name, token)}"


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


def tenant_file(data_dir: str | Path, tenant: str, relative: str) -> Path:
    """The absolute path of a file, links followed, which lies under the tenant's own directory.

    Raises:
        NotFound: it lies elsewhere, or no such file.
    """
    home = resolve(data_dir, tenant_dir(tenant))
    path = (home / relative).resolve()
    if not path.is_relative_to(home) or not path.is_file():
        raise NotFound(f"no file {relative!r}; it was deleted, or never there")
    return path


def existing(data_dir: str | Path, relative: str) -> Path:
    """`resolve`, and it is a directory.

    Raises:
        NotFound: no such directory.
    """
    path = resolve(data_dir, relative)
    if not path.is_dir():
        log.warning("there is no directory %s", path)
        raise NotFound(f"{title(relative)} is no longer on disk; save it again")
    return path


def title(relative: str) -> str:
    """What a client calls the version in the directory `relative`, which itself is nothing for its eyes."""
    parts = relative.split("/")
    if len(parts) != 6:
        return "this version of the weights"
    run_id, segment, name = parts[3].replace("_", ":"), parts[4], parts[5].rpartition(".")[0]
    if name.startswith("@"):
        return f"sampler {keys.sampler_id(run_id.partition(':')[0], int(name[1:]))!r}"
    return repr(f"tinker://{run_id}/{segment}/{name}")


def version_id(relative: str, digest: str = "") -> str:
    """What an answer says of the version in the directory `relative` that drew it, with the digest of a full one.

    No other version of any run ever has the same.
    """
    parts = relative.split("/")
    name = "/".join([parts[3].replace("_", ":"), *parts[4:]]) if len(parts) == 6 else relative
    return f"{name}@{digest[:16]}" if digest else name


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
    filled = [Path(folder) / name for folder, _, files in os.walk(staged) for name in (*files, "")]
    _fsync_all([*filled, *_above(final.parent)])
    if final.exists():
        raise FileExistsError(f"version {final.name!r} was already published; versions are never replaced")
    reach("weights.staged")
    staged.rename(final)
    reach("weights.renamed")
    _fsync(final.parent)
    return final


def link(source: Path, final: Path) -> None:
    """Make `final` a version with the files of `source`, which no more bytes are spent on where the disk allows it.

    Versions never change, so two may share their files; each is there until the last of both is removed. Durable when
    this returns; until a row names it, `final` counts for nothing, however much of it is there.

    Raises:
        FileNotFoundError: the source is being removed.
    """
    final.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        try:
            os.link(path, final / path.name)
        except FileNotFoundError:
            raise
        except OSError:  # a file system without hard links
            shutil.copyfile(path, final / path.name)
            _fsync(final / path.name)
    for path in (final, final.parent, *_above(final.parent)):
        _fsync(path)


def remove(directory: Path) -> None:
    """Delete a version or a staged directory; one that is gone already is fine."""
    shutil.rmtree(directory, ignore_errors=True)


def versions(data_dir: Path, tenant: str, run_id: str) -> Iterator[Path]:
    """Every directory that was written for a run, staged ones included."""
    home = data_dir / run_dir(tenant, run_id)
    for segment in _SEGMENTS:
        if (home / segment).is_dir():
            yield from sorted(path for path in (home / segment).iterdir() if path.is_dir())


def _version(name: str, token: int) -> str:
    if not keys.is_name(name):
        raise InvalidRequest(f"name {str(name)[:80]!r} is not allowed; it must be {keys.NAME_RULE}")
    return f"{name}.{int(token)}"


def _above(directory: Path) -> list[Path]:
    """Return the few directories above one: any on the way down from them may have been made for this version."""
    return list(directory.parents)[:5]


def _fsync_all(paths: Sequence[Path]) -> None:
    """Bring all to the disk at the same time: the file system writes its journal once, not once for each."""
    list(_flushers(os.getpid()).map(_fsync, paths))


@cache
def _flushers(pid: int) -> ThreadPoolExecutor:
    """Return threads that stay: to start as many for each save costs more than what they do (2 ms of a small save)."""
    return ThreadPoolExecutor(_FLUSHERS, thread_name_prefix=f"fsync-{pid}")


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
