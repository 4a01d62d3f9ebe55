"""`openrl keys`: create, list and revoke API keys.

Works on the running service's store, on the one OPENRL_REDIS_URL names, or on the data directory's own,
started for the command alone, so that a key can exist before the service is opened to a network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from openrl.tasks import datadir, embedded
from openrl.tasks.errors import OpenRLError
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="The service's data directory; else OPENRL_DATA_DIR, else ~/.openrl.",
)


@click.group()
def keys() -> None:
    """Create, list and revoke API keys. The first one closes the service to everybody without a key."""


@keys.command()
@click.option("--tenant", required=True, help="Whose key: 1 to 63 of a-z, 0-9 and -.")
@click.option("--name", default="", help="What the key is for.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_dir_option
def create(tenant: str, name: str, as_json: bool, data_dir: Path | None) -> None:
    """Make a key and show it, this once."""
    with _tenants(data_dir) as tenants:
        secret = tenants.create_key(tenant, name)
    if as_json:
        click.echo(json.dumps({"key": secret, "tenant": tenant, "name": name}))
        return
    click.echo(secret)
    click.echo(f"A key of {tenant}. It can't be shown again: export TINKER_API_KEY=... now.", err=True)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@data_dir_option
def list_keys(as_json: bool, data_dir: Path | None) -> None:
    """Show whose keys exist; never the keys themselves."""
    with _tenants(data_dir) as tenants:
        found = tenants.list_keys()
    if as_json:
        click.echo(json.dumps([asdict(key) for key in found]))
        return
    table = Table("key id", "tenant", "name", "created")
    for key in found:
        created = datetime.fromtimestamp(key.created, UTC).isoformat(timespec="seconds")
        table.add_row(key.key_id, key.tenant, key.name, created)
    Console().print(table)


@keys.command()
@click.argument("key_id")
@data_dir_option
def revoke(key_id: str, data_dir: Path | None) -> None:
    """Make a key invalid at once."""
    with _tenants(data_dir) as tenants:
        tenants.revoke_key(key_id)
    click.echo(f"{key_id} is revoked", err=True)


@contextmanager
def _tenants(data_dir: Path | None) -> Iterator[Tenants]:
    """Yield the keys of a service, running or not; one clear line and exit 2 where that fails."""
    directory = datadir.resolve(data_dir)
    try:
        with _redis_url(directory, named=data_dir is not None) as redis_url:
            store = Store.connect(StoreSettings(redis_url=redis_url, data_dir=directory))
            try:
                yield Tenants(store)
            finally:
                store.close()
    except (OpenRLError, ValueError) as failure:
        click.echo(f"openrl keys: {failure}", err=True)
        raise click.exceptions.Exit(2) from failure


@contextmanager
def _redis_url(directory: Path, *, named: bool) -> Iterator[str]:
    """Yield the store's address: a named directory wins over the environment."""
    given = os.environ.get("OPENRL_REDIS_URL", "")
    if given and not (named and datadir.service(directory)):
        yield given
    else:
        with embedded.running(directory) as redis_url:
            yield redis_url
