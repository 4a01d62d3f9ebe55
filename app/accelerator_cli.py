"""`openrl accelerators`: who holds and who waits, how much of the time is used; ending a turn by hand."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from openrl.app.opened import data_dir_option, json_option, opened
from openrl.tasks import audit, tables
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.store import translated
from openrl.timeslice.errors import Refused
from openrl.timeslice.standing import Standing, standing
from openrl.timeslice.turn import Turns

SHOWN_SWITCHES = 5


@click.group(invoke_without_command=True)
@json_option
@data_dir_option
@click.pass_context
def accelerators(ctx: click.Context, as_json: bool, data_dir: Path | None) -> None:
    """Show the turns on accelerators: holder, waiters, duty cycle, last switches."""
    if ctx.invoked_subcommand is not None:
        return
    with opened("accelerators", data_dir) as store, translated():
        turns = Turns(store.redis)
        found = [standing(turns, name) for name in turns.accelerators()]
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found]))
        return
    if not found:
        click.echo("no accelerator was ever taken in turns here", err=True)
        return
    for table in (_turns(found), _switches(found)):
        tables.show(table)


@accelerators.command()
@click.argument("accelerator")
@click.argument("token", type=int)
@data_dir_option
def end(accelerator: str, token: int, data_dir: Path | None) -> None:
    """End the turn TOKEN on ACCELERATOR, where the death of its holder can't be proved from here.

    First see that no process of the holder has anything on the accelerator any more (nvidia-smi): nothing checks it.
    """
    with opened("accelerators", data_dir) as store, translated():
        turns = Turns(store.redis)
        present = standing(turns, accelerator).present
        try:
            turns.end(accelerator, token)
        except Refused:
            raise InvalidRequest(
                f"turn {token} doesn't run on {accelerator}; `openrl accelerators` has those"
            ) from None
        owner = present.owner if present else ""
        audit.record_for_service(store, "accelerator_turn_ended", accelerator=accelerator, token=token, owner=owner)
    click.echo(f"turn {token} on {accelerator} has ended", err=True)


def _turns(found: list[Standing]) -> Table:
    table = Table("name", "holder", "state", "token", "held", "waiting", "duty", "turns", title="turns on accelerators")
    for one in found:
        now = one.present
        held = [now.owner, now.state, str(now.token), f"{now.held_s:.1f} s"] if now else ["free", "", "", ""]
        waiting = ", ".join(f"{owner} ({seconds:.1f} s)" for owner, seconds in one.waiting.items())
        table.add_row(one.accelerator, *held, waiting, f"{one.duty_cycle:.1%}", str(one.turns))
    return table


def _switches(found: list[Standing]) -> Table:
    table = Table("name", "ended", "owner", "how", "held", "waited", "park + restore", title="last switches")
    for one in found:
        for row in one.switches[:SHOWN_SWITCHES]:
            ended = datetime.fromtimestamp(row["ended"], UTC).isoformat(timespec="seconds")
            cost = f"{(row['park_s'] + row['restore_s']) * 1e3:.1f} ms"
            waits = (f"{row['held_s']:.1f} s", f"{row['waited_s']:.1f} s")
            table.add_row(one.accelerator, ended, row["owner"], row["how"], *waits, cost)
    return table
