"""Sampling requests: accepted once, handed out fairly, finished once.

They have no order among themselves, so there is no journal position: a request waits, is in the hands
of one sampler process, and is finished. Turns go round the tenants, whatever number each has waiting.
Sequence ids are decimal text in the store: cloned clients pass 2^53.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any, TypeVar

from openrl.tasks import keys, quotas
from openrl.tasks.boundaries import reach
from openrl.tasks.errors import (
    DiskRefusal,
    InvalidRequest,
    KeyReused,
    NotFound,
    Overloaded,
    StaleOwner,
    StoreFault,
    shown,
)
from openrl.tasks.messages import CreateModel, Message, Sample
from openrl.tasks.operations import Outcome, Promise, SampleJob
from openrl.tasks.ownership import Lease
from openrl.tasks.records import Sampler
from openrl.tasks.schema import SAMPLE
from openrl.tasks.spool import Apart, Spool, here
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)

Seeded = TypeVar("Seeded", CreateModel, Sample)

SEEDS = 2**31
STOWED = 7
"""Where the stowed result is among the arguments of the scripts that end something."""
MAX_ERROR_CHARS = 4000
"""A longer error text is cut: it is read by people."""


class Samples:
    """The sampling half of the journal; one per process, safe to share between threads."""

    def __init__(self, store: Store, *, apart: Apart = here) -> None:
        self._store = store
        self._settings = store.settings
        self._apart = apart
        self._spool = Spool(store.settings.data_dir, inline_bytes=store.settings.inline_bytes, apart=apart)

    def submit_sample(
        self, tenant: str, sampler: Sampler, seq_id: int, message: Sample, *, letter: tuple[str, str] | None = None
    ) -> Promise:
        """Accept `message` under `(sampler, seq_id)`; the same one again gets the same promise.

        `letter` is a list of the store and what is laid there together with the request.

        Raises:
            KeyReused: a different request was accepted under that `seq_id`.
            Overloaded: the tenant has too much queued, or used all tokens of this minute; nothing is consumed.
        """
        if not 0 <= seq_id <= keys.MAX_SAMPLE_SEQ:
            raise InvalidRequest(f"seq_id must be 0 to {keys.MAX_SAMPLE_SEQ}, not {shown(seq_id)}")
        request_id = keys.request_id(sampler.sampler_id, seq_id)
        session_id = keys.session_of(sampler.sampler_id)
        body = with_seed(message).to_bytes()
        self._store.check_room()  # before the body's file is written
        stowed = self._spool.stow(tenant, body)
        answer = self._store.script("sample_append")(
            tenant, sampler.sampler_id, seq_id, bytes.fromhex(digest(message))[:16], stowed, request_id, session_id,
            len(body), self._settings.tenant_bytes, len(message.prompt), *(letter or ("", "")),
        )  # fmt: skip
        if answer != b"NEW":
            self._spool.discard(stowed)
        if answer == b"NOTFOUND":
            raise NotFound(f"no sampler {sampler.sampler_id!r}")
        if answer.startswith(b"QUOTA"):
            raise quotas.refusal(answer)
        if answer == b"FULL":
            raise Overloaded(f"too much is queued already; send seq_id {seq_id} again when some of it is done")
        if answer == b"KEYREUSED":
            raise KeyReused(f"seq_id {seq_id} of {sampler.sampler_id!r} holds a different request; use the next one")
        return Promise(request_id=request_id, is_new=answer == b"NEW")

    def take_samples(
        self,
        slug: str,
        lease: Lease,
        *,
        limit: int,
        of_tenant: int | None = None,
        version: str | None = None,
        leaves_s: float = 0.0,
    ) -> list[SampleJob]:
        """Take up to `limit` waiting requests, those of dead samplers included; [] without a valid lease.

        A tenant of whom this process holds `of_tenant` (None: however many) gets no turn until one of them ends.
        `version` is the directory of the one version that it has in memory, "" while there is none; None: it keeps
        many. A request younger than `leaves_s` is left to a sampler that has its version, while that one has room.
        """
        if limit <= 0 or lease.lost:
            return []
        answer = self._store.script("sample_take")(
            slug,
            lease.worker_id,
            lease.generation,
            limit,
            lease.call_number,
            self._settings.undelivered_ttl_s,
            "" if of_tenant is None else of_tenant,
            "" if version is None else version or "-",
            leaves_s,
        )
        if answer == b"LOST":
            lease.mark_lost()
            return []
        if answer:
            reach("sampler.taken")
        jobs = [job for row in answer if (job := self._job(lease, *row)) is not None]
        # Only now: if the store went away in between, the same call is repeated.
        lease.call_number += 1
        return jobs

    def commit_sample(self, lease: Lease, job: SampleJob, outcome: Outcome) -> None:
        """Finish a request that this process took.

        Raises:
            StaleOwner: it isn't in this process's hands any more; nothing was changed.
        """
        [refusal] = self.commit_samples(lease, [(job, outcome)])
        if refusal is not None:
            raise refusal

    def commit_samples(self, lease: Lease, ended: Sequence[tuple[SampleJob, Outcome]]) -> list[Exception | None]:
        """Finish several requests in one trip, each by itself. Returns why each of them isn't, None if it is."""
        return self._commit_samples(lease, [(job.tenant, job.request_id, outcome) for job, outcome in ended])

    @translated()
    def held_samples(self, lease: Lease) -> set[tuple[str, str]]:
        """Return (tenant, request id) of all that is in this process's hands; what it has beside was cancelled."""
        members = self._store.redis.hkeys(keys.inflight(lease.identity))
        return {(tenant, request_id) for tenant, _, request_id in (one.decode().partition(" ") for one in members)}

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count what was drawn for cancelled samples against the tenant's tokens of this minute; nobody commits it."""
        if num_tokens:
            self._store.script("charge")(tenant, num_tokens)

    def requeue_samples(self, lease: Lease) -> int:
        """Give back whatever this process still holds; others take it in its old place."""
        return int(self._store.script("sample_requeue")(lease.slug, lease.worker_id, lease.generation))

    def _commit_samples(self, lease: Lease, ended: Sequence[tuple[str, str, Outcome]]) -> list[Exception | None]:
        sent: list[tuple[str, tuple[Any, ...]]] = []
        refusals: dict[int, Exception] = {}
        for number, each in enumerate(ended):
            try:
                sent.append(("sample_commit", self._ended_sample(lease, *each)))
            except (OSError, DiskRefusal) as error:  # its file can't be written now
                refusals[number] = error
        reach("sampler.drawn")
        answers = self._store.scripts(sent)
        reach("sampler.committed")
        answered = iter([self._sample_refusal(lease, *each) for each in zip(sent, answers, strict=True)])
        return [refusals.get(number) or next(answered) for number in range(len(ended))]

    def _ended_sample(self, lease: Lease, tenant: str, request_id: str, outcome: Outcome) -> tuple[Any, ...]:
        """Return the arguments of the script that ends one request; its result is stowed by then."""
        return (
            lease.slug, lease.worker_id, lease.generation, tenant, request_id, *self._ending(tenant, outcome),
            outcome.usage.prompt_tokens, outcome.usage.sampled_tokens, outcome.usage.microseconds,
        )  # fmt: skip

    def _sample_refusal(self, lease: Lease, sent: tuple[str, tuple[Any, ...]], answer: Any) -> Exception | None:
        _, args = sent
        if isinstance(answer, Exception):
            return answer
        status, *bodies = answer
        if status != b"OK":
            self._spool.discard(args[STOWED])
            return StaleOwner(f"{args[4]!r} is no longer held by {lease.worker_id!r}; its result was dropped")
        for body in bodies:
            self._spool.discard(body)
        return None

    def _job(
        self, lease: Lease, tenant: bytes, request_id: bytes, submitted: bytes, body: bytes, number: bytes | None
    ) -> SampleJob | None:
        """Decode a taken request; None, and a failed promise, if it is lost or can't be read."""
        try:
            SAMPLE.check(number)
            message = Sample.from_bytes(self._spool.load(body))
        except Exception as error:  # whatever a broken body makes the decoder raise, it costs this request alone
            self._fail(lease, tenant.decode(), request_id.decode(), error)
            return None
        return SampleJob(
            tenant=tenant.decode(), request_id=request_id.decode(), message=message, submitted=float(submitted)
        )

    def _fail(self, lease: Lease, tenant: str, request_id: str, error: Exception) -> None:
        """End a request that can't be read. One that can't be ended either returns with the end of the lease."""
        error_id = secrets.token_hex(4)
        log.error("error %s: the body of %s can't be read", error_id, request_id, exc_info=error)
        cause = "is lost" if isinstance(error, FileNotFoundError) else "can't be read"
        lost = f"the request's body {cause} (error id {error_id}); send it again as a new one"
        [refusal] = self._commit_samples(lease, [(tenant, request_id, Outcome(error=lost, category="server"))])
        if isinstance(refusal, StaleOwner | StoreFault):
            log.error("%s could not be ended: %s", request_id, refusal)
        elif refusal is not None:
            raise refusal

    def _ending(self, tenant: str, outcome: Outcome) -> tuple[str, str, bytes, str, str, float]:
        """Return an outcome as the scripts take it; a large result is on disk before this returns."""
        assert outcome.category in ("user", "server"), outcome.category
        failed = outcome.error is not None
        stowed = self._spool.stow(tenant, b"" if failed else outcome.result)
        error = (outcome.error or "failed without a reason")[:MAX_ERROR_CHARS] if failed else ""
        return (
            "failed" if failed else "done",
            "" if failed else outcome.content_type,
            stowed,
            error,
            outcome.category if failed else "",
            self._settings.undelivered_ttl_s,
        )


