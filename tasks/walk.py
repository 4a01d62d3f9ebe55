"""All that a tenant has, some rows at a time: what measurements, sweeps and upgrades go through.

No picture of one moment: what is written meanwhile is seen or not. Knows not what any of it is looked at for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from openrl.tasks import keys
from openrl.tasks.records import Checkpoint, Sampler
from openrl.tasks.store import Store

_AT_ONCE = 500


def tenants(store: Store) -> list[str]:
    """Return the tenants that ever opened a session or got a key."""
    return sorted(member.decode() for member in store.redis.smembers(keys.TENANTS))


def samplers(store: Store, tenant: str) -> Iterator[tuple[Sampler, str]]:
    """Yield the samplers that have their weights, each with its last use as the store has it; "" if there was none."""
    for sessions in _batches(store.redis.zrange(keys.sessions(tenant), 0, -1)):
        with store.redis.pipeline(transaction=False) as pipe:
            for session_id in sessions:
                pipe.hkeys(keys.session_samplers(tenant, session_id.decode()))
            ids = [sampler_id.decode() for members in pipe.execute() for sampler_id in members]
        for some in _batches(ids):
            with store.redis.pipeline(transaction=False) as pipe:
                for sampler_id in some:
                    pipe.hmget(keys.sampler(tenant, sampler_id), ["record", "last_used"])
                for record, seen in pipe.execute():
                    if record:
                        yield Sampler.from_json(record), (seen or b"").decode()


def checkpoints(store: Store, tenant: str) -> Iterator[tuple[Checkpoint, str]]:
    """Yield the checkpoints, expired ones too, each with the slug of its run's base model; "" if that isn't known."""
    for runs in _batches(store.redis.zrange(keys.runs(tenant), 0, -1)):
        with store.redis.pipeline(transaction=False) as pipe:
            for run_id in runs:
                pipe.hget(keys.run(tenant, run_id.decode()), "slug")
                pipe.hvals(keys.checkpoints(tenant, run_id.decode()))
            answers = iter(pipe.execute())
        for slug, rows in zip(answers, answers, strict=True):
            yield from ((Checkpoint.from_json(row), (slug or b"").decode()) for row in rows)


def _batches(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[first : first + _AT_ONCE] for first in range(0, len(items), _AT_ONCE))
