"""The journal: what runs, in which order, once.

Each run has a list of operations by `seq_id` and a position. Submissions arrive in any order, twice, or
refused; workers get them in order, without a hole, and commit each together with the run's next
position, under a token that only the run's present owner has. Every step is one Lua script. Knows
neither what an operation computes nor who rings whom.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from openrl.tasks import keys, quotas
from openrl.tasks.boundaries import reach
from openrl.tasks.errors import (
    DiskRefusal,
    Gone,
    InvalidRequest,
    KeyReused,
    NotFound,
    OtherVersion,
    Overloaded,
    StaleOwner,
    shown,
)
from openrl.tasks.messages import MESSAGES, CreateModel, ForwardBackward, Message, Sample
from openrl.tasks.operations import (
    MISSING,
    REFUSED,
    Committal,
    FullPool,
    Operation,
    Outcome,
    Promise,
    SampleJob,
    Slice,
    Taking,
)
from openrl.tasks.ownership import Lease
from openrl.tasks.records import FULL, LORA, Row, Run, checkpoint_row, sampler_row
from openrl.tasks.samples import MAX_ERROR_CHARS, STOWED, Samples, digest, digest_with_sampler, encoded, with_seed
from openrl.tasks.schema import ENTRY
from openrl.tasks.spool import Apart, here
from openrl.tasks.store import Store, translated
from openrl.tasks.unloading import Unloading

__all__ = [
    "Committal", "Journal", "Operation", "Outcome", "Promise", "Row", "SampleJob", "Slice", "Taking",
    "checkpoint_row", "sampler_row",
]  # fmt: skip

log = logging.getLogger(__name__)

MAX_AHEAD = 100_000
"""A `seq_id` further than this behind its run's position is a mistake: the gap before it could never be closed."""
LARGE_TOKENS = 8192
"""An operation with more is encoded apart from the loop that took it in."""
SESSION_SILENT_S = 120.0
"""A session without a heartbeat (the SDK sends one each 10 s) for this long counts as silent."""
SILENT_GAP_FACTOR = 10.0
"""A gap of a silent or finished session is closed after this many times the usual time."""
_CLOSE_AT_ONCE = 2000
_HISTORY_AT_ONCE = 128
_RUN_FIELDS = frozenset(Run.__dataclass_fields__) - {"tenant", "run_id", "session_id", "slug", "created", "applied"}


