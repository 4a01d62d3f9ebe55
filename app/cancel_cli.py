"""`openrl runs cancel`, `openrl requests cancel`: what an operator does with work that nobody should wait for.

Cooperative: what a worker is carrying out is finished; what waits is failed, and its client is told who did it.
"""

from __future__ import annotations

import json
from pathlib import Path

import click

from openrl.app.opened import data_dir_option, json_option, opened
from openrl.tasks import keys
from openrl.tasks.cancelling import BY_OPERATOR, Answer, Cancelling

_SAID: dict[Answer, str] = {
    "cancelled": "is cancelled",
    "asked": "is cancelled as soon as its trainer looks, unless it has begun",
    "finished": "had ended before",
}


@click.group()
def runs() -> None:
    """Cancel the work of a run."""


@runs.command("cancel")
@click.argument("run_id", metavar="RUN")
@json_option
@data_dir_option
def cancel_run(run_id: str, as_json: bool, data_dir: Path | None) -> None:
    """Fail all that RUN has waiting, and the unfinished samples of its weights.

    The run itself stays, and takes new operations; its gradient is void if a forward_backward was among them.
    """
    with opened("runs", data_dir) as store:
        work = Cancelling(store)
        cancelled, asked = work.cancel_run(work.owner_of(run_id), run_id, BY_OPERATOR)
    if as_json:
        click.echo(json.dumps({"run_id": run_id, "cancelled": cancelled, "asked": asked}))
        return
    click.echo(f"{run_id}: {cancelled} cancelled, {asked} more unless its trainer has begun them")


@click.group()
def requests() -> None:
    """Cancel one operation or sample."""


@requests.command("cancel")
@click.argument("request_id", metavar="ID")
@json_option
@data_dir_option
def cancel_request(request_id: str, as_json: bool, data_dir: Path | None) -> None:
    """Fail the operation or sample with the request id ID, as the logs, Flower and its client know it."""
    with opened("requests", data_dir) as store:
        work = Cancelling(store)
        answer = work.cancel(work.owner_of(keys.parse_request(request_id).parent), request_id, BY_OPERATOR)
    click.echo(json.dumps({"request_id": request_id, "state": answer}) if as_json else f"{request_id} {_SAID[answer]}")