def digest(message: Message) -> str:
    """Return what tells a retry from a different operation (hex).

    It covers what the client means: neither a seed drawn here, nor the directory that a checkpoint's name stands for
    at the moment, nor the number of the sampler that an ephemeral save makes: the SDK draws another for each try.
    """
    if getattr(message, "checkpoint_dir", ""):
        message = dataclasses.replace(message, checkpoint_dir="")  # type: ignore[call-arg]
    if sampler_id := getattr(message, "sampler_id", ""):
        message = dataclasses.replace(message, sampler_id=keys.session_of(sampler_id))  # type: ignore[call-arg]
    return _digest(message.kind, message.to_bytes())


def digest_with_sampler(message: Message) -> str:
    """Return what told an ephemeral save from a different one before its digest left out the sampler's number (hex)."""
    return _digest(message.kind, message.to_bytes())


def encoded(message: Message) -> tuple[str, bytes]:
    """Return `digest(message)` and `message.to_bytes()`, at the cost of one where they cover the same."""
    body = message.to_bytes()
    apart = getattr(message, "checkpoint_dir", "") or getattr(message, "sampler_id", "")
    return digest(message) if apart else _digest(message.kind, body), body


def _digest(kind: str, body: bytes) -> str:
    found = hashlib.sha256(kind.encode() + b"\0")
    found.update(body)
    return found.hexdigest()


def with_seed(message: Seeded) -> Seeded:
    """Return the message with a seed drawn where it had none: a replay must draw the same numbers."""
    return dataclasses.replace(message, seed=secrets.randbelow(SEEDS)) if message.seed is None else message
