"""Workers as programs that can be stopped before each of their calls: stop one for good and it has crashed, stop one
past its lease and it is a zombie, go on with it and it does harm if it can.

They keep the trainer's protocol (take, begin, rebuild, carry out, commit, snapshot, hand back) on the toy model.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from openrl.tasks import keys
from openrl.tasks.errors import QuotaExceeded, StaleOwner, StoreUnavailable, Undecodable
from openrl.tasks.journal import Committal, Journal, Operation, Outcome, SampleJob, Slice, Taking
from openrl.tasks.messages import Message, SaveWeights, SaveWeightsForSampler, decode
from openrl.tasks.operations import MISSING, REFUSED
from openrl.tasks.ownership import Lease
from openrl.tasks.records import Checkpoint, Sampler, checkpoint_row, sampler_row
from tests.model.toy import BASE, State, carried_out, drawn, failed, withdrawn
from tests.model.world import World

SLUG = keys.slug(BASE)
ACCIDENT = "the device broke"
MOST_CRASHES = 3

Key = tuple[str, str]
Program = Generator[None, int, None]
"""Yields before each call; what is sent decides what the program does next where it has a choice."""


class StillLease(Lease):
    """A lease that renews when the test says so, and that never suspects by itself that it is lost."""

    def _renew(self) -> None:
        return

    @property
    def lost(self) -> bool:
        """Tell what the store has told."""
        return self._lost

    def renew(self) -> None:
        """Renew now."""
        self._try_to_renew()


@dataclass(slots=True)
class Disk:
    """Directories of weights: whole ones, and those of which only a part is written."""

    whole: dict[str, State] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Resident:
    """A run in a trainer's memory."""

    token: int
    applied: int
    state: State


class Process:
    """One worker process; what it has in memory goes with it."""

    def __init__(self, world: World, worker_id: str, kind: str) -> None:
        self.journal = Journal(world)
        self.lease = StillLease(world, worker_id, kind, SLUG)

    @property
    def identity(self) -> str:
        """Return its name, never used again."""
        return self.lease.identity


