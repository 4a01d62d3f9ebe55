"""What the next pass holds is read while the present one computes, and results leave before the next has ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.journal import Journal, Operation
from openrl.tasks.messages import OptimStep
from openrl.workers.trainer.reading import Reading
from tests.trainer.bench import forward_backward
from tests.trainer.service import Client, Service, Trainer

LARGE = [60, 30]
DEADLINE_S = 20


class Watched:
    """A journal that tells which bodies were read by which thread."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.read: list[tuple[int, str]] = []
        self._changed = threading.Condition()

    def bodies(self, operations: Sequence[Operation]) -> list[bytes | OSError]:
        bodies = self._journal.bodies(operations)
        with self._changed:
            self.read += [(threading.get_ident(), operation.request_id) for operation in operations]
            self._changed.notify_all()
        return bodies

    def await_beside(self, request_id: str) -> None:
        """Wait until another thread than the caller's has read it."""
        me = threading.get_ident()

        def is_read() -> bool:
            return any(thread != me and name == request_id for thread, name in self.read)

        with self._changed:
            assert self._changed.wait_for(is_read, DEADLINE_S), "nobody reads it meanwhile"


@pytest.fixture
def trainer(service: Service) -> Trainer:
    """A trainer that reads ahead whatever there is, one forward of `LARGE` a pass."""
    return service.trainer(token_budget=96, reading=Reading(service.journal, least_bytes=1))


def during(trainer: Trainer, then: Callable[[int, list[str]], None]) -> None:
    """Have `then` called within each pass of forwards with its number and its request ids."""
    execute, numbers = trainer.device.execute, iter(range(1, 100))

    def carry_out(works):
        if works[0].packed:
            then(next(numbers), [f"{work.run.run_id}:{work.seq_id}" for work in works])
        return execute(works)

    trainer.device.execute = carry_out


def backlog(service: Service, trainer: Trainer, *tenants: str) -> list[Client]:
    clients = [service.client(tenant) for tenant in tenants]
    trainer.spin()
    for number, client in enumerate(clients):
        client.submit(forward_backward(lengths=LARGE, seed=number))
        client.submit(OptimStep(learning_rate=0.01))
    return clients


def test_the_next_pass_is_read_during_this_one_and_a_result_is_readable_before_the_next_has_ended(service, trainer):
    a, b = backlog(service, trainer, "a", "b")
    watched = trainer.engine._reading._journal = Watched(service.journal)
    seen = []

    def within(number: int, names: list[str]) -> None:
        seen.append((names, a.states(), b.states()))
        if number == 1:
            watched.await_beside(f"{b.run_id}:1")

    during(trainer, within)
    trainer.spin()
    assert seen == [([f"{a.run_id}:1"], "dpp", "dpp"), ([f"{b.run_id}:1"], "ddp", "dpp")]
    assert (a.states(), b.states()) == ("ddd", "ddd")
    assert len([name for _, name in watched.read if name == f"{b.run_id}:1"]) == 1, "it was read a second time"


def test_what_was_read_ahead_trains_the_bits_that_it_trains_otherwise(service, trainer):
    clients = backlog(service, trainer, "a", "b")
    trainer.spin()
    plain = service.trainer(token_budget=96, reading=Reading(service.journal, least_bytes=1 << 40))
    trainer.die()
    others = backlog(service, plain, "a", "b")
    plain.spin()
    assert [one.answer(2)["metrics"] for one in clients] == [one.answer(2)["metrics"] for one in others]


def test_a_prepared_operation_that_was_cancelled_meanwhile_has_no_effect(service, trainer):
    a, b = backlog(service, trainer, "a", "b")
    watched = trainer.engine._reading._journal = Watched(service.journal)
    passes = []

    def within(number: int, names: list[str]) -> None:
        passes.append(names)
        if number == 1:
            watched.await_beside(f"{b.run_id}:1")
            Cancelling(service.store).cancel("b", f"{b.run_id}:1")

    during(trainer, within)
    trainer.spin()
    assert passes == [[f"{a.run_id}:1"]]
    assert (a.states(), b.states()) == ("ddd", "dff")
    assert "cancelled by its client" in b.future(1).error
    assert trainer.engine._reading._ahead is None, "it still lies in memory"


def test_a_prepared_operation_whose_run_was_taken_over_meanwhile_is_left_to_its_owner(service, trainer):
    a, b = backlog(service, trainer, "a", "b")
    watched = trainer.engine._reading._journal = Watched(service.journal)
    other = service.trainer()
    passes = []

    def within(number: int, names: list[str]) -> None:
        passes.append(names)
        if number == 1:
            watched.await_beside(f"{b.run_id}:1")
            owner = {"owner": other.name, "generation": other.lease.generation, "token": "99"}
            service.store.redis.hset(keys.run("b", b.run_id), mapping=owner)

    during(trainer, within)
    trainer.spin()
    assert passes == [[f"{a.run_id}:1"]]
    assert (a.states(), b.states()) == ("ddd", "dpp")
    other.spin()
    assert b.states() == "ddd"


