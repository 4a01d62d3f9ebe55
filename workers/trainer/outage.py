"""Whether the store answers, as one engine has found. Knows nothing of what is done about it."""

from __future__ import annotations

import logging

from openrl.tasks.errors import StoreUnavailable

log = logging.getLogger(__name__)


class Outage:
    """Whether the store answers; the log tells each change once."""

    def __init__(self) -> None:
        self._stands = False

    def note(self, error: StoreUnavailable) -> None:
        """Note that it didn't."""
        if not self._stands:
            log.error("%s; waiting for it", error)
        self._stands = True

    def end(self) -> None:
        """Note that it did."""
        if self._stands:
            log.info("the store answers again")
        self._stands = False
