"""Snapshots written beside the training: nobody waits for them, and a trainer may die at any moment of one."""

import gc
import os
import resource
import shutil
import threading
import weakref
from contextlib import contextmanager

import pytest

from openrl.scheduler.sweep import sweep
from openrl.tasks import keys
from openrl.tasks.errors import StoreUnavailable
from openrl.tasks.messages import LoadWeights, OptimStep, SaveWeights
from openrl.workers.trainer import states
from openrl.workers.weights import layout
from tests.trainer.bench import forward_backward
from tests.trainer.heirs import assert_an_heir_has_the_same_bits
from tests.trainer.test_device import bits

PATIENCE_S = 20


class Held:
    """Stops whoever comes by, at a place that the test names, until the test lets go."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.released.wait(PATIENCE_S), "the test never let go"


@contextmanager
def held_before_writing(monkeypatch):
    """Hold the writer before it writes its first byte."""
    held, write = Held(), states.write

    def late(*args, **kwargs):
        if threading.current_thread().name == "trainer-snapshot":
            held()
        return write(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(states, "write", late)
        try:
            yield held
        finally:
            held.released.set()


class LastWords:
    """A journal that a trainer registers one snapshot with, unheard or heard, and nothing after it."""

    def __init__(self, journal, *, heard: bool) -> None:
        self._journal, self._heard = journal, heard

    def __getattr__(self, name):
        return getattr(self._journal, name)

    def record_snapshot(self, *args) -> None:
        if self._heard:
            self._journal.record_snapshot(*args)
        raise StoreUnavailable("this trainer is gone")


@contextmanager
def waiting_for_a_snapshot(trainer, act):
    """Let the engine do something for which it has to wait; what stands in the `with` happens before it goes on."""
    entered, settle = threading.Event(), trainer.snapshots.settle

    def settling(key) -> None:
        entered.set()
        settle(key)

    trainer.snapshots.settle = settling
    acting = threading.Thread(target=act)
    acting.start()
    assert entered.wait(PATIENCE_S), "it didn't wait"
    yield
    acting.join(PATIENCE_S)
    assert not acting.is_alive()


def step(client, number: int, *, rate: float = 0.01) -> None:
    client.submit(forward_backward(seed=number))
    client.submit(OptimStep(learning_rate=rate))


def turns(trainer) -> None:
    """Let the engine alone work, whatever its writer does."""
    while trainer.engine.turn():
        pass


def bits_of_an_undisturbed_run(service, steps: int) -> list[bytes]:
    trainer, client = service.trainer(), service.client()
    for number in range(steps):
        step(client, number)
    trainer.spin()
    result = bits(trainer.resident(client))
    trainer.engine.hand_back_all()
    trainer.die()
    return result


def snapshots(service, client) -> list[str]:
    """The directories that lie there, staged ones included."""
    home = layout.resolve(service.store.settings.data_dir, layout.run_dir(client.tenant, client.run_id)) / "snapshots"
    return sorted(path.name for path in home.iterdir()) if home.exists() else []


def counts(service, client) -> tuple[str, int] | None:
    return service.journal.snapshot(client.tenant, client.run_id)


def test_later_operations_are_done_and_answered_while_a_snapshot_is_being_written(service, monkeypatch):
    expected = bits_of_an_undisturbed_run(service, 4)
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        for number in range(1, 4):
            step(client, number)
        turns(trainer)
        assert client.states() == "d" * 9
        assert counts(service, client) is None
    trainer.spin()
    assert counts(service, client)[1] == 2, "for the operation that the copy was taken after"
    bodies = [bool(each.body) for each in service.journal.history("t", client.run_id, after=-1, upto=8)]
    assert bodies == [False] * 3 + [True] * 6
    assert bits(trainer.resident(client)) == expected
    trainer.die()
    second = service.trainer()
    client.submit(forward_backward(seed=9, forward=True))
    second.spin()
    assert bits(second.resident(client)) == expected


def test_no_more_than_the_set_number_is_in_the_making_and_who_waits_has_its_turn_later(service, monkeypatch):
    trainer = service.trainer(snapshot_operations=2)
    clients = [service.client(name) for name in "abc"]
    with held_before_writing(monkeypatch) as held:
        for client in clients:
            step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        assert len(trainer.snapshots._writers) == 1
        assert [client.states() for client in clients] == ["ddd"] * 3
    trainer.spin()
    assert sum(counts(service, client) is not None for client in clients) == 1
    for number in range(1, 4):
        for client in clients:
            step(client, number)
            trainer.spin()
    assert all(counts(service, client) is not None for client in clients)


def test_a_hand_over_waits_for_the_snapshot_in_the_making_and_what_changed_since_is_not_lost(service, monkeypatch):
    expected = bits_of_an_undisturbed_run(service, 2)
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        step(client, 1)
        turns(trainer)
        with waiting_for_a_snapshot(trainer, trainer.engine.hand_back_all):
            assert service.store.redis.hget(keys.run("t", client.run_id), "owner") == trainer.name.encode()
            held.released.set()
    assert service.store.redis.hget(keys.run("t", client.run_id), "owner") == b""
    assert counts(service, client)[1] == 4
    assert len(snapshots(service, client)) == 1
    second = service.trainer()
    client.submit(forward_backward(seed=9, forward=True))
    second.spin()
    assert bits(second.resident(client)) == expected


def test_a_hand_over_writes_nothing_again_that_the_snapshot_in_the_making_holds(service, monkeypatch):
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    written, write = [], states.write
    monkeypatch.setattr(
        states, "write", lambda path, *args, **kwargs: written.append(path) or write(path, *args, **kwargs)
    )
    step(client, 0)
    turns(trainer)
    trainer.engine.hand_back_all()
    assert len(written) == 1
    assert counts(service, client)[1] == 2
    assert service.store.redis.hget(keys.run("t", client.run_id), "owner") == b""


def test_a_snapshot_that_is_finished_after_a_take_over_never_counts_and_leaves_nothing(service, monkeypatch):
    expected = bits_of_an_undisturbed_run(service, 3)
    client, first = service.client(), service.trainer(snapshot_operations=2)
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(first)
        assert held.reached.wait(PATIENCE_S)
        first.die()
        second = service.trainer()
        step(client, 1)
        second.spin()
    first.snapshots.settle(("t", client.run_id))
    assert counts(service, client) is None and snapshots(service, client) == []
    step(client, 2)
    second.spin()
    second.engine.hand_back_all()
    third = service.trainer()
    client.submit(forward_backward(seed=9, forward=True))
    third.spin()
    assert bits(third.resident(client)) == expected


def test_a_run_that_is_dropped_while_its_copy_is_written_is_off_the_device_at_once(service, monkeypatch):
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        run = weakref.ref(trainer.resident(client))
        tensors = [weakref.ref(tensor) for group in run().tensors() for tensor in group]
        trainer.engine._holdings.drop(run().key)
        gc.collect()
        assert run() is None and not any(tensor() is not None for tensor in tensors)
    trainer.spin()
    assert counts(service, client)[1] == 2, "the copy was written all the same"


def test_a_run_that_is_rebuilt_here_waits_for_its_snapshot_in_the_making(service, monkeypatch):
    expected = bits_of_an_undisturbed_run(service, 2)
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        trainer.engine._holdings.drop(("t", client.run_id))
        step(client, 1)
        with waiting_for_a_snapshot(trainer, lambda: turns(trainer)):
            assert client.states() == "dddpp"
            held.released.set()
    assert client.states() == "ddddd"
    assert bits(trainer.resident(client)) == expected


def killed_before_the_rename(service, client, trainer, monkeypatch) -> None:
    def stopped(staged, final):
        raise OSError("this trainer is gone")

    removed = layout.remove
    with monkeypatch.context() as patched:
        patched.setattr(layout, "publish", stopped)
        patched.setattr(layout, "remove", lambda path: None if ".tmp-" in path.name else removed(path))
        trainer.spin()
    assert any(name.startswith(".tmp-") for name in snapshots(service, client))


def killed_before_the_row(service, client, trainer, monkeypatch) -> None:
    trainer.snapshots._journal = LastWords(service.journal, heard=False)
    trainer.spin()
    assert counts(service, client)[1] == 2 and len(snapshots(service, client)) == 2


def killed_after_the_row(service, client, trainer, monkeypatch) -> None:
    trainer.snapshots._journal = LastWords(service.journal, heard=True)
    trainer.spin()
    assert counts(service, client)[1] == 4 and len(snapshots(service, client)) == 2


@pytest.mark.parametrize("die", [killed_before_the_rename, killed_before_the_row, killed_after_the_row])
def test_a_trainer_that_dies_in_a_snapshot_leaves_a_run_that_goes_on_with_the_same_bits(service, monkeypatch, die):
    expected = bits_of_an_undisturbed_run(service, 4)
    client, first = service.client(), service.trainer(snapshot_operations=2)
    step(client, 0)
    first.spin()
    step(client, 1)
    die(service, client, first, monkeypatch)
    covered = counts(service, client)
    first.die()
    second = service.trainer()
    for number in range(2, 4):
        step(client, number)
    second.spin()
    assert client.states() == "d" * 9
    assert bits(second.resident(client)) == expected
    assert counts(service, client) == covered
    for path in service.store.settings.data_dir.rglob("*"):
        os.utime(path, (0, 0))
    sweep(service.store, age_s=60)
    assert snapshots(service, client) == [covered[0].rpartition("/")[2]]


@contextmanager
def disk_that_takes(num_bytes: int):
    """Let no file of this process become larger."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_refuses_is_reported_and_tried_again_and_the_older_snapshot_still_counts(service, caplog):
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    step(client, 0)
    trainer.spin()
    older = counts(service, client)

    with disk_that_takes(20_000):
        step(client, 1)
        trainer.spin()
    assert client.states() == "d" * 5
    assert "File too large" in caplog.text
    assert counts(service, client) == older and trainer.resident(client).changed
    assert len(snapshots(service, client)) == 1
    step(client, 2)
    trainer.spin()
    assert counts(service, client)[1] == 6 and not trainer.resident(client).changed