def test_a_prepared_body_that_is_broken_fails_its_operation_alone_and_only_when_it_is_next(service, trainer):
    a, b = backlog(service, trainer, "a", "b")
    service.store.redis.hset(keys.bodies("b", b.run_id), 1, b"=\xff\xff\xff")
    trainer.spin()
    assert (a.states(), b.states()) == ("ddd", "dff")
    assert "error id" in b.future(1).error


def test_what_is_read_ahead_is_bounded_in_bytes_and_little_is_not_worth_it(service):
    trainer = service.trainer(token_budget=96)
    clients = backlog(service, trainer, *"abc")
    [slices] = [service.journal.take("tiny", trainer.lease)]
    operations = [each.operations[0] for each in slices]
    assert len(operations) == len(clients)
    ahead = Reading(service.journal)
    ahead.begin(operations)
    assert ahead._ahead is None
    ahead = Reading(service.journal, least_bytes=1, most_bytes=sum(one.size for one in operations[:2]))
    ahead.begin(operations)
    assert len(ahead._ahead.result().messages) == 2
    assert len(ahead.read(operations).messages) == 3 and ahead._ahead is None


def test_a_store_that_was_away_while_something_was_read_ahead_is_asked_again(service, trainer):
    a, b = backlog(service, trainer, "a", "b")

    class Away(Watched):
        def bodies(self, operations):
            beside = threading.current_thread() is not threading.main_thread()
            bodies = super().bodies(operations)
            if beside:
                raise ConnectionError("the store does not answer")
            return bodies

    watched = trainer.engine._reading._journal = Away(service.journal)
    during(trainer, lambda number, names: number == 1 and watched.await_beside(f"{b.run_id}:1"))
    trainer.spin()
    assert (a.states(), b.states()) == ("ddd", "ddd")


class Hanging(Watched):
    """A journal on a disk that hangs, from the read of one operation on, until it is let go."""

    def __init__(self, journal: Journal, request_id: str) -> None:
        super().__init__(journal)
        self.request_id = request_id
        self.reader: threading.Thread | None = None
        self.hangs, self.let_go = threading.Event(), threading.Event()

    def bodies(self, operations: Sequence[Operation]) -> list[bytes | OSError]:
        if any(operation.request_id == self.request_id for operation in operations):
            self.reader = threading.current_thread()
            self.hangs.set()
            assert self.let_go.wait(DEADLINE_S)
        return super().bodies(operations)


@pytest.mark.parametrize("whose", ["read ahead", "read by the engine"])
def test_a_read_that_hangs_keeps_neither_stop_nor_the_process_and_nothing_is_begun_behind_it(service, whose, caplog):
    trainer = service.trainer(token_budget=96, stop_s=0.2, reading=Reading(service.journal, least_bytes=1))
    a, b = backlog(service, trainer, "a", "b")
    hanging = trainer.engine._reading._journal = Hanging(
        service.journal, f"{(b if whose == 'read ahead' else a).run_id}:1"
    )
    trainer.engine.start()
    try:
        assert hanging.hangs.wait(DEADLINE_S)
        began = time.monotonic()
        trainer.engine.stop()
        assert time.monotonic() - began < DEADLINE_S / 2
        assert hanging.reader.daemon, "the process would wait for it when it leaves"
    finally:
        hanging.let_go.set()
        trainer.engine._thread.join(DEADLINE_S)
    assert not trainer.engine._thread.is_alive() and trainer.engine._reading._ahead is None
    assert "going on" not in caplog.text, "the engine's step broke"


def test_nothing_is_read_ahead_behind_a_read_that_hangs(service, trainer):
    backlog(service, trainer, "a", "b")
    operations = [each.operations[0] for each in service.journal.take("tiny", trainer.lease)]
    hanging = Hanging(service.journal, operations[0].request_id)
    ahead = Reading(hanging, least_bytes=1)
    ahead.begin(operations[:1])
    assert hanging.hangs.wait(DEADLINE_S)
    ahead.begin(operations[1:])
    assert ahead._ahead is None
    assert len(ahead.read(operations[1:]).messages) == 1
    hanging.let_go.set()
    hanging.reader.join(DEADLINE_S)
    ahead.begin(operations[1:])
    assert len(ahead._ahead.result().messages) == 1