class Trainer(Process):
    """A trainer, and the thread that writes its snapshots while it goes on."""

    def __init__(self, world: World, worker_id: str, disk: Disk) -> None:
        super().__init__(world, worker_id, "trainer")
        self.disk = disk
        self.residents: dict[Key, Resident] = {}
        self.taken: list[Slice] | None = None
        """What a commit has brought along."""
        self.then: Taking | None = None
        """What the next commit brings along."""
        self.photos: list[tuple[Key, int, int, State]] = []
        """Copies to be written: run, token, position, state."""
        self.main = self._main()
        self.writer = self._writer()
        next(self.main)
        next(self.writer)

    def _main(self) -> Program:
        while True:
            choice = yield
            try:
                slices, self.taken = self.taken, None
                is_brought = slices is not None
                taking = Taking(SLUG, 1 + choice // 2, 1 + choice % 4, 1 + choice // 2)
                slices = self.journal.take_next(self.lease, taking) if slices is None else slices
            except StoreUnavailable:
                continue
            for piece in slices:
                self.then = taking if piece is slices[-1] and not is_brought else None
                yield from self._serve(piece)
            self.then = None
            choice = yield
            if choice % 4 == 0:
                yield from self._hand_back()

    def _serve(self, piece: Slice) -> Program:
        key, operations = (piece.tenant, piece.run_id), piece.operations
        if piece.crashes >= MOST_CRASHES:
            self.residents.pop(key, None)
            died = f"the worker died {piece.crashes} times while running it"
            yield from self._committed(piece.token, operations[0], Outcome(error=died, category="server"))
            return
        if piece.crashes:
            yield
            try:
                if not self.journal.begin(self.lease, piece):
                    return
            except StoreUnavailable:
                return
            operations = operations[:1]
        run = self.residents.get(key)
        if run is None or (run.token, run.applied) != (piece.token, piece.applied):
            self.residents.pop(key, None)
            yield
            run = yield from self.rebuilt(key, piece.token, piece.applied)
            if run is None:
                return
            self.residents[key] = run
        yield from self._carry_out(key, run, operations)

    def rebuilt(self, key: Key, token: int, applied: int) -> Generator[None, int, Resident | None]:
        """Return a run from its last snapshot and the journal behind it; None if that is not to be had (now)."""
        found = self.journal.snapshot(*key)
        state, first = State(), -1
        yield
        if found is not None:
            directory, first = found
            if directory not in self.disk.whole:
                # Only an owner that was overtaken in between finds its snapshot gone.
                assert self.journal.snapshot(*key) != found, f"the snapshot {directory} counts and can't be read"
                return None
            state = self.disk.whole[directory]
        try:
            for each in self.journal.history(*key, after=first, upto=applied):
                state = self._repeated(state, each)
        except (OSError, IndexError, Undecodable):
            assert self.journal.snapshot(*key) != found, f"the journal of {key} behind {found} can't be read"
            return None
        return Resident(token, applied, state)

    def _repeated(self, state: State, each: Operation) -> State:
        if each.kind in (REFUSED, MISSING):
            return withdrawn(state, voids=each.voids)
        if each.error:
            return failed(state, each.kind)
        state, result = carried_out(state, each.seq_id, decode(each.kind, each.body), self.disk.whole)
        assert result is not None, f"{each.request_id} had succeeded and fails now"
        return state

    def _carry_out(self, key: Key, run: Resident, operations: tuple[Operation, ...]) -> Program:
        """Carry out some operations together, then commit them one by one."""
        choice = yield
        chosen = operations[: 1 + choice % 3]
        bodies = self.journal.bodies(chosen)
        state, done = run.state, []
        for each, body in zip(chosen, bodies, strict=True):
            if each.kind in (REFUSED, MISSING):
                state = withdrawn(state, voids=each.voids)
                done.append((each, state, Outcome(error=each.error)))
                continue
            if isinstance(body, OSError) or not body:
                # Trimmed or withdrawn under the hands of an owner that isn't one any more.
                assert self._is_stale(key, run.token), f"{each.request_id} has no body: {body!r}"
                break
            message = decode(each.kind, body)
            state, outcome = self._outcome(key, run.token, state, each, message, breaks=choice == 11)
            done.append((each, state, outcome))
        then, self.then = self.then, None
        for each, after, outcome in done:
            self.then = then if each is done[-1][0] else None
            ours = yield from self._committed(run.token, each, outcome)
            if not ours:
                self.residents.pop(key, None)
                return
            run.applied, run.state = each.seq_id, after
            choice = yield
            if choice % 3 == 0:
                self.photos.append((key, run.token, run.applied, run.state))

    def _outcome(
        self, key: Key, token: int, state: State, each: Operation, message: Message, *, breaks: bool
    ) -> tuple[State, Outcome]:
        if breaks:
            return failed(state, each.kind), Outcome(error=ACCIDENT, category="server")
        state, result = carried_out(state, each.seq_id, message, self.disk.whole)
        if result is None:
            return state, Outcome(error="it fails whoever carries it out")
        rows: tuple = ()
        if isinstance(message, SaveWeights | SaveWeightsForSampler):
            directory = f"tenants/{key[0]}/{key[1]}/{each.seq_id}.{token}"
            self.disk.whole[directory] = state
            rows = _rows(key, each.seq_id, message, directory)
        return state, Outcome(result=result, rows=rows)

    def _committed(self, token: int, each: Operation, outcome: Outcome) -> Generator[None, int, bool]:
        while True:
            choice = yield
            then, self.then = self.then if choice % 2 else None, None
            [refusal], self.taken = self.journal.commit_all(self.lease, [Committal(each, outcome, token)], then=then)
            match refusal:
                case None:
                    return True
                case StoreUnavailable() if choice:
                    pass
                case StoreUnavailable() | StaleOwner():
                    return False
                case QuotaExceeded():
                    outcome = Outcome(error="over its quota")
                case _:
                    raise refusal

    def _hand_back(self) -> Program:
        for key, run in list(self.residents.items()):
            self.photos.append((key, run.token, run.applied, run.state))
            choice = yield
            if choice % 2:
                while self.photos:
                    yield from self._write(*self.photos.pop(0))
            try:
                self.journal.release(self.lease, *key, run.token)
            except StoreUnavailable:
                pass
            self.residents.pop(key, None)

    def _writer(self) -> Program:
        while True:
            choice = yield
            if self.photos:  # in any order: a disk may be slow once
                yield from self._write(*self.photos.pop(choice % len(self.photos)))

    def _write(self, key: Key, token: int, applied: int, state: State) -> Program:
        """Write a snapshot and register it; what nobody may need any more is deleted."""
        before = self.journal.snapshot(*key)
        directory = f"snapshots/{key[1]}/{applied}.{token}"
        if before is not None and self.disk.whole.get(before[0]) == state:
            directory = before[0]  # what changed nothing is covered by the files that are there
        yield
        if directory not in self.disk.whole:
            self.disk.torn.add(directory)
            yield
            self.disk.torn.discard(directory)
            self.disk.whole[directory] = state
        while True:
            choice = yield
            try:
                self.journal.record_snapshot(self.lease, *key, token, directory, applied)
                break
            except StoreUnavailable:
                if choice == 0:
                    return  # it may count or not: what was written stays
            except StaleOwner:
                named = self.journal.snapshot(*key)
                if named is None or named[0] != directory:
                    self.disk.whole.pop(directory, None)
                return
        yield
        if before is not None and before[0] != directory:
            self.disk.whole.pop(before[0], None)

    def _is_stale(self, key: Key, token: int) -> bool:
        return bool(self.journal._store.redis.hget(keys.run(*key), "token") != str(token).encode())


class SamplerProcess(Process):
    """A sampler: takes requests, ends each when the test says so."""

    def __init__(self, world: World, worker_id: str) -> None:
        super().__init__(world, worker_id, "sampler")
        self.hands: list[SampleJob] = []

    def step(self, choice: int) -> None:
        """Take some, or end one, or hand all back."""
        try:
            if choice % 8 == 0:
                self.journal.requeue_samples(self.lease)
                self.hands.clear()
            elif self.hands and choice % 2:
                self._end(self.hands[choice % len(self.hands)], breaks=choice == 11)
            else:
                self.hands += self.journal.take_samples(SLUG, self.lease, limit=1 + choice % 3)
        except StoreUnavailable:
            return

    def _end(self, job: SampleJob, *, breaks: bool) -> None:
        outcome = Outcome(error=ACCIDENT, category="server") if breaks else Outcome(result=drawn(job.message))
        try:
            self.journal.commit_sample(self.lease, job, outcome)
        except StaleOwner:
            pass
        self.hands.remove(job)


def _rows(key: Key, seq: int, message: Message, directory: str) -> tuple:
    tenant, run_id = key
    if isinstance(message, SaveWeightsForSampler):
        sampler = Sampler(
            sampler_id=message.sampler_id, session_id=keys.session_of(run_id), base_model=BASE, slug=SLUG,
            adapter_dir=directory, run_id=run_id, size_bytes=50 + seq,
        )  # fmt: skip
        return sampler_row(tenant, sampler)
    assert isinstance(message, SaveWeights)
    checkpoint = Checkpoint(
        run_id=run_id, checkpoint_id=f"weights/{message.name}", kind="training", directory=directory,
        size_bytes=100 + seq, created=0.0, base_model=BASE, rank=8, train_attn=True, train_mlp=True,
        train_unembed=True, step=0, has_optimizer=True,
    )  # fmt: skip
    return (checkpoint_row(tenant, checkpoint),)
