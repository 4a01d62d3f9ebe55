"""Who gets a slot next, and who gives one up, where an engine lets sequences wait and go on at any time. Pure.

Slots are shared between tenants, sequence by sequence: a free one goes to the tenant with the fewest, and a tenant
that has two fewer than another takes one from it, the youngest. As `slots` does for the torch engine, without places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def next_tenant(waiting: Iterable[str], running: Counter[str]) -> str | None:
    """Return the tenant that gets a free slot: of those that wait, oldest first, the one with the fewest."""
    return min(dict.fromkeys(waiting), key=lambda tenant: running[tenant], default=None)


def giver(waiting: Iterable[str], running: Counter[str]) -> str | None:
    """Return the tenant that gives up a slot, when none is free; None: all have their share."""
    poorest = next_tenant(waiting, running)
    if poorest is None or not running:
        return None
    richest = max(running, key=lambda tenant: running[tenant])
    return richest if running[richest] >= running[poorest] + 2 else None
