"""Cancelling what was submitted and isn't finished: by its client, by an operator, or with its session.

A sample ends at once, in whoever's hands it is. A training operation is cancelled as long as it waits; it uses up its
number as a failed one does, and a forward_backward voids the gradient it would have added to. What a trainer may have
in hand is cancelled the next time that it looks, unless it is carried out by then. Knows neither HTTP nor workers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, NotFound, shown
from openrl.tasks.records import Sampler
from openrl.tasks.spool import Spool
from openrl.tasks.store import Store, translated

Answer = Literal["cancelled", "asked", "finished"]
"""`asked`: it waits behind what its trainer may be carrying out, and is cancelled unless it is begun before."""

BY_CLIENT = "cancelled by its client"
BY_OPERATOR = "cancelled by an operator"
BY_SESSION = "cancelled: its session was finished"

_AT_ONCE = 200
"""Samples cancelled by one script, so that none holds up the store."""


class Cancelling:
    """Cancels operations; one per process, safe to share between threads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes)

    @translated()
    def owner_of(self, name: str) -> str:
        """Return whose run or sampler this is: for operators, never for another tenant."""
        key = keys.run if ":train:" in name else keys.sampler
        for member in sorted(self._store.redis.smembers(keys.TENANTS)):
            if self._store.redis.exists(key(member.decode(), name)):
                return str(member.decode())
        raise NotFound(f"no run or sampler {shown(name)}; `openrl usage` has those that did something")

    def cancel(self, tenant: str, request_id: str, reason: str = BY_CLIENT) -> Answer:
        """Cancel one operation or sample of this tenant. One that has ended stays as it is.

        Raises:
            NotFound: nothing of this tenant has that id.
            InvalidRequest: it is the creation of a run, without which nothing behind it could ever run.
        """
        parts = keys.parse_request(request_id)
        if not parts.is_run:
            return self._cancel_sample(tenant, request_id, reason)
        (state,) = self._cancel_operations(tenant, parts.parent, reason, parts.seq) or [b"MISSING"]
        if state == b"MISSING":
            raise NotFound(f"no future {request_id!r}")
        if state == b"CREATION":
            raise InvalidRequest(f"request_id {request_id!r} creates a run, which can't be cancelled; let it be unused")
        return _ANSWERS[state]

    def cancel_run(self, tenant: str, run_id: str, reason: str = BY_OPERATOR) -> tuple[int, int]:
        """Cancel all that waits of a run, and the unfinished samples of its samplers.

        Returns how many are cancelled, and how many will be once the run's trainer looks.
        """
        try:
            states = self._cancel_operations(tenant, run_id, reason)
        except NotFound:
            raise NotFound(f"no run {run_id!r}") from None
        samplers = [one for one in self._samplers(tenant, keys.session_of(run_id)) if one.run_id == run_id]
        samples = self._cancel_of(tenant, samplers, reason)
        return states.count(b"CANCELLED") + samples, states.count(b"ASKED")

    def cancel_samples(self, tenant: str, session_id: str, reason: str = BY_SESSION) -> int:
        """Cancel the unfinished samples of a session; return how many there were."""
        return self._cancel_of(tenant, self._samplers(tenant, session_id), reason)

    def _cancel_sample(self, tenant: str, request_id: str, reason: str) -> Answer:
        (state,) = self._cancel_samples(tenant, [request_id], reason)
        if state == b"NOTFOUND":
            raise NotFound(f"no future {request_id!r}")
        return _ANSWERS[state]

    def _cancel_of(self, tenant: str, samplers: Iterable[Sampler], reason: str) -> int:
        """Cancel what is unfinished of some samplers of one session."""
        by_slug: dict[str, set[str]] = {}
        for sampler in samplers:
            by_slug.setdefault(sampler.slug, set()).add(sampler.sampler_id)
        found = [
            request_id
            for slug, ids in by_slug.items()
            for request_id in self._unfinished(tenant, slug)
            if request_id.rpartition(":")[0] in ids
        ]
        states = [
            state
            for first in range(0, len(found), _AT_ONCE)
            for state in self._cancel_samples(tenant, found[first : first + _AT_ONCE], reason)
        ]
        return states.count(b"CANCELLED")

    def _cancel_operations(self, tenant: str, run_id: str, reason: str, *seqs: str) -> list[bytes]:
        keys.run(tenant, run_id)
        ttl_s = self._store.settings.undelivered_ttl_s
        answer = self._store.script("cancel")(tenant, run_id, reason, ttl_s, *seqs)
        if answer == b"NOTFOUND":
            raise NotFound(f"no future {keys.request_id(run_id, seqs[0] if seqs else '')!r}")
        return list(answer)

    def _cancel_samples(self, tenant: str, request_ids: list[str], reason: str) -> list[bytes]:
        ttl_s = self._store.settings.undelivered_ttl_s
        answer = self._store.script("sample_cancel")(tenant, reason, ttl_s, *request_ids)
        for body in answer[1::2]:
            self._spool.discard(body)
        return list(answer[::2])

    @translated()
    def _samplers(self, tenant: str, session_id: str) -> list[Sampler]:
        ids = [member.decode() for member in self._store.redis.hkeys(keys.session_samplers(tenant, session_id))]
        with self._store.redis.pipeline(transaction=False) as pipe:
            for sampler_id in ids:
                pipe.hget(keys.sampler(tenant, sampler_id), "record")
            return [Sampler.from_json(record) for record in pipe.execute() if record]

    @translated()
    def _unfinished(self, tenant: str, slug: str) -> list[str]:
        """Return the tenant's samples that wait for a sampler of this base model, or are in the hands of one."""
        redis, mine = self._store.redis, f"{tenant} "
        found = [member.decode() for member in redis.zrange(keys.waiting(tenant, slug), 0, -1)]
        for identity in redis.smembers(keys.claimants(slug)):
            held = (member.decode() for member in redis.hkeys(keys.inflight(identity.decode())))
            found += [member.removeprefix(mine) for member in held if member.startswith(mine)]
        return found


_ANSWERS: dict[bytes, Answer] = {b"CANCELLED": "cancelled", b"ASKED": "asked", b"ENDED": "finished"}
