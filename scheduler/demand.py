"""What is asked for and what is there: the journal's depth, the workers whose leases stand.

Reads the store and decides nothing. Queue lengths of Celery are near zero by design and tell nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openrl.scheduler.resources import KINDS, Demand, Kind, Pool, Sign, Worker
from openrl.tasks import keys
from openrl.tasks.journal import Journal
from openrl.tasks.registry import BaseModel
from openrl.tasks.store import Store, translated

_FAMILY: dict[Kind, str] = {"trainer": "train", "sampler": "sample"}


def demand(journal: Journal, models: Iterable[BaseModel], standing: Iterable[Pool] = ()) -> dict[Pool, Demand]:
    """Return what every pool of the served models has before it.

    These are the models' own, those of full runs that have something to do, and of those the `standing` ones, whose
    workers may be idle.
    """
    pools = {}
    lasting = {pool.slug for pool in standing}
    for model in models:
        of_runs = {pool.slug for pool in journal.pools(model.slug)}
        of_runs |= {slug for slug in lasting if keys.is_full(slug) and keys.base_slug(slug) == model.slug}
        for slug in (model.slug, *sorted(of_runs)):
            depth = journal.depth(slug)
            for kind in KINDS:
                family = _FAMILY[kind]
                pools[Pool(slug=slug, kind=kind, base=model.name)] = Demand(
                    depth=sum(depth[family].values()), oldest_s=float(depth["oldest_s"].get(family, 0.0))
                )
    return pools


def owners(journal: Journal, models: Iterable[BaseModel]) -> dict[str, str]:
    """Return the tenant of each full run's pool that has something to do."""
    return {pool.slug: pool.tenant for model in models for pool in journal.pools(model.slug)}


def workers(store: Store) -> tuple[Worker, ...]:
    """Return the workers whose leases stand, by id."""
    client: Any = store.redis  # answers in bytes; the library's types say bytes or text
    with translated():
        ids = sorted(member.decode() for member in client.smembers(keys.WORKERS))
        rows = [client.hgetall(keys.worker(worker_id)) for worker_id in ids]
    return tuple(_worker(worker_id, row) for worker_id, row in zip(ids, rows, strict=True) if row)


def signs(store: Store) -> dict[str, Sign]:
    """Return the last sign of life of each worker that did not leave by itself, by its id."""
    with translated():
        rows = store.redis.hgetall(keys.SIGNS)
    parts = {worker_id.decode(): row.decode().split() for worker_id, row in rows.items()}
    return {worker_id: Sign(pid=int(pid), at=float(at)) for worker_id, (pid, at) in parts.items()}


def _worker(worker_id: str, row: Mapping[bytes, Any]) -> Worker:
    text = {name.decode(): value.decode() for name, value in row.items()}
    return Worker(
        worker_id=worker_id,
        kind=text["kind"],
        slug=text["slug"],
        state=text["state"],
        started=float(text.get("started") or 0.0),
        last_busy=float(text.get("last_busy") or 0.0),
    )
