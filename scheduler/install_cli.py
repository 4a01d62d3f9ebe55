"""The commands of an installation whose parts something else starts: `prepare` and `cluster`.

Each may be run again at any time: it does what is missing, and says in one line what that was. No secret is printed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from openrl.scheduler import engines
from openrl.scheduler import models as base_models
from openrl.scheduler import prepare as preparing
from openrl.tasks.errors import OpenRLError
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

if TYPE_CHECKING:
    from openrl.scheduler.clusters.kube_api import KubeApi

_PATIENCE_S = 60.0


@contextmanager
def _one_line(command: str) -> Iterator[None]:
    """Say what was refused in one line, and exit with status 2."""
    try:
        yield
    except (OpenRLError, ValueError) as refused:
        click.echo(f"openrl {command}: {refused}", err=True)
        raise click.exceptions.Exit(2) from refused
    except OSError as trouble:
        click.echo(f"openrl {command}: cannot use {trouble.filename}: {trouble.strerror}", err=True)
        raise click.exceptions.Exit(2) from trouble


@contextmanager
def _store() -> Iterator[Store]:
    store = Store.connect(StoreSettings.from_env(os.environ))
    try:
        yield store
    finally:
        store.close()


@contextmanager
def _cluster(command: str, namespace: str) -> Iterator[KubeApi]:
    """Connect to the cluster that we run in, or that OPENRL_KUBECONFIG or the usual file names."""
    from openrl.scheduler.clusters.kube_api import ApiError, KubeApi

    with _one_line(f"cluster {command}"):
        api = KubeApi.connect(namespace, kubeconfig=os.environ.get("OPENRL_KUBECONFIG", ""))
        try:
            yield api
        except ApiError as refused:
            raise ValueError(f"the Kubernetes API refused it: {refused}") from refused
        finally:
            api.close()


@click.command()
@click.option("--model", "models", multiple=True, metavar="NAME[=PATH]",
              help="A base model to serve, as for `openrl up`. Repeatable. "
                   "[env var: OPENRL_MODELS, separated by commas]")  # fmt: skip
@click.option("--patience", type=click.FloatRange(min=0), default=_PATIENCE_S, show_default=True, metavar="SECONDS",
              help="How long to wait for the store.")  # fmt: skip
def prepare(models: tuple[str, ...], patience: float) -> None:
    """Make a store and a data directory ready for parts that something else starts.

    `openrl up` needs none of it. Brings older data up to date, serves these base models and no others, and publishes
    the environment's quotas. Needs OPENRL_REDIS_URL and OPENRL_DATA_DIR, and of the samplers' settings
    (OPENRL_SAMPLER_...) those that say which adapters they serve. May run again at any time.

    \b
      openrl prepare --model Qwen/Qwen3-4B=/models/qwen3-4b
      python -m openrl.app &
      python -m openrl.scheduler &
    """
    names = models or tuple(name.strip() for name in os.environ.get("OPENRL_MODELS", "").split(",") if name.strip())
    with _one_line("prepare"), _store() as store:
        served = engines.as_served(base_models.resolve(names), engines.as_set(os.environ), os.environ)
        done = preparing.prepare(store, served, patience_s=patience)
    old = "" if done.upgraded_from is None else f"; upgraded the data from schema {done.upgraded_from}"
    new = "" if done.new_epoch is None else f"; epoch {done.new_epoch} begins"
    click.echo(f"serving {', '.join(done.models) or 'no base model'}{old}{new}", err=True)


@click.group()
def cluster() -> None:
    """Make the Secrets of an installation on Kubernetes. What is there already is left alone."""


_namespace_option = click.option("--namespace", default="", help="Where the Secrets are; else the pod's own.")


@cluster.command()
@click.option("--redis", default="", metavar="NAME", help="Make this one: a password of the store, and its address.")
@click.option("--redis-host", default="openrl-redis:6379", show_default=True, help="HOST:PORT in that address.")
@click.option("--flower", default="", metavar="NAME", help="Make this one: the login of Flower.")
@_namespace_option
def secrets(redis: str, redis_host: str, flower: str, namespace: str) -> None:
    """Make passwords that are missing."""
    with _cluster("secrets", namespace) as api:
        from openrl.scheduler.clusters import secrets as made

        for name, make in ((redis, lambda: made.store_password(redis_host)), (flower, made.flower_login)):
            if name:
                _say(name, made_now=made.ensure(api, name, make))


@cluster.command("admin-key")
@click.option(
    "--secret", default="openrl-admin-key", show_default=True, metavar="NAME", help="The Secret to keep it in."
)
@click.option("--patience", type=click.FloatRange(min=0), default=_PATIENCE_S, show_default=True, metavar="SECONDS",
              help="How long to wait for the store.")  # fmt: skip
@_namespace_option
def admin_key(secret: str, patience: float, namespace: str) -> None:
    """Make the first key, which may do everything, unless its Secret is there.

    \b
    kubectl -n openrl get secret openrl-admin-key -o jsonpath='{.data.key}' | base64 -d
    """
    with _cluster("admin-key", namespace) as api, _store() as store:
        from openrl.scheduler.clusters import secrets as made
        from openrl.tasks.tenants import Tenants

        preparing.wait_for(store, patience)
        _say(secret, made_now=made.ensure_admin_key(api, Tenants(store), secret))


def _say(name: str, *, made_now: bool) -> None:
    click.echo(f"Secret {name}: {'made' if made_now else 'there already'}", err=True)
