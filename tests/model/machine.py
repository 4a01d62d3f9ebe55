"""Clients, trainers, samplers, the beat and time, each doing one thing at a time in an order that hypothesis chooses.

After each step the store's books must balance, and what every promise says must be what the toy model's chain gives
when the operations are followed one by one in the order of their numbers. When the example ends, everything is let
run out, and the same must still be true, with nothing acknowledged left open.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import redis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.deliveries import Deliveries
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, Overloaded, QuotaExceeded, StoreUnavailable
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import CreateModel, Message, OptimStep, Sample, SaveWeightsForSampler
from openrl.tasks.orphans import named
from openrl.tasks.ownership import new_epoch
from openrl.tasks.records import Sampler
from openrl.tasks.registry import Registry
from openrl.tasks.samples import digest
from openrl.tasks.settings import StoreSettings
from openrl.tasks.versions import Versions
from tests.model import toy
from tests.model.books import PASSING, Books
from tests.model.toy import State
from tests.model.workers import ACCIDENT, SLUG, Disk, Key, SamplerProcess, Trainer
from tests.model.world import FAULTS, Damage, World

TENANTS = ("alice", "bob")
CANCELLED = "cancelled by its client"
REFUSAL = "nonsense"
GAP_S, LEASE_S, DAYS_S = 10.0, 100.0, 8 * 86400.0
MOST_RUNS = 3

RUNS = st.integers(0, MOST_RUNS - 1)
CHOICES = st.integers(0, 11)
KINDS = st.sampled_from([0, 1, 2, 0, 1, 5, 6, 5, 4, 3, 7, 8, 8, 9])
FAULT = st.sampled_from(("",) * 8 + FAULTS)
STEP = st.tuples(CHOICES, FAULT)
FEW, MORE = st.lists(STEP, min_size=1, max_size=8), st.lists(STEP, min_size=6, max_size=20)
ACTS = ["again", "other", "refuse", "cancel", "cancel_all"]
EVENTS = ["close gaps", "restart the store", "days later", "set a quota", *["drop a version"] * 3]


@dataclass(slots=True)
class Client:
    """What one run's client has sent, and what the chain says of it."""

    key: Key
    sent: dict[int, Message] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    position: int = -1
    state: State = field(default_factory=State)


