"""`openrl keys`: create, list, rotate and revoke API keys."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from openrl.app.opened import data_dir_option, json_option, opened
from openrl.tasks import tables
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.tenants import DEFAULT_SCOPES, SCOPES, ApiKey, Tenants

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}

EXPIRES = "30d, 12h, 45m, or a time such as 2027-01-31 or 2027-01-31T12:00:00Z"


@click.group()
def keys() -> None:
    """Create, list, rotate and revoke API keys. The first one closes the service to everybody without a key."""


@keys.command()
@click.option("--tenant", required=True, help="Whose key: 1 to 63 of a-z, 0-9 and -.")
@click.option("--name", default="", help="What the key is for; an e-mail address shows as its user.")
@click.option("--note", default="", help="One more line about it.")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    help=f"What it may do: {', '.join(SCOPES)}; several with commas, or repeated. Else {','.join(DEFAULT_SCOPES)}.",
)
@click.option("--expires", default="", help=f"When it ends: {EXPIRES}. Else when it is revoked.")
@json_option
@data_dir_option
def create(
    tenant: str, name: str, note: str, scopes: tuple[str, ...], expires: str, as_json: bool, data_dir: Path | None
) -> None:
    """Make a key and show it, this once."""
    with _tenants(data_dir, begins=True) as tenants:
        asked = [scope.strip() for part in scopes for scope in part.split(",")] or DEFAULT_SCOPES
        secret = tenants.create_key(tenant, name, note=note, scopes=asked, expires=_time("--expires", expires))
        made = tenants.look_up(secret)[0]
    assert made is not None
    _show_secret(secret, made, as_json)


@keys.command("list")
@json_option
@data_dir_option
def list_keys(as_json: bool, data_dir: Path | None) -> None:
    """Show whose keys exist; never the keys themselves."""
    with _tenants(data_dir) as tenants:
        found = tenants.list_keys()
    if as_json:
        click.echo(json.dumps([_told(key) for key in found]))
        return
    table = Table("key id", "tenant", "name", "scopes", "created", "expires", "note")
    for key in found:
        ends = "-" if key.expires is None else _shown(key.expires) + (" (over)" if key.expired else "")
        table.add_row(key.key_id, key.tenant, key.name, ",".join(key.scopes), _shown(key.created), ends, key.note)
    tables.show(table)


@keys.command()
@click.argument("key_id")
@data_dir_option
def revoke(key_id: str, data_dir: Path | None) -> None:
    """Make a key invalid at once, and its tokens with it."""
    with _tenants(data_dir) as tenants:
        tenants.revoke_key(key_id)
    click.echo(f"{key_id} is revoked", err=True)


@keys.command()
@click.argument("key_id")
@click.option("--grace", default="24h", help="How long the old key still works: 24h unless said; 0s ends it at once.")
@click.option("--expires", default="", help=f"When the new key ends: {EXPIRES}. Else it lasts as long as the old one.")
@json_option
@data_dir_option
def rotate(key_id: str, grace: str, expires: str, as_json: bool, data_dir: Path | None) -> None:
    """Make a key in place of another, and show it, this once. The old one ends after a grace."""
    with _tenants(data_dir) as tenants:
        secret, made = tenants.rotate_key(
            key_id, grace_s=_duration("--grace", grace), expires=_time("--expires", expires)
        )
    _show_secret(secret, made, as_json, replaces=key_id)
    click.echo(f"{key_id} works for {grace} more", err=True)


def _show_secret(secret: str, key: ApiKey, as_json: bool, **more: str) -> None:
    if as_json:
        click.echo(json.dumps({"key": secret, **_told(key), **more}))
        return
    click.echo(secret)
    click.echo(
        f"A key of {key.tenant} ({key.key_id}), for {', '.join(key.scopes)}. It can't be shown again: "
        "export TINKER_API_KEY=... now.",
        err=True,
    )


def _told(key: ApiKey) -> dict[str, object]:
    return asdict(key) | {"expired": key.expired}


def _shown(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _time(option: str, text: str) -> float | None:
    """Return a time in unix seconds: so long from now, or a date; None for nothing."""
    if not text:
        return None
    if re.fullmatch(r"\d+[a-z]", text):
        return time.time() + _duration(option, text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(f"{option} is {text!r}; say {EXPIRES}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _duration(option: str, text: str) -> float:
    found = re.fullmatch(r"(\d{1,9})([smhdw])", text)
    if not found:
        raise InvalidRequest(f"{option} is {text!r}; say a number and s, m, h, d or w, such as 24h")
    return float(found[1]) * _UNITS[found[2]]


@contextmanager
def _tenants(data_dir: Path | None, *, begins: bool = False) -> Iterator[Tenants]:
    with opened("keys", data_dir, begins=begins) as store:
        yield Tenants(store)
