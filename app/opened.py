"""The store that an operator's command works on: the running service's, the one OPENRL_REDIS_URL names, or the data
directory's own, started for the command alone, so that a key can exist before the service is opened to a network."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from openrl.tasks import datadir, embedded, upgrade
from openrl.tasks.errors import InvalidRequest, OpenRLError
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

data_dir_option = click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    help="The service's data directory; else OPENRL_DATA_DIR, else ~/.openrl.",
)

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@contextmanager
def opened(command: str, data_dir: Path | None, *, begins: bool = False) -> Iterator[Store]:
    """Yield the store of a service, running or not; one clear line and exit 2 where that or the work on it fails.

    `begins`: the command makes sense before a service was ever started, and may make its data directory.
    """
    directory = datadir.resolve(data_dir)
    try:
        with _redis_url(directory, named=data_dir is not None, begins=begins) as redis_url:
            store = Store.connect(StoreSettings(redis_url=redis_url, data_dir=directory))
            try:
                upgrade.check(store)
                yield store
            finally:
                store.close()
    except (OpenRLError, ValueError) as failure:
        click.echo(f"openrl {command}: {failure}", err=True)
        raise click.exceptions.Exit(2) from failure


@contextmanager
def _redis_url(directory: Path, *, named: bool, begins: bool) -> Iterator[str]:
    """Yield the store's address: a named directory wins over the environment."""
    given = os.environ.get("OPENRL_REDIS_URL", "")
    if given and not (named and datadir.service(directory)):
        yield given
    elif not (begins or embedded.is_kept(directory) or datadir.held(directory)):
        raise InvalidRequest(
            f"{directory} has no store and no service runs on it: name the service's directory by --data-dir or "
            "OPENRL_DATA_DIR, or its store by OPENRL_REDIS_URL"
        )
    else:
        with embedded.running(directory) as redis_url:
            yield redis_url