@dataclass(frozen=True, slots=True)
class End:
    """How a promise was kept; it never changes."""

    state: str
    result: bytes
    error: str


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Expect that what is sent under a used number is refused."""
    with suppress(KeyReused):
        yield
        raise AssertionError(f"{what} was taken twice")


class Machine(RuleBasedStateMachine):
    """One example: a store, and all who use it."""

    url: ClassVar[str]
    directory: ClassVar[Path]
    damage: ClassVar[Damage] = {}

    def __init__(self) -> None:
        super().__init__()
        settings = StoreSettings(
            redis_url=self.url, data_dir=self.directory, inline_bytes=500, lease_s=LEASE_S, gap_timeout_s=GAP_S,
            tenant_bytes=6000,
        )  # fmt: skip
        self.world = World(redis.Redis.from_url(self.url), settings, self.damage)
        self.world.begin()
        self.journal, self.registry = Journal(self.world), Registry(self.world)
        self.futures, self.deliveries = Futures(self.world), Deliveries(self.world)
        self.cancelling = Cancelling(self.world)
        self.disk = Disk()
        self.clients: dict[int, Client] = {}
        self.ends: dict[Key, End] = {}
        self.requests: dict[Key, Sample] = {}
        self.cancelled: set[Key] = set()
        self.trainers: list[Trainer] = []
        self.samplers: list[SamplerProcess] = []
        self.cursors = dict.fromkeys(TENANTS, 0)
        self.polled: dict[str, list[str]] = {tenant: [] for tenant in TENANTS}
        self.excused: set[Key] = set()
        """Samples that their client was given by name, or that expired: the line needn't tell of them."""
        self.checked: dict[Key, Any] = {}

    @initialize(kinds=st.lists(KINDS, min_size=4, max_size=12))
    def open(self, kinds: list[int]) -> None:
        """Open each tenant's session, with a sampler of the base model, and some runs with something to do."""
        new_epoch(self.world)
        self.sessions = {tenant: self.registry.create_session(tenant).session_id for tenant in TENANTS}
        self.bases: dict[str, Sampler] = {}
        for tenant, session_id in self.sessions.items():
            self.bases[tenant] = self.registry.create_sampler(
                tenant, session_id=session_id, seq=0, base_model=toy.BASE, slug=SLUG
            )
        self._start_trainer(0)
        self._start_sampler(0)
        for number in range(MOST_RUNS):
            tenant = TENANTS[number % 2]
            message = CreateModel(base_model=toy.BASE, rank=8, seed=number)
            self.clients[number] = Client((tenant, keys.run_id(self.sessions[tenant], number)), sent={0: message})
            if number or kinds[0]:  # what is sent to a run that isn't there is refused
                self._create(self.clients[number], "")
            for kind in kinds[number::MOST_RUNS]:
                self._submit(self.clients[number], self._unsent(self.clients[number], 0), kind, "")

    # clients of runs

    @rule(number=RUNS, operations=st.lists(st.tuples(st.integers(0, 2), KINDS, FAULT), min_size=2, max_size=6))
    def submit(self, number: int, operations: list[tuple[int, int, str]]) -> None:
        """Send operations that weren't sent yet: the next ones, or some out of order."""
        for ahead, kind, fault in operations:
            self._submit(self.clients[number], self._unsent(self.clients[number], ahead), kind, fault)

    @rule(number=RUNS, act=st.sampled_from(ACTS), which=st.integers(0, 30), fault=FAULT)
    def act(self, number: int, act: str, which: int, fault: str) -> None:
        """Send again what was sent, or something else under its number, or what is refused; cancel one or all."""
        client = self.clients[number]
        seqs = sorted(client.sent)
        seq = seqs[which % len(seqs)]
        if act == "refuse" and self._known(client.key, 0):
            refused = self._unsent(client, which % 3)
            self.journal.refuse(*client.key, refused, ("forward_backward", "", "forward")[which % 3], b"x", REFUSAL)
            client.refused.add(refused)
        elif act == "cancel":
            self._cancel(client, seq, fault)
        elif act == "cancel_all":
            self._cancel(client, None, fault)
        elif seq == 0:
            self._create(client, fault)
        elif act == "again":
            self._send(client, seq, _repeated(client.sent[seq]), fault)
        elif act == "other" and self._known(client.key, seq):
            with refusing(f"{seq} of {client.key}"):
                self.journal.submit(*client.key, seq, OptimStep(learning_rate=99.0))

    # clients of samplers

    @rule(
        tenant=st.sampled_from(TENANTS),
        asked=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 8), FAULT), min_size=1, max_size=5),
    )
    def sample(self, tenant: str, asked: list[tuple[int, int, str]]) -> None:
        """Ask for samples, perhaps again."""
        sampler = self.bases[tenant]
        for clone, seq, fault in asked:
            number = clone * 10**keys.CLONE_DIGITS + seq
            self.world.fault = fault
            try:
                self.journal.submit_sample(tenant, sampler, number, toy.prompt(seq))
            except (StoreUnavailable, Overloaded):
                pass
            if self.world.redis.hexists(keys.sampler_ops(tenant, sampler.sampler_id), str(number)):
                self.requests[tenant, keys.request_id(sampler.sampler_id, number)] = toy.prompt(seq)

    @rule(act=st.sampled_from(["other", "cancel", "poll", "lost poll"]), which=st.integers(0, 30), fault=FAULT)
    def act_on_samples(self, act: str, which: int, fault: str) -> None:
        """Cancel one, ask for another under a used number, ask the line for what has ended (perhaps in vain)."""
        if act in ("poll", "lost poll"):
            self._poll(TENANTS[which % 2], lost=act == "lost poll")
        elif self.requests:
            key = sorted(self.requests)[which % len(self.requests)]
            if act == "cancel":
                self._cancel_sample(key, fault)
            else:
                seq = int(key[1].rpartition(":")[2])
                with refusing(key[1]):
                    self.journal.submit_sample(key[0], self.bases[key[0]], seq, toy.prompt(seq % 1000, other=5000))

    @rule(which=st.integers(0, 200), acknowledge=st.booleans(), fault=FAULT)
    def deliver(self, which: int, acknowledge: bool, fault: str) -> None:
        """Give a result to its client."""
        if not self.ends:
            return
        tenant, request_id = sorted(self.ends)[which % len(self.ends)]
        try:
            self.futures.get(tenant, request_id)
            self.world.fault = fault
            if acknowledge:
                self.deliveries.acknowledge(tenant, [request_id])
            else:
                self.excused.add((tenant, request_id))
                self.futures.deliver(tenant, request_id)
        except (StoreUnavailable, Gone):
            return

    # workers

    @rule(which=st.integers(0, 3), choices=MORE)
    def train(self, which: int, choices: list[tuple[int, str]]) -> None:
        """Let a trainer go on for some steps: the living ones, and those that should be dead."""
        self._step([self.trainers[which % len(self.trainers)].main.send], choices)

    @rule(which=st.integers(0, 3), choices=MORE)
    def train_and_write(self, which: int, choices: list[tuple[int, str]]) -> None:
        """Let a trainer go on, and beside it the thread that writes its snapshots."""
        trainer = self.trainers[which % len(self.trainers)]
        self._step([trainer.main.send, trainer.writer.send], choices)

    @rule(which=st.integers(0, 3), choices=FEW)
    def write(self, which: int, choices: list[tuple[int, str]]) -> None:
        """Let the thread that writes a trainer's snapshots go on alone, however late."""
        self._step([self.trainers[which % len(self.trainers)].writer.send], choices)

    @rule(which=st.integers(0, 3), choices=FEW)
    def draw(self, which: int, choices: list[tuple[int, str]]) -> None:
        """Let a sampler go on."""
        self._step([self.samplers[which % len(self.samplers)].step], choices)

    @rule(which=st.integers(0, 3), steps=st.tuples(FEW, MORE, MORE))
    def overtake(self, which: int, steps: tuple[list, list, list]) -> None:
        """Stop a trainer wherever it is, for longer than its lease; let another go on, and then it too."""
        late = self.trainers[which % len(self.trainers)]
        self._step([late.main.send], steps[0])
        self._pass(LEASE_S + 1, but=[late])
        if late is self.trainers[-1]:
            self._start_trainer(which)
        self._step([self.trainers[-1].main.send], steps[1])
        self._step([late.main.send, late.writer.send], steps[2])

    @rule(which=st.integers(0, 3), steps=st.tuples(FEW, FEW, FEW))
    def overtake_a_sampler(self, which: int, steps: tuple[list, list, list]) -> None:
        """Stop a sampler for longer than its lease; let another go on, and then it too."""
        late = self.samplers[which % len(self.samplers)]
        self._step([late.step], steps[0])
        self._pass(LEASE_S + 1, but=[late])
        if late is self.samplers[-1]:
            self._start_sampler(which)
        self._step([self.samplers[-1].step], steps[1])
        self._step([late.step], steps[2])

    @rule(number=RUNS, ahead=st.integers(1, 3), which=st.integers(0, 3), steps=st.tuples(FEW, MORE), fault=FAULT)
    def cancel_what_is_next(self, number: int, ahead: int, which: int, steps: tuple[list, list], fault: str) -> None:
        """Cancel one of a run's next operations while its trainer may be about to carry it out."""
        client = self.clients[number]
        for kind in (0, 5, 4):
            self._submit(client, self._unsent(client, 0), kind, "")
        self._step([self.trainers[which % len(self.trainers)].main.send], steps[0])
        self._see_positions()
        self._cancel(client, client.position + ahead, fault)
        self._step([self.trainers[which % len(self.trainers)].main.send], steps[1])

    @rule(worker=st.integers(0, 2), trains=st.booleans())
    def start_a_worker(self, worker: int, trains: bool) -> None:
        """Start a worker, beside another or as the next process of its name."""
        (self._start_trainer if trains else self._start_sampler)(worker)

    @rule(which=st.integers(0, 3), trains=st.booleans(), for_good=st.booleans())
    def lose_a_lease(self, which: int, trains: bool, for_good: bool) -> None:
        """Let one process be silent for longer than its lease. Unless it has died it will go on."""
        group: list[Any] = self.trainers if trains else self.samplers
        lost = group[which % len(group)]
        self._pass(LEASE_S + 1, but=[lost])
        if for_good:
            group.remove(lost)
        if not group:
            (self._start_trainer if trains else self._start_sampler)(which)

    # the beat, time, the store

    @rule(event=st.sampled_from(EVENTS), which=st.integers(0, 9))
    def happen(self, event: str, which: int) -> None:
        """Let the beat, an operator or time do something."""
        if event == "close gaps":
            self._pass(GAP_S + 1)
            self.journal.close_gaps()
        elif event == "restart the store":  # nothing acknowledged is lost with it, and its epoch grows
            new_epoch(self.world)
        elif event == "days later":
            self.excused |= self.ends.keys()
            self._pass(DAYS_S)
            self.futures.sweep()
        elif event == "set a quota":
            limits = {"operations": (0, 3)[which % 2], "stored_bytes": (0, 400)[which // 2 % 2]}
            self.world.redis.hset(keys.quota(TENANTS[which % 2]), mapping=limits)
        else:
            versions = Versions(self.world).all()
            if versions:
                Versions(self.world).drop(versions[which % len(versions)])

    # what must be true

    @invariant()
    def the_books_balance_and_each_promise_says_what_took_effect(self) -> None:
        """Check everything that can be checked at any moment."""
        if hasattr(self, "bases"):
            self._check()

    def teardown(self) -> None:
        """Let everything run out, unless something is wrong already."""
        try:
            if sys.exc_info()[0] is None and hasattr(self, "bases"):
                self._drain()
        finally:
            self.world.close()

    def _check(self) -> Books:
        books = Books(self.world)
        books.check()
        self._see(books)
        for client in self.clients.values():
            self._check_run(client, books)
        self._check_samples(books)
        return books

    def _see_positions(self) -> None:
        """Note how far the runs are by now."""
        books = Books(self.world)
        self._see(books)
        for client in self.clients.values():
            self._check_run(client, books)

    def _see(self, books: Books | None = None) -> None:
        """Note how promises were kept, once."""
        for key, future in (books or Books(self.world)).futures.items():
            if future[b"state"] == b"pending":
                assert key not in self.ends, f"{key} had ended and waits again"
                continue
            result = self.journal._spool.load(future[b"result"])
            end = End(future[b"state"].decode(), result, future[b"error"].decode())
            assert self.ends.setdefault(key, end) == end, f"{key} ended as {self.ends[key]} and now as {end}"

    def _check_run(self, client: Client, books: Books) -> None:
        run, journal = books.runs.get(client.key), books.journal(client.key)
        if run is None:
            assert not client.acknowledged, f"{client.key} was acknowledged and is gone"
            return
        for seq in client.acknowledged:
            assert seq in journal, f"{seq} of {client.key} was acknowledged and is gone"
            assert journal[seq]["digest"] == digest(client.sent[seq]), f"{seq} of {client.key} is another"
        applied = int(run[b"applied"])
        assert applied >= client.position, f"{client.key} went back from {client.position} to {applied}"
        while client.position < applied:
            client.position += 1
            client.state = self._followed(client, client.position)
        mark = (applied, run.get(b"snapshot"), run.get(b"snapshot_dir"))
        if self.checked.get(client.key) != mark:
            self.checked[client.key] = mark
            self._check_rebuilt(client, applied)

    def _followed(self, client: Client, seq: int) -> State:
        """Return what the client's own operation does to its chain, as its promise says that it ended."""
        end = self.ends.get((client.key[0], keys.request_id(client.key[1], seq)))
        assert end is not None, f"{seq} of {client.key} took effect and its promise wasn't kept"
        message = client.sent.get(seq)
        if end.state == "done":
            assert message is not None, f"{seq} of {client.key} was never sent"
            state, result = toy.carried_out(client.state, seq, message, self.disk.whole)
            assert result == end.result, f"{seq} of {client.key} took effect on another state than that of {seq - 1}"
            return state
        if end.error == f"seq {seq} never arrived":
            assert seq not in client.acknowledged
            return toy.withdrawn(client.state, voids=True)
        if end.error == REFUSAL:
            assert seq in client.refused
            header = self.journal._recorded(*client.key, range(seq, seq + 1))[0]
            return toy.withdrawn(client.state, voids=header.voids)
        assert message is not None
        if end.error == CANCELLED:
            return toy.withdrawn(client.state, voids=message.kind == "forward_backward")
        if "fails whoever" in end.error:
            assert toy.carried_out(client.state, seq, message, self.disk.whole)[1] is None, (
                f"{seq} of {client.key} failed"
            )
        else:
            assert end.error in (ACCIDENT, "over its quota") or "the worker died" in end.error, end.error
        return toy.failed(client.state, message.kind)

    def _check_rebuilt(self, client: Client, applied: int) -> None:
        """Rebuild the run from what is kept of it."""
        program = self.trainers[0].rebuilt(client.key, 0, applied)
        next(program)
        try:
            program.send(0)
        except StopIteration as returned:
            assert returned.value is not None and returned.value.state == client.state, f"{client.key} is rebuilt wrong"

    def _check_samples(self, books: Books) -> None:
        for key, message in self.requests.items():
            end = self.ends.get(key)
            if end is None:
                assert key in books.jobs, f"{key} was acknowledged and is gone"
            elif end.state == "done":
                assert end.result == toy.drawn(message), f"{key} got another's sample"
            elif end.error == CANCELLED:
                assert key in self.cancelled, f"{key} was cancelled by nobody"
            else:
                assert end.error == ACCIDENT or "the worker died" in end.error, end.error

    # the end

    def _drain(self) -> None:
        """Let only sound workers go on until nothing is open; then nothing may be missing, doubled or left behind."""
        self.world.fault = ""
        self.world.redis.delete(*(keys.quota(tenant) for tenant in TENANTS))
        self._pass(LEASE_S + 1, but=[*self.trainers, *self.samplers])
        self._start_trainer(7)
        self._start_sampler(7)
        trainer, sampler = self.trainers[-1], self.samplers[-1]
        for turn in range(400):
            if turn % 20 == 0:
                self._pass(GAP_S + 1)
                for tenant, session_id in self.sessions.items():
                    self.registry.heartbeat(tenant, session_id)
                self.journal.close_gaps()
            trainer.main.send(2)
            trainer.writer.send(2)
            if sampler.hands or turn % 5 == 0:
                sampler.step(1 if sampler.hands else 2)
            if turn % 10 == 9 and not any(self._depth()) and not sampler.hands:
                break
        self._check()
        assert not any(self._depth()), f"left open: {self.journal.depth(SLUG)}"
        for client in self.clients.values():
            for seq in client.acknowledged:
                assert (client.key[0], keys.request_id(client.key[1], seq)) in self.ends
        for zombie in self.trainers[:-1]:
            for _ in range(12):
                zombie.main.send(1)
                zombie.writer.send(1)
        for tenant in TENANTS:
            self._poll(tenant, lost=False)
        for key in self.requests.keys() - self.excused:
            if keys.clone(key[1].rpartition(":")[2]) == "0":
                assert key[1] in self.polled[key[0]], f"the line never told of {key}"
        self._check()
        self._check_what_is_left()

    def _check_what_is_left(self) -> None:
        for each in (*self.trainers, *self.samplers):
            each.lease.close()
        self._pass(DAYS_S + 1, but=[*self.trainers, *self.samplers])
        self.futures.sweep()
        self._start_sampler(8)
        self.samplers[-1].step(2)
        self.samplers[-1].step(8)
        self.samplers[-1].lease.close()
        books = self._check()
        left = [name for name in books.all if PASSING.match(name)]
        assert not left, f"left behind: {left}"
        for key in self.ends:
            with suppress(Gone):
                raise AssertionError(f"{key} has expired and gives {self.futures.get(*key)}")
        assert not books.files, f"left behind: {books.files}"
        assert named(self.world).files == {stowed.decode() for stowed in books.named()}

    def _depth(self) -> list[int]:
        depth = self.journal.depth(SLUG)
        return [*depth["train"].values(), *depth["sample"].values()]

    # helpers

    def _start_trainer(self, worker: int) -> None:
        self.trainers.append(Trainer(self.world, f"t{worker}", self.disk))
        del self.trainers[:-4]

    def _start_sampler(self, worker: int) -> None:
        self.samplers.append(SamplerProcess(self.world, f"s{worker}"))
        del self.samplers[:-4]

    def _step(self, programs: list[Callable[[int], None]], choices: list[tuple[int, str]]) -> None:
        for number, (choice, fault) in enumerate(choices):
            self.world.fault = fault
            programs[number % len(programs)](choice)
            self.world.fault = ""

    def _poll(self, tenant: str, *, lost: bool) -> None:
        """Ask the first client's line for what has ended; the answer may get lost."""
        batch = self.deliveries.since(tenant, self.bases[tenant].sampler_id, 0, self.cursors[tenant])
        if not lost:
            self.cursors[tenant] = batch.cursor
            self.polled[tenant] += [ended.request_id for ended in batch.ended]
            assert len(set(self.polled[tenant])) == len(self.polled[tenant]), "a sample was told of twice"

    def _cancel(self, client: Client, seq: int | None, fault: str) -> None:
        self.world.fault = fault
        with suppress(StoreUnavailable, NotFound, InvalidRequest):
            if seq is None:
                self.cancelling.cancel_run(*client.key, CANCELLED)
                return
            key = client.key[0], keys.request_id(client.key[1], seq)
            if self.cancelling.cancel(*key, CANCELLED) == "cancelled":
                self._see()
                assert self.ends[key].error == CANCELLED

    def _cancel_sample(self, key: Key, fault: str) -> None:
        self.world.fault = fault
        ended = key in self.ends
        try:
            answer = self.cancelling.cancel(*key, CANCELLED)
        except StoreUnavailable:
            answer = "finished"
        if not ended and fault:
            self.cancelled.add(key)
        if answer == "cancelled":
            self.cancelled.add(key)
            self._see()
            assert self.ends[key].error == CANCELLED

    def _create(self, client: Client, fault: str) -> None:
        message = client.sent[0]
        assert isinstance(message, CreateModel)
        self.world.fault = fault
        with suppress(StoreUnavailable):
            session_id = keys.session_of(client.key[1])
            number = int(client.key[1].rpartition(":")[2])
            self.journal.create(client.key[0], session_id, number, message, slug=SLUG)
            client.acknowledged.add(0)

    @staticmethod
    def _unsent(client: Client, ahead: int) -> int:
        missing = (seq for seq in itertools.count(1) if seq not in client.sent and seq not in client.refused)
        return next(itertools.islice(missing, ahead, None))

    def _pass(self, seconds: float, *, but: Sequence[object] = ()) -> None:
        """Let time pass, during which every process renews its lease but those named."""
        while seconds > 0:
            self.world.let_pass(min(seconds, LEASE_S / 2 if seconds < DAYS_S else seconds))
            seconds -= LEASE_S / 2 if seconds < DAYS_S else seconds
            for each in (*self.trainers, *self.samplers):
                if each not in but:
                    each.lease.renew()

    def _known(self, key: Key, seq: int) -> bool:
        return bool(self.world.redis.hexists(keys.journal(*key), seq))

    def _submit(self, client: Client, seq: int, kind: int, fault: str) -> None:
        tenant, run_id = client.key
        rows = sorted(self.disk.whole) if kind == 9 else []
        saved = [each for each in rows if each.startswith(f"tenants/{tenant}/")]
        sampler_id = keys.sampler_id(keys.session_of(run_id), 100 + seq + 50 * int(run_id.rpartition(":")[2]))
        directory = saved[seq % len(saved)] if saved else "nowhere"
        message = toy.operation(kind, seq, sampler_id=sampler_id, directory=directory)
        self._send(client, seq, message, fault)

    def _send(self, client: Client, seq: int, message: Message, fault: str) -> None:
        self.world.fault = fault
        try:
            self.journal.submit(*client.key, seq, message)
        except StoreUnavailable:
            if self._known(client.key, seq):
                client.sent.setdefault(seq, message)
            return
        except KeyReused:
            # Only what was closed as missing, or belongs to another operation, is refused so.
            assert seq not in client.acknowledged or _repeated(client.sent[seq]) != _repeated(message)
            return
        except (NotFound, Overloaded, QuotaExceeded):
            return
        client.sent.setdefault(seq, message)
        client.acknowledged.add(seq)


def _repeated(message: Message) -> Message:
    """Return what arrives when an operation is sent again: the SDK numbers the sampler of each try anew."""
    if isinstance(message, SaveWeightsForSampler) and message.sampler_id:
        return replace(message, sampler_id=keys.sampler_id(keys.session_of(message.sampler_id), 9999))
    return message
