"""The notes that results were given to their clients: written beside the answers, many in one trip to the store.

A note that is lost costs nothing but room: its result is kept for days in place of an hour.
"""

from __future__ import annotations

import logging

from openrl.app.greenlets import beside, rest
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.futures import Futures

log = logging.getLogger(__name__)

TOGETHER_S = 0.5
"""Notes are written this often: nothing beside an hour, and each write makes the store sync its log, which a submission
that comes meanwhile waits for."""

AT_ONCE = 256
"""Notes of one write, so that none holds up the store."""


class Delivered:
    """The notes of a process that are still to be written."""

    def __init__(self, futures: Futures) -> None:
        self._futures = futures
        self._notes: list[tuple[str, str]] = []

    def note(self, tenant: str, request_id: str) -> None:
        """Shorten the life of a result soon; nobody waits for it."""
        self._notes.append((tenant, request_id))
        # The first of some, or one more after others were left out.
        if len(self._notes) % AT_ONCE == 1:
            beside(self._write_soon)

    def write(self) -> None:
        """Write what there is now."""
        notes, self._notes = self._notes, []
        for start in range(0, len(notes), AT_ONCE):
            try:
                self._futures.deliver_all(notes[start : start + AT_ONCE])
            except StoreUnavailable as error:
                log.warning("that %d results were delivered wasn't noted: %s", len(notes) - start, error)
                return

    def _write_soon(self) -> None:
        rest(TOGETHER_S)
        self.write()