class Journal(Samples, Unloading):
    """Every run's operations; one per process, safe to share between threads."""

    def __init__(self, store: Store, *, apart: Apart = here) -> None:
        super().__init__(store, apart=apart)
        self._told: set[tuple[str, bytes]] = set()
        """Entries of another version that the log has told of."""

    def create(
        self,
        tenant: str,
        session_id: str,
        model_seq_id: int,
        message: CreateModel,
        *,
        slug: str,
        base_digest: str = "",
    ) -> Promise:
        """Start the run `(session, model_seq_id)`: its record and entry 0. The same again gets the same promise.

        `slug` is the base model's. A full run becomes a pool of its own, which its row names.

        Raises:
            KeyReused: that number already belongs to a different run.
            QuotaExceeded: the tenant has as many runs as it may have.
        """
        if not 0 <= model_seq_id <= keys.MAX_RUN_SEQ:
            raise InvalidRequest(f"model_seq_id must be 0 to {keys.MAX_RUN_SEQ}, not {shown(model_seq_id)}")
        keys.session(tenant, session_id)
        run_id = keys.run_id(session_id, model_seq_id)
        drawn = with_seed(message)
        assert drawn.seed is not None
        is_full = message.fine_tuning == FULL
        slug = keys.pool_slug(slug, tenant, run_id) if is_full else slug
        record = Run(
            tenant=tenant,
            run_id=run_id,
            session_id=session_id,
            base_model=message.base_model,
            slug=slug,
            rank=message.rank,
            seed=drawn.seed,
            train_attn=message.train_attn,
            train_mlp=message.train_mlp,
            train_unembed=message.train_unembed,
            user_metadata=dict(message.user_metadata),
            base_digest=base_digest,
            fine_tuning=FULL if is_full else LORA,
        )
        creation = ("create", "", session_id, slug, record.to_json(), quotas.RUN_SILENT_S)
        return self._append(tenant, run_id, 0, message.kind, digest(message), drawn.to_bytes(), *creation)

    def submit(
        self, tenant: str, run_id: str, seq_id: int, message: Message, *, letter: tuple[str, str] | None = None
    ) -> Promise:
        """Accept `message` as the run's operation `seq_id`; the same one again gets the same promise.

        `letter` is a list of the store and what is laid there together with the operation.

        Raises:
            KeyReused: a different operation was accepted under that `seq_id`, or it was closed as missing; or the
                sampler that an ephemeral save asks for exists, and then the `seq_id` is consumed as refused.
            InvalidRequest: the `seq_id` is absurdly far ahead; nothing is consumed.
            Overloaded: the tenant has too much queued, and this isn't the run's next; nothing is consumed.
            QuotaExceeded: it would store more than the tenant may; nothing is consumed.
        """
        _check_seq(seq_id)
        assert message.kind in MESSAGES and not isinstance(message, CreateModel | Sample), message.kind
        reserve, session_id = getattr(message, "sampler_id", ""), keys.session_of(run_id)
        num_tokens = message.num_tokens
        identity, body = (self._apart if num_tokens > LARGE_TOKENS else here)(encoded, message)
        rest = ("submit", reserve, session_id, *(letter or ("", "")))
        try:
            return self._append(tenant, run_id, seq_id, message.kind, identity, body, *rest, num_tokens=num_tokens)
        except KeyReused:
            if not reserve:
                raise
            # What an earlier version accepted is known by its sampler's number as well; nothing new can come of this.
            earlier = digest_with_sampler(message)
            return self._append(tenant, run_id, seq_id, message.kind, earlier, body, *rest, num_tokens=num_tokens)
        except _SamplerTaken as taken:
            error = f"{reserve!r} already names a different sampler; use the next number"
            self.refuse(tenant, run_id, seq_id, message.kind, bytes.fromhex(identity), error)
            raise KeyReused(error) from taken

    def refuse(self, tenant: str, run_id: str, seq_id: int, kind: str, body_digest: bytes, error: str) -> None:
        """Let a submission that was refused consume its `seq_id`, so that the ones behind it don't wait for it.

        `kind` is "" where it isn't known. A number that is taken already, or that can't be one, stays as it is.
        """
        if not 1 <= seq_id <= keys.MAX_RUN_SEQ:
            return
        voids = "1" if kind == ForwardBackward.kind or kind not in MESSAGES else ""
        refusal = ("refuse", "", keys.session_of(run_id), "", "", error[:MAX_ERROR_CHARS] or "refused", voids)
        try:
            self._append(
                tenant, run_id, seq_id, kind or REFUSED, body_digest.hex(), b"", *refusal,
                self._settings.undelivered_ttl_s,
            )  # fmt: skip
        except InvalidRequest:
            return

    def take(
        self,
        slug: str,
        lease: Lease,
        *,
        max_runs: int = 256,
        max_ops_per_run: int = 32,
        max_claims: int | None = None,
    ) -> list[Slice]:
        """Return what can be executed now; [] once the lease is lost.

        One run of each tenant in turn, each tenant's longest waiting first, so no tenant's backlog hides another's.
        Runs that nobody owns become this worker's, `max_claims` at most (None: as many as are taken).
        The first few small bodies come along.
        An operation stays here until it is committed, so a second call returns it again.
        """
        claims = max_runs if max_claims is None else max_claims
        return self.take_next(lease, Taking(slug, max_runs, max_ops_per_run, claims))

    def take_next(self, lease: Lease, taking: Taking) -> list[Slice]:
        """Do so as `taking` says."""
        return [] if lease.lost else self._taken(lease, self._store.script("take")(*taking.args(lease)))

    def _taken(self, lease: Lease, answer: Any) -> list[Slice]:
        if answer == b"LOST":
            lease.mark_lost()
            return []
        return self._slices(lease, answer)

    def heard(self, lease: Lease, said: bytes) -> Slice | None:
        """Return the operation that `append` told an owner of; None: its run isn't this lease's, or it can't be read.

        It may be carried out like one that `take` returned, by whoever is sure that nothing was taken since.
        """
        lengths, _, rest = said.partition(b"\n")
        row, start = [], 0
        try:
            for length in map(int, lengths.split()):
                row.append(rest[start : start + length])
                start += length
            if lease.lost or lease.held.get((row[0].decode(), row[1].decode())) != int(row[2]):
                return None
            return next(iter(self._slices(lease, [row])), None)
        except (ValueError, IndexError, KeyError, OtherVersion):  # another version's: the journal has it too
            return None

    @translated()
    def bodies(self, operations: Sequence[Operation]) -> list[bytes | OSError]:
        """Return the bodies of operations; in the place of one that can't be read, why.

        Those that `take` did not bring are asked for in one trip. FileNotFoundError: the body is lost. Any other
        OSError may pass.
        """
        absent = [operation for operation in operations if not operation.body]
        if not absent:
            return [operation.body for operation in operations]
        with self._store.redis.pipeline(transaction=False) as pipe:
            for operation in absent:
                pipe.hget(keys.bodies(operation.tenant, operation.run_id), operation.seq_id)
            found = iter(pipe.execute())
        return [operation.body or self._body(next(found)) for operation in operations]

    def begin(self, lease: Lease, run: Slice) -> bool:
        """Note that the first operation of a run whose owner died is about to run by itself. False: it isn't ours."""
        first = run.operations[0].seq_id
        if self._store.script("begin")(run.tenant, run.run_id, run.token, first):
            return True
        lease.held.pop((run.tenant, run.run_id), None)
        return False

    def commit(self, lease: Lease, operation: Operation, outcome: Outcome, *, token: int) -> None:
        """Record how the run's next operation ended and move the run on.

        The promise of a refused or missing operation has failed already: for these only the position moves.

        Raises:
            StaleOwner: the token isn't the run's, or this isn't its next operation; nothing was changed.
            QuotaExceeded: its rows hold more than the tenant may store; nothing was changed.
        """
        [refusal], _ = self.commit_all(lease, [Committal(operation, outcome, token)])
        if refusal is not None:
            raise refusal

    def commit_all(
        self, lease: Lease, committals: Sequence[Committal], *, then: Taking | None = None
    ) -> tuple[list[Exception | None], list[Slice] | None]:
        """Commit several operations in one trip, each by itself and in order; with `then`, take what is next as well.

        Returns why each of them isn't committed, None if it is (`commit` raises these, and DiskRefusal where a result's
        file has no room), and what was taken, if all were committed. A run of which something is to be cancelled isn't:
        only `take` does that, whose caller has nothing in hand, so it has to be called as well.
        """
        sent: list[tuple[Committal, tuple[Any, ...]]] = []
        refusals: dict[int, Exception] = {}
        held_up: dict[tuple[str, str], Exception] = {}
        for number, committal in enumerate(committals):
            key = (committal.operation.tenant, committal.operation.run_id)
            if key in held_up:  # behind one that can't be sent
                refusals[number] = held_up[key]
                continue
            try:
                sent.append((committal, self._ended(committal)))
            except (OSError, DiskRefusal) as error:
                refusals[number] = held_up[key] = error
        reach("trainer.executed")
        calls = [("commit", args) for _, args in sent] + (
            [("take", then.args(lease, in_hand=True))] if then and not refusals else []
        )
        answers = self._store.scripts(calls)
        reach("trainer.committed")
        answered = iter([self._refusal(lease, *each) for each in zip(sent, answers, strict=False)])
        told = [refusals.get(number) or next(answered) for number in range(len(committals))]
        taken = answers[-1] if len(answers) > len(sent) and not any(told) else None
        return told, None if taken is None or isinstance(taken, Exception) else self._taken(lease, taken)

    def _ended(self, committal: Committal) -> tuple[Any, ...]:
        """Return the arguments of the script that commits one operation; its result is stowed by then."""
        operation, outcome, token = committal
        assert _RUN_FIELDS.issuperset(outcome.run_fields), outcome.run_fields
        if operation.kind in (REFUSED, MISSING) and outcome.error is None:
            outcome = Outcome(error=operation.error, category="server")
        rows = [part for row in outcome.rows for part in (row.key, row.field, row.value)]
        run_fields = [part for pair in outcome.run_fields.items() for part in pair]
        return (
            operation.tenant, operation.run_id, operation.seq_id, token, operation.request_id,
            *self._ending(operation.tenant, outcome), outcome.usage.microseconds, len(outcome.rows), *rows, *run_fields,
        )  # fmt: skip

    def _refusal(self, lease: Lease, sent: tuple[Committal, tuple[Any, ...]], answer: Any) -> Exception | None:
        """Return why an operation isn't committed, by what its script answered."""
        (operation, _, _), args = sent
        if isinstance(answer, Exception):
            return answer
        if answer != b"OK":
            self._spool.discard(args[STOWED])
        if answer.startswith(b"QUOTA"):
            return quotas.refusal(answer)
        if answer == b"STALE":
            lease.held.pop((operation.tenant, operation.run_id), None)
            return StaleOwner(f"{operation.request_id!r} is not {lease.worker_id!r}'s to commit; drop the run's state")
        return None

    def history(
        self, tenant: str, run_id: str, *, after: int, upto: int, bodies_of: Container[str] = MESSAGES
    ) -> Iterator[Operation]:
        """Yield the recorded operations with `after < seq_id <= upto`, each with how it ended in `error`.

        The body is there for the kinds in `bodies_of` that succeeded, and read when its turn comes; empty once a
        snapshot covers it.

        Raises:
            OSError: a body that is asked for can't be read.
        """
        for first in range(after + 1, upto + 1, _HISTORY_AT_ONCE):
            for operation in self._recorded(tenant, run_id, range(first, min(first + _HISTORY_AT_ONCE, upto + 1))):
                if operation.error or operation.kind not in bodies_of:
                    yield operation
                    continue
                with translated():
                    stowed = self._store.redis.hget(keys.bodies(tenant, run_id), operation.seq_id)
                yield replace(operation, body=self._spool.load(stowed or b""))

    @translated()
    def _recorded(self, tenant: str, run_id: str, seqs: range) -> list[Operation]:
        headers = self._store.redis.hmget(keys.journal(tenant, run_id), list(seqs))
        return [
            self._operation(tenant, run_id, seq, header, replay=True)
            for seq, header in zip(seqs, headers, strict=True)
            if header is not None
        ]

    def record_snapshot(self, lease: Lease, tenant: str, run_id: str, token: int, directory: str, applied: int) -> None:
        """Register a recovery snapshot of the state after operation `applied`; drop the bodies that it covers.

        Raises:
            StaleOwner: the token isn't the run's, or a later snapshot exists; nothing was changed.
        """
        reach("snapshot.written")
        status, *files = self._store.script("snapshot")(tenant, run_id, token, directory, applied)
        reach("snapshot.registered")
        if status != b"OK":
            raise StaleOwner(f"{run_id!r} is not {lease.worker_id!r}'s to save; drop the run's state")
        for stowed in files:
            self._spool.discard(stowed)

    @translated()
    def snapshot(self, tenant: str, run_id: str) -> tuple[str, int] | None:
        """Return (directory, position) of the run's recovery snapshot, or None if it has none."""
        directory, applied = self._store.redis.hmget(keys.run(tenant, run_id), ["snapshot_dir", "snapshot"])
        return None if directory is None else (directory.decode(), int(applied))

    def release(self, lease: Lease, tenant: str, run_id: str, token: int) -> None:
        """Hand a run back, so that another worker may own it at once. A stale token changes nothing."""
        reach("trainer.handing_back")
        self._store.script("release")(tenant, run_id, token)
        reach("trainer.handed_back")
        lease.held.pop((tenant, run_id), None)

    def close_gaps(self, *, at_once: int = _CLOSE_AT_ONCE) -> int:
        """Close the gaps that have stood too long by the store's clock; return how many operations failed so.

        A gap is closed as a whole, in as many calls of `at_once` as it takes, so that none holds up the store.
        """
        timeout, total = self._settings.gap_timeout_s, 0
        while True:
            closed = self._store.script("close_gaps")(
                timeout, timeout * SILENT_GAP_FACTOR, SESSION_SILENT_S, self._settings.undelivered_ttl_s,
                at_once, MAX_AHEAD,
            )  # fmt: skip
            total += closed
            if closed < at_once:
                return total

    @translated()
    def pools(self, base_slug: str) -> list[FullPool]:
        """Return the pools of a base model's full runs that have something to do, by slug."""
        rows = self._store.redis.hgetall(keys.pools(base_slug))
        return [FullPool(slug.decode(), *rows[slug].decode().split(" ")) for slug in sorted(rows)]

    @translated()
    def depth(self, slug: str) -> dict[str, dict]:
        """Return what isn't finished: per tenant under `train` and `sample`, and the oldest's age in `oldest_s`.

        A training operation behind a gap is counted but has no age: nobody can execute it yet.
        """
        with self._store.redis.pipeline(transaction=False) as pipe:
            pipe.hgetall(keys.depth("train", slug))
            pipe.hgetall(keys.depth("sample", slug))
            pipe.zrange(keys.ready(slug), 0, 0, withscores=True)
            pipe.zrange(keys.unfinished(slug), 0, 0, withscores=True)
            pipe.time()
            train, sample, ready, unfinished, (seconds, microseconds) = pipe.execute()
        now = seconds + microseconds / 1e6
        return {
            "train": {tenant.decode(): int(count) for tenant, count in train.items()},
            "sample": {tenant.decode(): int(count) for tenant, count in sample.items()},
            "oldest_s": {
                kind: max(0.0, now - oldest[0][1]) if oldest else 0.0
                for kind, oldest in (("train", ready), ("sample", unfinished))
            },
        }

    def _append(
        self,
        tenant: str,
        run_id: str,
        seq_id: int,
        kind: str,
        digest: str,
        body: bytes,
        *rest: str | float,
        num_tokens: int = 0,
    ) -> Promise:
        """Run the append script; `rest` is its ARGV from the mode on."""
        keys.run(tenant, run_id)
        request_id = keys.request_id(run_id, seq_id)
        self._store.check_room()  # before the body's file is written
        stowed = self._spool.stow(tenant, body)
        reach("api.spooled")
        answer = self._store.script("append")(
            tenant, run_id, seq_id, kind, digest, stowed, len(body), request_id, num_tokens,
            self._settings.tenant_bytes, MAX_AHEAD, *rest,
        )  # fmt: skip
        reach("api.appended")
        if answer != b"NEW":
            self._spool.discard(stowed)
        if answer.startswith(b"QUOTA"):
            raise quotas.refusal(answer)
        if answer not in (b"NEW", b"SAME"):
            raise _refusal(answer.decode(), run_id, seq_id)
        return Promise(request_id=request_id, run_id=run_id, is_new=answer == b"NEW")

    def _body(self, stowed: bytes | None) -> bytes | OSError:
        try:
            return b"" if stowed is None else self._spool.load(stowed)
        except OSError as error:
            return error

    def _slices(self, lease: Lease, rows: Sequence[list[bytes]]) -> list[Slice]:
        if rows:
            reach("trainer.taken")
        return [piece for row in rows if (piece := self._slice(lease, row)).operations]

    def _slice(self, lease: Lease, row: list[bytes]) -> Slice:
        tenant, run_id, token, applied = row[0].decode(), row[1].decode(), int(row[2]), int(row[3])
        newly_owned = lease.held.get((tenant, run_id)) != token
        lease.held[(tenant, run_id)] = token
        entries = zip(row[5::3], row[6::3], row[7::3], strict=True)
        operations = tuple(self._readable(tenant, run_id, entries))
        return Slice(
            tenant=tenant,
            run_id=run_id,
            token=token,
            newly_owned=newly_owned,
            applied=applied,
            operations=operations,
            crashes=int(row[4]),
        )

    def _readable(self, tenant: str, run_id: str, entries: Iterable[tuple[bytes, bytes, bytes]]) -> Iterator[Operation]:
        """Yield operations up to the first that another version has accepted: it and what follows wait for that one."""
        for seq, header, stowed in entries:
            try:
                yield self._operation(tenant, run_id, int(seq), header, body=stowed[1:])
            except OtherVersion as other:
                if (waits := (run_id, seq)) not in self._told:
                    log.error("operation %s of run %s waits: %s", seq.decode(), run_id, other)
                self._told.add(waits)
                return

    def _operation(
        self, tenant: str, run_id: str, seq: int, header: bytes, *, body: bytes = b"", replay: bool = False
    ) -> Operation:
        fields = ENTRY.current(json.loads(header))
        return Operation(
            tenant=tenant,
            run_id=run_id,
            seq_id=seq,
            request_id=keys.request_id(run_id, seq),
            kind=fields["kind"],
            submitted=float(fields["submitted"]),
            size=int(fields["size"]),
            tokens=int(fields.get("tokens") or 0),
            body=body,
            replay=replay,
            error=fields.get("outcome") or "",
            voids=fields.get("voids") == "1",
        )


