"""The queues of full runs' pools at the broker, which go with their pools: each such run has queues of its own.

A base model's queues stay, since there are few. What is deleted here by mistake of time is a ring alone, and the next
one makes its queue again.
"""

from __future__ import annotations

import logging
from typing import Any

from openrl.tasks import keys
from openrl.tasks.celery import celery, notice_queue, queue_name
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)


@translated()
def note_pool(store: Store, family: str, slug: str) -> None:
    """Note that Celery may have queues of a pool, if it is a full run's; a base model's aren't noted."""
    if keys.is_full(slug):
        store.redis.sadd(keys.RUNG, f"{family} {slug}")


@translated()
def forget_idle(store: Store) -> int:
    """Delete the queues of every full run's pool that has nothing to do and no worker; return of how many."""
    forgotten = 0
    for member in sorted(store.redis.smembers(keys.RUNG)):
        family, _, slug = member.decode().partition(" ")
        tenants = store.script("queues_idle")(family, slug)
        if tenants is not None:
            names = [notice_queue(family, slug), *(queue_name(family, slug, tenant.decode()) for tenant in tenants)]
            forgotten += _deleted(store, family, slug, names, tenants)
    return forgotten


def _deleted(store: Store, family: str, slug: str, names: list[str], tenants: list[bytes]) -> bool:
    try:
        with celery.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1)
            _delete(connection.default_channel, names)
    except Exception as failure:  # whatever the broker's client raises: it is tried again
        log.warning("the queues of %s can't be deleted now (%s)", slug, type(failure).__name__)
        note_pool(store, family, slug)
        if tenants:
            store.redis.sadd(keys.queues(family, slug), *tenants)
        return False
    return True


def _delete(channel: Any, names: list[str]) -> None:
    """Delete each queue's list, and the sets that say that it is one: Celery's exchange of it has the same name."""
    prefixes = (channel.keyprefix_queue, channel.keyprefix_binding_permanent)
    with channel.conn_or_acquire() as client:
        client.delete(*names, *(prefix % name for prefix in prefixes for name in names))
