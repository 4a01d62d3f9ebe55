"""Usage: tokens, seconds, operations and stored bytes as they were measured, by hour, base model, session and run.

Each operation is counted by the very script that commits it, so once, whatever is replayed; stored bytes are measured
by the beat (`meter`). Kept for 400 days. Knows no prices.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from openrl.tasks import keys, walk
from openrl.tasks.store import Store, translated

HOUR_S = 3600
MOST_METERED_S = 31 * 24 * 3600.0
"""What lies further back than this was not stored by a service that anybody ran."""

NAMES = (
    "trained_tokens", "forward_tokens", "prompt_tokens", "sampled_tokens", "operations", "samples", "checkpoints",
    "microseconds", "byte_seconds",
)  # fmt: skip
"""What is counted. Tokens of forward_backward, of forward, read and drawn by samples; training operations and samples
that succeeded; checkpoints saved; time of passes; bytes stored times seconds."""

_HOURS_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """How much of what was used in one hour (its start in unix seconds). A base model's samples have no `run_id`."""

    hour: int
    name: str
    amount: int
    slug: str
    session_id: str
    run_id: str


class Usage:
    """Reads what was counted, and measures what is stored; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def between(self, tenant: str, since: float, before: float) -> Iterator[Used]:
        """Yield what a tenant used in the hours that begin in this time, oldest first."""
        hours = range(-int(-since // HOUR_S), -int(-before // HOUR_S))
        for first in range(0, len(hours), _HOURS_AT_ONCE):
            some = hours[first : first + _HOURS_AT_ONCE]
            for hour, row in zip(some, self._rows(tenant, some), strict=True):
                yield from (_used(hour, what.decode(), int(amount)) for what, amount in sorted(row.items()))

    @translated()
    def meter(self) -> None:
        """Measure what every tenant has stored since the last time. Twice at once counts no second twice."""
        for tenant in walk.tenants(self._store):
            before = self._store.redis.hget(keys.account(tenant), "stored") or 0
            sizes = self._stored(tenant)
            self._store.script("meter")(tenant, MOST_METERED_S, before, *chain.from_iterable(sizes.items()))

    def _stored(self, tenant: str) -> dict[str, int]:
        """Return the bytes of checkpoints and samplers' own versions, by what their usage is counted under.

        With those of full runs' versions whose rows are gone and whose directories aren't.
        """
        sizes: dict[str, int] = defaultdict(int)
        seen: set[str] = set()
        for checkpoint, slug in walk.checkpoints(self._store, tenant):
            sizes[f"{slug or '-'} {keys.session_of(checkpoint.run_id)} {checkpoint.run_id}"] += checkpoint.size_bytes
            seen.add(checkpoint.directory)
        for sampler, _ in walk.samplers(self._store, tenant):
            if sampler.size_bytes:
                sizes[f"{sampler.slug} {sampler.session_id} {sampler.run_id or '-'}"] += sampler.size_bytes
                seen.add(sampler.adapter_dir)
        # After the rows: one that went meanwhile is counted there or here, and not twice.
        for directory, held in self._store.redis.hgetall(keys.held(tenant)).items():
            size, _, used = held.decode().partition(" ")
            if directory.decode() not in seen:
                sizes[used] += int(size)
        return sizes

    @translated()
    def _rows(self, tenant: str, hours: Iterable[int]) -> list[dict[bytes, bytes]]:
        with self._store.redis.pipeline(transaction=False) as pipe:
            for hour in hours:
                pipe.hgetall(keys.usage(tenant, hour))
            return list(pipe.execute())


def by_run_and_day(rows: Iterable[Used]) -> dict[tuple[int, str], dict[str, int]]:
    """Add up by day (its start in unix seconds, UTC) and by run, or session where there is none."""
    sums: dict[tuple[int, str], dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for row in rows:
        day = row.hour // (24 * HOUR_S) * 24 * HOUR_S
        sums[day, row.run_id or row.session_id][row.name] += row.amount
    return {key: dict(names) for key, names in sorted(sums.items())}


def _used(hour: int, what: str, amount: int) -> Used:
    name, slug, session_id, run_id = what.split(" ")
    return Used(
        hour=hour * HOUR_S,
        name=name,
        amount=amount,
        slug=keys.base_slug(slug),
        session_id="" if session_id == "-" else session_id,
        run_id="" if run_id == "-" else run_id,
    )