def test_a_hand_over_that_the_disk_refuses_keeps_the_journal_and_hands_the_others_over(service, caplog):
    large, small, trainer = service.client(rank=16), service.client(rank=1), service.trainer()
    for client in (large, small):
        step(client, 0)
    trainer.spin()
    expected = bits(trainer.resident(large))
    with disk_that_takes(60_000):
        trainer.engine.hand_back_all()
    assert "File too large" in caplog.text
    assert counts(service, large) is None and counts(service, small)[1] == 2
    trainer.die()
    second = service.trainer()
    large.submit(forward_backward(seed=9, forward=True))
    second.spin()
    assert bits(second.resident(large)) == expected


def test_memory_that_is_short_costs_a_snapshot_and_nothing_else(service, monkeypatch, caplog):
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    trainer.spin()
    run = trainer.resident(client)

    def short(self, *, in_host):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(type(run), "copy", short)
        step(client, 0)
        trainer.spin()
    assert client.states() == "ddd" and counts(service, client) is None
    assert "out of memory" in caplog.text and run.changed
    step(client, 1)
    trainer.spin()
    assert counts(service, client)[1] == 4


def test_a_load_is_saved_at_once_also_while_an_older_snapshot_is_in_the_making(service, monkeypatch):
    client, trainer = service.client(), service.trainer(snapshot_operations=2)
    client.submit(SaveWeights(name="start"))
    trainer.spin()
    checkpoint = service.registry.checkpoint("t", client.run_id, "weights/start")
    with held_before_writing(monkeypatch) as held:
        step(client, 0)
        turns(trainer)
        assert held.reached.wait(PATIENCE_S)
        load = {"checkpoint_path": checkpoint.uri, "checkpoint_dir": checkpoint.directory}
        client.submit(LoadWeights(with_optimizer=False, **load))
        with waiting_for_a_snapshot(trainer, lambda: turns(trainer)):
            held.released.set()
    assert client.states() == "ddddd"
    assert counts(service, client)[1] == 4
    assert len(snapshots(service, client)) == 1
    shutil.rmtree(service.store.settings.data_dir / checkpoint.directory)
    assert_an_heir_has_the_same_bits(service, client, trainer)


def test_a_copy_shares_no_memory_with_its_run(service):
    client, trainer = service.client(), service.trainer()
    step(client, 0)
    client.submit(forward_backward(seed=1))
    trainer.spin()
    run = trainer.resident(client)
    copy, before = run.copy(), bits(run)
    assert bits(copy) == before and (copy.applied, copy.token, copy.seed) == (run.applied, run.token, run.seed)
    for number in range(2, 4):
        step(client, number)
    trainer.spin()
    assert bits(copy) == before != bits(run)
