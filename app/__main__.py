"""`python -m openrl.app`: serve the API until SIGTERM."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from openrl.app.gunicorn import Server
from openrl.app.settings import AppSettings
from openrl.tasks.process import die_with_parent, raise_open_files
from openrl.tasks.settings import StoreSettings

FILES_BESIDE = 128
"""Open files of a process that aren't clients' connections: the store's, results and exports being read, logs."""


def main() -> int:
    """Serve; 2 where a setting makes no sense."""
    die_with_parent()
    try:
        StoreSettings.from_env(os.environ)
        settings = within(AppSettings.from_env(os.environ), open_files=raise_open_files())
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.app: {nonsense}\n")
        return 2
    Server(settings).run()
    return 0


def within(settings: AppSettings, *, open_files: int) -> AppSettings:
    """Return settings whose connections fit the files that this process may open, and say so where they didn't.

    Raises:
        ValueError: hardly a connection would fit.
    """
    room = open_files - FILES_BESIDE
    if settings.worker_connections <= room:
        return settings
    if room < FILES_BESIDE:
        raise ValueError(f"{open_files} open files are allowed, which is too few: raise the hard limit (ulimit -Hn)")
    sys.stderr.write(
        f"openrl.app: {open_files} open files are allowed, so each process holds {room} connections at a time, not "
        f"{settings.worker_connections}; raise the hard limit (ulimit -Hn), or lower OPENRL_WORKER_CONNECTIONS\n"
    )
    return replace(settings, worker_connections=room)


if __name__ == "__main__":
    sys.exit(main())
