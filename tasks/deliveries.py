"""Samples that have ended, in the order in which they did, for a client that asks for all of them at once.

Each clone of a sampling client has a line of its own. A cursor grows with each sample of the tenant that ends; giving
it back takes what is before it out of the line. Knows neither HTTP nor how long anybody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.tasks.futures import FAILED
from openrl.tasks.registry import Registry
from openrl.tasks.spool import Apart, Spool, here
from openrl.tasks.store import Store

AT_ONCE = 1000
"""Ended samples in one answer; the next one has the rest."""

ACKNOWLEDGED_TTL_S = 60.0
"""How long a result is kept that its client says it has: a second try to fetch it may be on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A sample that has ended; `size_bytes` is what fetching its result will bring."""

    request_id: str
    failed: bool
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What has ended up to `cursor`."""

    cursor: int
    ended: tuple[Ended, ...]


class Deliveries:
    """Reads the lines; one per process, safe to share between threads."""

    def __init__(self, store: Store, *, apart: Apart = here) -> None:
        self._store = store
        self._spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes, apart=apart)

    def join(self, tenant: str, sampler_id: str) -> int:
        """Return a number, from 1, that no other client of this sampler has."""
        keys.sampler(tenant, sampler_id)
        number = self._store.script("sampler_join")(tenant, sampler_id)
        if not number:
            raise self._absent(tenant, sampler_id)
        return int(number)

    def since(self, tenant: str, sampler_id: str, clone: int, cursor: int) -> Batch:
        """Return what has ended after `cursor`; what is before it was seen.

        Raises:
            NotFound: no such sampler.
            InvalidRequest: no cursor is that large.
        """
        keys.sampler(tenant, sampler_id)
        answer = self._store.script("completions")(tenant, sampler_id, clone, cursor, AT_ONCE)
        if answer == b"NOTFOUND":
            raise self._absent(tenant, sampler_id)
        if answer == b"AHEAD":
            raise InvalidRequest(f"prev_cursor is {cursor}, which no answer ever said; begin again from 0")
        ended = tuple(self._ended(*row) for row in zip(answer[1::3], answer[2::3], answer[3::3], strict=True))
        return Batch(cursor=int(answer[0]), ended=ended)

    def acknowledge(self, tenant: str, request_ids: Sequence[str]) -> None:
        """Note that the client has these results for good."""
        kept_s = min(ACKNOWLEDGED_TTL_S, self._store.settings.result_ttl_s)
        for first in range(0, len(request_ids), AT_ONCE):
            self._store.script("acknowledge")(tenant, kept_s, *request_ids[first : first + AT_ONCE])

    def _absent(self, tenant: str, sampler_id: str) -> NotFound:
        """Return why there is no such sampler."""
        try:
            Registry(self._store).sampler(tenant, sampler_id)
        except NotFound as why:
            return why
        return NotFound(f"no sampler {sampler_id!r}")

    def _ended(self, request_id: bytes, state: bytes, size: bytes) -> Ended:
        """Read a row. One whose result is no longer kept counts as done: who fetches it is told."""
        return Ended(
            request_id=request_id.decode(),
            failed=state.decode() == FAILED,
            size_bytes=self._spool.size(size) if size.startswith(b"@") else int(size),
        )
