"""The `openrl` command: a group whose subcommands the packages register themselves.

Each package names its commands in the entry-point group `openrl.commands`. A command is imported only
when it is used, so that a machine with the core alone still has `openrl --help`.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import click

GROUP = "openrl.commands"

SUMMARIES = {
    "up": "Run the whole service on this machine.",
    "keys": "Create, list, rotate and revoke API keys.",
    "checkpoints": "List, delete, publish and keep checkpoints.",
    "runs": "Cancel what waits of a run.",
    "requests": "Cancel one operation or sample.",
    "quota": "Show and set what tenants may have.",
    "usage": "Show what tenants used, by run and day.",
    "audit": "Show what was done to keys, checkpoints and quotas.",
    "accelerators": "Show turns on accelerators.",
    "workloads": "Show every worker that is wanted, and why.",
    "explain": "Say why a worker is where it is, or waits.",
    "simulate": "Run the scheduler on a cluster in memory.",
    "model": "Get base models that can be tried at once.",
    "flower": "Show queues and operations in the browser.",
    "celery": "Ask the workers, through the celery CLI.",
    "env": "Print the environment of a running service.",
    "prepare": "Make a store ready for parts started by hand.",
    "cluster": "Make what an installation on Kubernetes needs.",
}
"""Shown by `openrl --help`, which imports no command."""

_EXTRAS = {
    **dict.fromkeys(("keys", "checkpoints", "runs", "requests", "quota", "usage", "audit", "accelerators"), "api"),
    "model": "trainer",
}


class _Commands(click.Group):
    """A group that finds its subcommands among the installed packages."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *(entry.name for entry in entry_points(group=GROUP))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        for entry in entry_points(group=GROUP, name=cmd_name):
            return _load(entry)
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, SUMMARIES.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _load(entry: EntryPoint) -> click.Command:
    try:
        command = entry.load()
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("openrl"):
            raise
        extra = _EXTRAS.get(entry.name, "local")
        raise click.ClickException(
            f"`openrl {entry.name}` needs {missing.name}, which isn't installed: pip install 'openrl-service[{extra}]'"
        ) from missing
    assert isinstance(command, click.Command)
    return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="openrl-service")
def main() -> None:
    """Self-hosted post-training for language models, behind the Tinker SDK.

    \b
    Start here:
      openrl model fetch smollm2-135m-instruct --to models/HuggingFaceTB/SmolLM2-135M-Instruct
      openrl up --model HuggingFaceTB/SmolLM2-135M-Instruct=models/HuggingFaceTB/SmolLM2-135M-Instruct
    """


if __name__ == "__main__":
    main()
