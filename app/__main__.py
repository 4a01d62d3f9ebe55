"""`python -m openrl.app`: serve the API until SIGTERM."""

from __future__ import annotations

import os
import sys

from openrl.app.gunicorn import Server
from openrl.app.settings import AppSettings
from openrl.tasks.process import die_with_parent


def main() -> int:
    """Serve; 2 where a setting makes no sense."""
    die_with_parent()
    try:
        settings = AppSettings.from_env(os.environ)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.app: {nonsense}\n")
        return 2
    Server(settings).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
