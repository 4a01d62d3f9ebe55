"""What the running scheduler was told, kept in the store: who explains its decisions goes by that, not by a shell.

Only the variables that its settings and its sizes read, by name; no addresses and no secrets are among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from openrl.tasks.schema import SCHEDULER
from openrl.tasks.store import Store, translated

TOLD = "openrl:scheduler:told"
"""string: JSON of the variables that the scheduler which started last was told"""


def keep(store: Store, told: Mapping[str, str]) -> None:
    """Keep what the scheduler was told."""
    with translated():
        store.redis.set(TOLD, json.dumps(SCHEDULER.numbered({"told": dict(told)}), sort_keys=True))


def kept(store: Store) -> dict[str, str] | None:
    """Return what the scheduler that started last was told; None where none has said so."""
    with translated():
        text = store.redis.get(TOLD)
    return None if text is None else dict(SCHEDULER.current(json.loads(text))["told"])
