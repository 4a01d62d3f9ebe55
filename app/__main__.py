"""`python -m openrl.app`: serve the API until SIGTERM."""

from __future__ import annotations

import os
import sys

from gunicorn.arbiter import Arbiter

from openrl.app.gunicorn import Server
from openrl.app.settings import AppSettings
from openrl.tasks.process import die_with_parent, raise_open_files
from openrl.tasks.settings import StoreSettings


def main() -> int:
    """Serve; 2 where a setting makes no sense, or the data is another version's."""
    die_with_parent()
    try:
        StoreSettings.from_env(os.environ)
        settings = AppSettings.from_env(os.environ)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.app: {nonsense}\n")
        return 2
    raise_open_files()
    master = os.getpid()
    try:
        Server(settings).run()
    except SystemExit as end:  # raised in each worker too, which ends as gunicorn says
        if end.code != Arbiter.APP_LOAD_ERROR or os.getpid() != master:
            raise
        sys.stderr.write("openrl.app: another version's data lies here; a line above says which, and what to do\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
