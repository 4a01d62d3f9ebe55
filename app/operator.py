"""`openrl quota`, `openrl usage`, `openrl audit`: what tenants may have, what they used, what was done."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from openrl.app.opened import data_dir_option, json_option, opened
from openrl.tasks import audit as log
from openrl.tasks import keys, tables, walk
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.quotas import NAMES, Quotas, Standing
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage, by_run_and_day

DAY_S = 24 * 3600
MOST_DAYS = 400

_POWERS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


class _ShowFirst(click.Group):
    """A group that shows when no command is named: `openrl quota alice` is `openrl quota show alice`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("-h", "--help")):
            args = ["show", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_ShowFirst)
def quota() -> None:
    """Show and set what tenants may have. `openrl quota [TENANT]` shows it."""


@quota.command()
@click.argument("tenant", required=False)
@json_option
@data_dir_option
def show(tenant: str | None, as_json: bool, data_dir: Path | None) -> None:
    """Show what a tenant may have and has now; all tenants if none is named."""
    with opened("quota", data_dir) as store:
        quotas = Quotas(store)
        names = [_known(store, tenant)] if tenant else walk.tenants(store)
        found = [quotas.standing(name) for name in names]
    if as_json:
        told = [_told(standing) for standing in found]
        click.echo(json.dumps(told[0] if tenant else told))
        return
    table = Table("tenant", "quota", "in use", "limit", "set for")
    for standing in found:
        for name in NAMES:
            limit = getattr(standing.limits, name)
            own = "this tenant" if name in standing.own else "all"
            table.add_row(standing.tenant, name, f"{getattr(standing.use, name)}", f"{limit or 'none'}", own)
    tables.show(table)


def _limit_options(command: Callable[..., None]) -> Callable[..., None]:
    for name in reversed(NAMES):
        command = click.option(f"--{name.replace('_', '-')}", default=None, metavar="N")(command)
    return command


@quota.command("set")
@click.argument("tenant")
@_limit_options
@json_option
@data_dir_option
def set_quota(tenant: str, as_json: bool, data_dir: Path | None, **given: str | None) -> None:
    """Give a tenant quotas of its own, at once. N is a number, or one with k, M, G or T; 0 or none is no limit."""
    with opened("quota", data_dir, begins=True) as store:
        asked = {name: _amount(name, text) for name, text in given.items() if text is not None}
        if not asked:
            raise InvalidRequest(f"say which: {', '.join('--' + name.replace('_', '-') for name in NAMES)}")
        Quotas(store).set(keys.check_tenant(tenant), asked)
        standing = Quotas(store).standing(tenant)
    if as_json:
        click.echo(json.dumps(_told(standing)))
    else:
        limits = ", ".join(f"{name} {limit or 'none'}" for name, limit in asked.items())
        click.echo(f"{tenant}: {limits}", err=True)


@quota.command()
@click.argument("tenant")
@data_dir_option
def reset(tenant: str, data_dir: Path | None) -> None:
    """Let the service's own quotas count for a tenant again."""
    with opened("quota", data_dir) as store:
        Quotas(store).reset(_known(store, tenant))
    click.echo(f"{tenant} has the quotas of the service", err=True)


@click.command()
@click.argument("tenant", required=False)
@click.option("--days", default=7, type=click.IntRange(1, MOST_DAYS), help="How many days back, today included: 7.")
@json_option
@data_dir_option
def usage(tenant: str | None, days: int, as_json: bool, data_dir: Path | None) -> None:
    """Show what a tenant used, by day (UTC) and run; all tenants if none is named."""
    before = time.time() // DAY_S * DAY_S + DAY_S
    with opened("usage", data_dir) as store:
        names = [_known(store, tenant)] if tenant else walk.tenants(store)
        rows = [
            {"tenant": name, "day": _day(day), "run": run, **_amounts(used)}
            for name in names
            for (day, run), used in by_run_and_day(Usage(store).between(name, before - days * DAY_S, before)).items()
        ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    columns = ("trained_tokens", "forward_tokens", "prompt_tokens", "sampled_tokens", "seconds", "gigabyte_hours")
    table = Table("tenant", "day", "run or session", *(column.replace("_", " ") for column in columns))
    for row in rows:
        table.add_row(*(str(row[name]) for name in ("tenant", "day", "run")), *(f"{row[name]:g}" for name in columns))
    tables.show(table)


@click.command()
@click.argument("tenant", required=False)
@click.option("--day", default="", help="Which day (UTC), such as 2027-01-31; else today.")
@click.option("--event-type", default="all", type=click.Choice(list(log.KINDS)), help="Which events.")
@click.option("--unknown", is_flag=True, help="Show refused requests whose key was nobody's, in place of a tenant's.")
@json_option
@data_dir_option
def audit(tenant: str | None, day: str, event_type: str, unknown: bool, as_json: bool, data_dir: Path | None) -> None:
    """Show what was done to keys, checkpoints and quotas; of all tenants, and of the service, if none is named."""
    with opened("audit", data_dir) as store:
        since = _since(day)
        names = [_known(store, tenant)] if tenant else [""] if unknown else ["", *walk.tenants(store)]
        found = [
            {"tenant": name, "timestamp": _time(entry.at), "event": entry.event, **entry.details}
            for name in names
            for entry in log.entries(store, name, since=since, before=since + DAY_S, kind=event_type)
            if name or unknown is (entry.event == "login_refused")
        ]
    if as_json:
        click.echo(json.dumps(found))
        return
    table = Table("time", "tenant", "event", "details")
    for row in sorted(found, key=lambda row: row["timestamp"]):
        details = ", ".join(f"{k}={v}" for k, v in row.items() if k not in ("tenant", "timestamp", "event"))
        table.add_row(row["timestamp"], row["tenant"], row["event"], details)
    tables.show(table)


def _told(standing: Standing) -> dict[str, Any]:
    return {
        "tenant": standing.tenant,
        "limits": asdict(standing.limits),
        "own": list(standing.own),
        "use": asdict(standing.use),
    }


def _known(store: Store, tenant: str) -> str:
    """Return the tenant's name, if there is such a tenant."""
    names = walk.tenants(store)
    if keys.check_tenant(tenant) not in names:
        raise InvalidRequest(f"no tenant {tenant!r}; there are {', '.join(names) or 'none yet'}")
    return tenant


def _amount(name: str, text: str) -> int:
    found = re.fullmatch(r"(\d{1,15})([kmgt]?)b?", text.strip().lower())
    if text.strip().lower() == "none":
        return 0
    if not found:
        raise InvalidRequest(f"--{name.replace('_', '-')} is {text!r}; say a number, or one with k, M, G or T")
    return int(found[1]) * _POWERS[found[2]]


def _amounts(used: dict[str, int]) -> dict[str, int | float]:
    """Return what was used, each by its name, times in seconds and storage in gigabyte-hours."""
    whole = (
        "trained_tokens",
        "forward_tokens",
        "prompt_tokens",
        "sampled_tokens",
        "operations",
        "samples",
        "checkpoints",
    )
    return {
        **{name: used.get(name, 0) for name in whole},
        "seconds": used.get("microseconds", 0) / 1e6,
        "gigabyte_hours": used.get("byte_seconds", 0) / 1e9 / 3600,
    }


def _since(day: str) -> float:
    try:
        found = date.fromisoformat(day) if day else datetime.now(UTC).date()
    except ValueError:
        raise InvalidRequest(f"--day is {day!r}; say a date such as 2027-01-31") from None
    return datetime(found.year, found.month, found.day, tzinfo=UTC).timestamp()


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
