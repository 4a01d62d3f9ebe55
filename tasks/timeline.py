"""When the operations of a session were submitted and when they ended, as far as that is still known.

Operations of a run are in its journal for good; of a sample only its promise tells, as long as it is kept. Read a part
at a time, so that a long session takes little memory. Knows no format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from openrl.tasks import keys
from openrl.tasks.store import Store, translated

_AT_ONCE = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation. Times in unix seconds; `finished` None: it hasn't ended, or it isn't known when."""

    request_id: str
    kind: str
    submitted: float
    finished: float | None
    error: str
    tokens: int = 0


class Timeline:
    """Reads when things happened; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def of_run(self, tenant: str, run_id: str) -> Iterator[Span]:
        """Yield the operations of a run, in any order."""
        for some in self._scan(keys.journal(tenant, run_id)):
            for seq, row in some.items():
                header = json.loads(row)
                yield Span(
                    request_id=keys.request_id(run_id, seq.decode()),
                    kind=header["kind"],
                    submitted=float(header["submitted"]),
                    finished=_time(header.get("finished")),
                    error=header.get("outcome") or "",
                    tokens=int(header.get("tokens") or 0),
                )

    def of_sampler(self, tenant: str, sampler_id: str) -> Iterator[Span]:
        """Yield the samples of a sampler whose promises are still kept, in any order."""
        for some in self._scan(keys.sampler_ops(tenant, sampler_id)):
            ids = [keys.request_id(sampler_id, seq.decode()) for seq in some]
            for request_id, (submitted, finished, error) in zip(ids, self._promises(tenant, ids), strict=True):
                if submitted is not None:
                    yield Span(
                        request_id=request_id,
                        kind="sample",
                        submitted=float(submitted),
                        finished=_time(finished),
                        error=(error or b"").decode(),
                    )

    def _scan(self, key: str) -> Iterator[dict[bytes, bytes]]:
        cursor = 0
        while True:
            with translated():
                cursor, some = self._store.redis.hscan(key, cursor, count=_AT_ONCE)
            yield some
            if not cursor:
                return

    @translated()
    def _promises(self, tenant: str, request_ids: list[str]) -> list[list[bytes | None]]:
        with self._store.redis.pipeline(transaction=False) as pipe:
            for request_id in request_ids:
                pipe.hmget(keys.future(tenant, request_id), ["submitted", "finished", "error"])
            return list(pipe.execute())


def _time(text: bytes | str | None) -> float | None:
    return float(text) if text else None