class _SamplerTaken(Exception):
    """The number that an ephemeral save asks for names another sampler."""


def _check_seq(seq_id: int) -> None:
    if not 1 <= seq_id <= keys.MAX_RUN_SEQ:
        raise InvalidRequest(f"seq_id must be 1 to {keys.MAX_RUN_SEQ}, not {shown(seq_id)}")


def _refusal(answer: str, run_id: str, seq_id: int) -> Exception:
    """Return the error for a script's refusal to append."""
    session_id = keys.session_of(run_id)
    return {
        "KEYREUSED": KeyReused(f"seq_id {seq_id} of {run_id!r} holds a different operation; use the next one"),
        "SAMPLER": _SamplerTaken(session_id),
        "MISSING": KeyReused(f"seq_id {seq_id} of {run_id!r} came too late: it was closed as never arrived"),
        "AHEAD": InvalidRequest(f"seq_id {seq_id} is too far ahead of {run_id!r}'s others; count up by 1"),
        "FULL": Overloaded(f"too much is queued already; send seq_id {seq_id} of {run_id!r} again when some is done"),
        "NOTFOUND": NotFound(f"no run {run_id!r}"),
        "SESSION": NotFound(f"no session {session_id!r}"),
        "GONE": Gone(f"session {session_id!r} is finished; open a new one"),
    }[answer]
