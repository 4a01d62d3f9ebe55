"""What `openrl up` says: one report when it serves, one line for each thing worth knowing after that.

The report goes to stdout, the lines to stderr, so that `--json` gives a program one line to read. Plain
text where the output isn't a terminal; nothing that one would copy is ever wrapped.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

TAIL_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A service that serves. `models`: name and directory of each."""

    base_url: str
    data_dir: Path
    store: str
    models: tuple[tuple[str, Path], ...]
    accelerators: int
    has_keys: bool
    as_json: bool = False


def started(service: Started) -> None:
    """Say that the service serves, and what to do next."""
    if service.as_json:
        sys.stdout.write(as_json(service) + "\n")
        sys.stdout.flush()
        return
    console = Console(highlight=False, soft_wrap=True)
    for text in as_text(service):
        console.print(text)


def line(text: str) -> None:
    """Say one thing to the operator, on stderr."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(f"[dim]openrl:[/dim] {escape(text)}")


def as_json(service: Started) -> str:
    """Return the report as one line of JSON."""
    return json.dumps({
        "base_url": service.base_url,
        "pid": os.getpid(),
        "data_dir": str(service.data_dir),
        "log_dir": str(service.data_dir / "logs"),
        "models": [{"name": name, "path": str(path)} for name, path in service.models],
        "accelerators": service.accelerators,
        "keys": service.has_keys,
    })  # fmt: skip


def as_text(service: Started) -> list[str]:
    """Return the report's lines, in rich's markup."""
    directory = f"--data-dir {shlex.quote(str(service.data_dir))}"
    key = "tml-...   # one that `openrl keys create` has shown" if service.has_keys else "tml-local"
    where = f"{service.accelerators}" if service.accelerators else "none; workers share the CPU"
    models = [("models" if not index else "", f"{name}  [dim]{escape(str(path))}[/dim]")
              for index, (name, path) in enumerate(service.models)]  # fmt: skip
    rows = [
        *models,
        ("data", escape(str(service.data_dir))),
        ("logs", escape(str(service.data_dir / "logs"))),
        ("store", escape(service.store)),
        ("accelerators", where),
    ]
    return [
        f"[bold green]OpenRL serves on {service.base_url}[/bold green]",
        "",
        f"  [bold]export TINKER_BASE_URL={service.base_url}[/bold]",
        f"  [bold]export TINKER_API_KEY={escape(key)}[/bold]",
        "",
        *(f"  {label:<13} {value}" for label, value in rows),
        "",
        "Workers start with the first request for them. Next:",
        f"  openrl flower {escape(directory)}  [dim]# operations in the browser[/dim]",
        f"  openrl keys create --tenant NAME {escape(directory)}  [dim]# from then on, keys are required[/dim]",
        "Ctrl-C stops everything.",
    ]


def failure(name: str, log: Path) -> str:
    """Return why a part didn't come up: its log's path and last lines."""
    try:
        last = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    except FileNotFoundError:
        last = []
    return "\n  | ".join([f"the {name} did not come up; see {log}", *last])


def refusal(name: str, log: Path) -> str:
    """Return the line in which a part refused its settings."""
    lines = log.read_text(errors="replace").splitlines()
    return f"the {name} refuses its settings: {lines[-1] if lines else f'see {log}'}"
