"""What Celery is told of turns on an accelerator: events beside those of the tasks.

A worker that takes turns notes here when one is granted to it, and what parking and restoring took; the worker's own
Celery loop sends that (`accelerator-granted`, `-parked`, `-restored`, `-failed`). Knows neither how turns are granted
nor what is parked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from openrl.timeslice.seat import Event

MOST_UNSENT = 1000
"""While the broker is away, so many events are kept, the newest ones."""

_unsent: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_UNSENT)


def tell(event: Event) -> None:
    """Note what happened, to be sent soon. For any thread; never waits."""
    fields = {
        "timestamp": time.time(),
        "accelerator": event.turn.accelerator,
        "owner": event.turn.owner,
        "token": event.turn.token,
        "seconds": event.seconds,
        "resident_bytes": event.resident_bytes,
    }
    _unsent.append((f"accelerator-{event.kind}", fields))


def take() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is to be sent, each once: the type and the fields of an event."""
    while _unsent:
        yield _unsent.popleft()
