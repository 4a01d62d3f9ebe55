"""`openrl checkpoints`: list, delete, publish and keep checkpoints of any tenant, for operators.

A checkpoint is named by its address, which says whose it is to nobody but the store.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from openrl.app.checkpoints import TTL_LEAST_S, TTL_MOST_S
from openrl.app.opened import data_dir_option, json_option, opened
from openrl.tasks import audit, keys, tables
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.registry import Checkpoint, Registry
from openrl.tasks.store import Store

EVERY = 10_000_000


@dataclass(frozen=True, slots=True)
class _Found:
    """A checkpoint and where it is."""

    store: Store
    registry: Registry
    tenant: str
    checkpoint: Checkpoint

    @property
    def where(self) -> tuple[str, str, str]:
        return self.tenant, self.checkpoint.run_id, self.checkpoint.checkpoint_id

    def note(self, deed: str, **details: float | None) -> None:
        audit.record(
            self.store, self.tenant, f"checkpoint_{deed}", actor="", tinker_path=self.checkpoint.uri, **details
        )


@click.group()
def checkpoints() -> None:
    """List, delete, publish and keep checkpoints, whosever they are."""


@checkpoints.command("list")
@click.option("--tenant", default="", help="Only this tenant's.")
@click.option("--run", "run_id", default="", help="Only this run's.")
@json_option
@data_dir_option
def list_checkpoints(tenant: str, run_id: str, as_json: bool, data_dir: Path | None) -> None:
    """Show checkpoints, newest first, each tenant's together."""
    with opened("checkpoints", data_dir) as store:
        registry = Registry(store)
        tenants = [keys.check_tenant(tenant)] if tenant else registry.tenants()
        tenants = [registry.owner_of(run_id)] if run_id and not tenant else tenants
        found = [(each, one) for each in tenants for one in registry.checkpoints(each, run_id or None, EVERY, 0)[0]]
    if as_json:
        click.echo(json.dumps([_told(owner, one) for owner, one in found]))
        return
    table = Table("tenant", "checkpoint", "type", "bytes", "made", "expires", "public")
    for owner, one in found:
        ends = "-" if one.expires_at is None else _shown(one.expires_at)
        public = "yes" if one.public else "-"
        table.add_row(owner, one.uri, one.kind, f"{one.size_bytes:,}", _shown(one.created), ends, public)
    tables.show(table)


@checkpoints.command()
@click.argument("tinker_path")
@json_option
@data_dir_option
def delete(tinker_path: str, as_json: bool, data_dir: Path | None) -> None:
    """Forget a checkpoint. Its files go when nothing needs them, after ten minutes at least."""
    with _found(tinker_path, data_dir) as found:
        found.registry.delete_checkpoint(*found.where)
        found.note("deleted")
    _say(found, f"{tinker_path} is deleted", as_json, deleted=True)


@checkpoints.command()
@click.argument("tinker_path")
@click.argument("ttl")
@json_option
@data_dir_option
def ttl(tinker_path: str, ttl: str, as_json: bool, data_dir: Path | None) -> None:
    """Keep a checkpoint for TTL from now on: seconds, 12h, 30d; or `never` ends it."""
    with _found(tinker_path, data_dir) as found:
        ttl_s = _seconds(ttl)
        expires_at = None if ttl_s is None else time.time() + ttl_s
        found.registry.set_expiry(*found.where, expires_at)
        found.note("ttl_set", ttl_seconds=ttl_s)
    until = "it is deleted" if expires_at is None else _shown(expires_at)
    _say(found, f"{tinker_path} is kept until {until}", as_json, expires_at=expires_at)


@checkpoints.command()
@click.argument("tinker_path")
@json_option
@data_dir_option
def publish(tinker_path: str, as_json: bool, data_dir: Path | None) -> None:
    """Let every tenant read a checkpoint."""
    _set_public(tinker_path, data_dir, as_json, public=True)


@checkpoints.command()
@click.argument("tinker_path")
@json_option
@data_dir_option
def unpublish(tinker_path: str, as_json: bool, data_dir: Path | None) -> None:
    """Let its owner alone read a checkpoint again. What was made from it keeps its weights."""
    _set_public(tinker_path, data_dir, as_json, public=False)


def _set_public(tinker_path: str, data_dir: Path | None, as_json: bool, *, public: bool) -> None:
    deed = "published" if public else "unpublished"
    with _found(tinker_path, data_dir) as found:
        found.registry.set_public(*found.where, public=public)
        found.note(deed)
    _say(found, f"{tinker_path} is {deed}", as_json, public=public)


@contextmanager
def _found(tinker_path: str, data_dir: Path | None) -> Iterator[_Found]:
    with opened("checkpoints", data_dir) as store:
        registry = Registry(store)
        run_id, checkpoint_id = registry.parts(tinker_path)
        tenant = registry.owner_of(run_id)
        yield _Found(store, registry, tenant, registry.checkpoint(tenant, run_id, checkpoint_id))


def _say(found: _Found, text: str, as_json: bool, **changed: float | None) -> None:
    if as_json:
        click.echo(json.dumps(_told(found.tenant, found.checkpoint) | changed))
    else:
        click.echo(text, err=True)


def _told(tenant: str, one: Checkpoint) -> dict[str, object]:
    return {
        "tenant": tenant,
        "tinker_path": one.uri,
        "type": one.kind,
        "base_model": one.base_model,
        "size_bytes": one.size_bytes,
        "created": one.created,
        "expires_at": one.expires_at,
        "public": one.public,
        "user_metadata": dict(one.user_metadata),
    }


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _seconds(ttl: str) -> int | None:
    if ttl == "never":
        return None
    parts = re.fullmatch(r"(\d{1,10})([smhdw]?)", ttl)
    seconds = int(parts[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}[parts[2]] if parts else -1
    if not TTL_LEAST_S <= seconds <= TTL_MOST_S:
        raise InvalidRequest(f"TTL is {ttl!r}; say {TTL_LEAST_S} to {TTL_MOST_S} seconds, or 12h, 30d, or never")
    return seconds
