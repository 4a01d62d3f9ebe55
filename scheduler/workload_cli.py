"""`openrl workloads`, `openrl explain`, `openrl simulate`: what the scheduler does, why, what it would do elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import click
from rich.table import Table

from openrl.scheduler import demand, remembered
from openrl.scheduler.cli import data_dir_option
from openrl.scheduler.clusters.errors import ClusterUnavailable
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.explaining import Explanation, Row, explain, rows
from openrl.scheduler.needs import Budget, Needs
from openrl.scheduler.priorities import Priorities
from openrl.scheduler.resources import Cluster, Snapshot
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.simulate import figures, simulate
from openrl.scheduler.trace import SHIPPED, read
from openrl.tasks import datadir, tables
from openrl.tasks.errors import OpenRLError
from openrl.tasks.journal import Journal
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.command()
@json_option
@data_dir_option
def workloads(as_json: bool, data_dir: Path) -> None:
    """Show every worker that is wanted: where it is, what waits for it, and why.

    Works on the service of a data directory, and on the cluster that OPENRL_CLUSTER and OPENRL_REDIS_URL name.
    """
    with _observed("workloads", data_dir) as (snapshot, _):
        found = rows(snapshot)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in found]))
        return
    if not found:
        click.echo("no worker is wanted now; each starts with the first operation for it", err=True)
        return
    tables.show(_table(found), sentences="why")


@click.command("explain")
@click.argument("workload")
@json_option
@data_dir_option
def explain_command(workload: str, as_json: bool, data_dir: Path) -> None:
    """Say why WORKLOAD is where it is, or why it waits, and what it takes.

    \b
    openrl explain trainer-qwen-qwen3-8b
    """
    with _observed("explain", data_dir) as (snapshot, store):
        models, environ = Registry(store).models(), _told(store)
        needs = Needs(Budget.from_env(environ), Priorities.from_env(environ))
        found = explain(workload, snapshot, models, needs, demand.owners(Journal(store), models))
    if as_json:
        click.echo(json.dumps(found.as_json()))
        return
    for text in _lines(found):
        click.echo(text)


@click.command("simulate")
@click.argument("trace")
@click.option("--json", "as_json", is_flag=True, help="Print one line of JSON a figure, as `make bench` does.")
def simulate_command(trace: str, as_json: bool) -> None:
    """Run the scheduler's decisions on a cluster in memory, by TRACE: a file, or one that is shipped.

    \b
    Shipped: burst, mixed, tenants
    openrl simulate mixed
    openrl simulate ./our-pool.json --json
    """
    try:
        outcome = simulate(read(trace))
    except OpenRLError as refused:
        click.echo(f"openrl simulate: {refused}", err=True)
        raise click.exceptions.Exit(2) from refused
    found = figures(outcome)
    if as_json:
        for figure in found:
            click.echo(json.dumps(figure))
        return
    table = Table("figure", "value", "unit", title=f"{outcome.jobs} jobs in {outcome.simulated_s / 3600:.1f} h")
    for figure in found:
        table.add_row(str(figure["name"]), f"{figure['value']:g}", str(figure["unit"]))
    tables.show(table)
    for name, reason in sorted(outcome.unmet.items()):
        click.echo(f"never served: {name}: {reason}")


assert SHIPPED == ("burst", "mixed", "tenants"), "the help names them"


@contextmanager
def _observed(command: str, data_dir: Path) -> Iterator[tuple[Snapshot, Store]]:
    """Yield what the scheduler sees now, and the store; one line and exit 2 where that can't be had."""
    from openrl.scheduler.reconcile import Reconciler

    try:
        store = _store(data_dir)
        try:
            environ = _told(store)
            settings = SchedulerSettings.from_env(environ)
            cluster, version = _cluster(store, settings)
            budget = Budget.from_env(environ)
            yield Reconciler(store, settings, cluster=cluster, version=version, budget=budget).observe(), store
        finally:
            store.close()
    except (OpenRLError, ClusterUnavailable, ValueError) as refused:
        click.echo(f"openrl {command}: {refused}", err=True)
        raise click.exceptions.Exit(2) from refused


def _store(data_dir: Path) -> Store:
    """Return the store of the service that runs on the directory, else the one that the environment names."""
    service = datadir.service(data_dir)
    named = {"OPENRL_DATA_DIR": str(data_dir)}
    if service is not None:
        named["OPENRL_REDIS_URL"] = service.redis_url
    elif not os.environ.get("OPENRL_REDIS_URL"):
        raise ValueError(f"no service runs on {data_dir}; start one with `openrl up`, or name its --data-dir")
    return Store.connect(StoreSettings.from_env({**os.environ, **named}))


def _told(store: Store) -> Mapping[str, str]:
    """Return what the service's scheduler was told; where none has started yet, what our own environment says."""
    known = remembered.kept(store)
    return os.environ if known is None else known


def _cluster(store: Store, settings: SchedulerSettings) -> tuple[Cluster, str]:
    if settings.cluster == "local":
        return LocalCluster.as_watched(store), ""
    from openrl.scheduler.clusters.kubernetes import connect

    return connect(store, os.environ, on_change=lambda: None)


def _table(found: list[Row]) -> Table:
    table = Table(title="workloads")
    for name in ("name", "phase", "accelerator", "node", "owner", "priority", "waiting", "why"):
        table.add_column(name, no_wrap=name == "name")
    for row in found:
        waiting = f"{row.waiting}, {row.oldest_s:.0f} s" if row.waiting else ""
        table.add_row(row.name, row.phase, row.claim, row.node, row.owner, str(row.priority or ""), waiting, row.reason)
    return table


def _lines(found: Explanation) -> list[str]:
    row = found.row
    waiting = f"{row.waiting} operations, the oldest for {row.oldest_s:.1f} s" if row.waiting else "nothing"
    pairs = [
        ("workload", f"{row.name} ({row.kind} of {row.base}, pool {row.pool})"),
        ("owner", row.owner),
        ("priority", str(row.priority or "")),
        ("phase", row.phase),
        ("why", row.reason),
        ("place", found.place),
        ("beside", ", ".join(found.beside)),
        ("waiting", waiting),
        ("takes", found.size),
        ("next", "; ".join(found.next) or "nothing changes"),
    ]
    return [f"{label:<9} {value}" for label, value in pairs if value]
