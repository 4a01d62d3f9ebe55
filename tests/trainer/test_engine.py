"""The engine on a real journal: order, results, failures, fairness, and no more trips than needed."""

import errno
import json
import queue
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from openrl.tasks import disk, keys
from openrl.tasks.errors import DiskRefusal, OpenRLError, StaleOwner, StoreFault, StoreUnavailable
from openrl.tasks.messages import OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.tasks.process import MOST_FAILURES, Streak
from openrl.tasks.wire.codec import output_to_json
from openrl.workers.trainer.doubts import Doubts
from tests.trainer.bench import forward_backward
from tests.trainer.service import BASE
from tests.trainer.test_device import bits


def test_a_training_loop_takes_effect_in_order_and_answers_every_operation(service):
    trainer, client = service.trainer(), service.client()
    client.submit(OptimStep(learning_rate=0.01), seq=2)
    client.submit(SaveWeights(name="final"), seq=3)
    client.submit(SaveWeightsForSampler(sampler_id=f"{client.session_id}:sample:0"), seq=4)
    trainer.spin()
    client.submit(forward_backward(seed=1))
    client.seq = 4
    trainer.spin()
    assert client.states() == "ddddd"
    assert client.answer(0) == {"type": "create_model", "model_id": client.run_id}
    assert output_to_json(client.future(1).result)["metrics"]["tokens:sum"] == 14
    assert client.answer(2)["metrics"]["step"] == 1
    assert client.answer(3)["path"] == f"tinker://{client.run_id}/weights/final"
    assert client.answer(4)["sampling_session_id"] == f"{client.session_id}:sample:0"
    run = service.registry.run("t", client.run_id)
    assert (run.state, run.applied) == ("ready", 4)
    assert service.registry.checkpoint("t", client.run_id, "weights/final").step == 1
    assert service.registry.sampler("t", f"{client.session_id}:sample:0").run_id == client.run_id
    assert service.journal.depth("tiny")["train"] == {}


def test_runs_of_several_tenants_share_a_pass(service):
    trainer = service.trainer(token_budget=1000)
    clients = [service.client(tenant, rank=rank) for tenant, rank in (("a", 2), ("a", 4), ("b", 8))]
    trainer.spin()
    for number, client in enumerate(clients):
        client.submit(forward_backward(seed=number))
    passes = []
    execute = trainer.device.execute
    trainer.device.execute = lambda works: passes.append(len(works)) or execute(works)
    assert trainer.spin() == 1
    assert passes == [3]
    assert [client.states() for client in clients] == ["dd"] * 3


def test_each_operation_is_told_what_it_cost_and_how_much_of_its_pass_was_its_tenants_own(service):
    trainer = service.trainer(token_budget=1000)
    clients = [service.client(tenant, rank=rank) for tenant, rank in (("a", 2), ("a", 4), ("b", 8))]
    trainer.spin()
    lengths = ([10, 10], [20], [60])
    for client, each in zip(clients, lengths, strict=True):
        client.submit(forward_backward(lengths=each))
    began = time.monotonic()
    assert trainer.spin() == 1
    took = time.monotonic() - began
    metrics = [output_to_json(client.future(1).result)["metrics"] for client in clients]
    assert [one["pass_tokens:max"] for one in metrics] == [40, 40, 60], "what another tenant trains is its own affair"
    seconds = [one["seconds:sum"] for one in metrics]
    assert 0 < sum(seconds) < took
    assert seconds == pytest.approx([sum(each) / 100 * sum(seconds) for each in lengths])


def test_a_refused_and_a_missing_operation_take_their_turn_and_void_the_gradient(service):
    trainer, client = service.trainer(), service.client()
    client.submit(forward_backward(seed=1))
    refused = client.refuse("forward_backward")
    client.submit(forward_backward(seed=2))
    client.submit(OptimStep())
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddfdff"
    assert f"operation {refused} failed (no such thing)" in client.future(4).error
    assert "nothing was accumulated" in client.future(5).error
    client.seq += 1
    client.submit(forward_backward(seed=3))
    client.submit(OptimStep())
    trainer.spin()
    service.store.redis.zincrby(keys.GAPS, -1e6, f"t {client.run_id}")
    service.journal.close_gaps()
    trainer.spin()
    assert client.states() == "ddfdfffdf"
    assert "seq 6 never arrived" in client.future(8).error
    client.submit(forward_backward(seed=4))
    client.submit(OptimStep())
    trainer.spin()
    assert client.states().endswith("dd")


def test_a_refused_step_leaves_the_gradient_as_it_is(service):
    trainer, client = service.trainer(), service.client()
    client.submit(forward_backward(seed=1))
    client.refuse("optim_step")
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddfd"


def test_after_a_failed_create_later_operations_fail_in_order_and_say_why(service):
    trainer, client = service.trainer(), service.client(rank=0)
    client.submit(forward_backward(seed=1))
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "fff"
    assert all("rank" in client.future(seq).error for seq in range(3))
    assert service.registry.run("t", client.run_id).state == "failed"


def test_a_body_that_can_not_be_read_fails_its_operation_and_voids(service):
    trainer, client = service.trainer(), service.client()
    seq = client.submit(forward_backward(seed=1))
    service.store.redis.hset(keys.bodies("t", client.run_id), seq, b"=\xff\xff\xff")
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "dff"
    assert client.future(seq).category == "server" and "error id" in client.future(seq).error
    assert "operation 1 failed" in client.future(2).error


def test_a_failure_in_one_run_leaves_the_other_of_its_pass_alone(service):
    trainer, bad, good = service.trainer(token_budget=1000), service.client("a"), service.client("b")
    trainer.spin()
    message = forward_backward(lengths=[5], seed=1)
    bad.submit(replace(message, data=(replace(message.data[0], tokens=np.full(5, 10**6, np.int32)),)))
    for client in (bad, good):
        if client is good:
            client.submit(message)
        client.submit(OptimStep())
    trainer.spin()
    assert bad.states() == "dff" and good.states() == "ddd"
    assert bad.future(1).category == "server"


def test_a_device_that_breaks_as_a_whole_fails_the_pass_and_the_engine_goes_on(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    execute = trainer.device.execute

    def broken(works):
        raise RuntimeError("out of memory at /secret/path")

    trainer.device.execute = broken
    client.submit(forward_backward(seed=1))
    trainer.spin()
    assert client.future(1).category == "server" and "secret" not in client.future(1).error
    trainer.device.execute = execute
    for message in (OptimStep(), forward_backward(seed=1), OptimStep()):
        client.submit(message)
    trainer.spin()
    assert client.states() == "dffdd"


def test_a_second_trainer_leaves_the_runs_of_the_first_alone(service):
    first, second, client = service.trainer(), service.trainer(), service.client()
    first.spin()
    client.submit(forward_backward(seed=1))
    assert second.spin() == 0
    assert client.states() == "dp"
    first.spin()
    assert client.states() == "dd"


def test_a_short_tenant_is_served_after_one_pass_of_a_long_one(service):
    trainer = service.trainer(token_budget=96)
    long, short = service.client("a"), service.client("b")
    trainer.spin()
    for number in range(12):
        long.submit(forward_backward(lengths=[60, 60, 60], seed=number))
    trainer.engine.turn()
    short.submit(forward_backward(lengths=[6], seed=1))
    trainer.engine.turn()
    assert short.states() == "dd"
    assert long.states().count("p") >= 10


def test_each_result_leaves_right_after_its_own_pass(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    for number in range(3):
        client.submit(forward_backward(seed=number))
    for done in range(1, 4):
        trainer.engine.turn()
        assert client.states() == "d" + "d" * done + "p" * (3 - done)


def test_a_backlog_is_carried_out_to_its_end_after_one_ring(service):
    trainer, clients = service.trainer(poll_s=600.0, max_operations=2, max_runs=2), [service.client() for _ in range(3)]
    for client in clients:
        for number in range(3):
            client.submit(forward_backward(seed=number))
            client.submit(OptimStep())
    trainer.engine.start()
    for client in clients:
        trainer.engine.wait_for(client.tenant, f"{client.run_id}:{client.seq}")
    assert [client.states() for client in clients] == ["d" * 7] * 3
    trainer.engine.release_waiters()
    trainer.engine.stop()


def test_what_the_journal_has_offered_needs_no_further_look(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    client.submit(forward_backward(seed=1))
    knows = [trainer.engine.knows(client.tenant, f"{client.run_id}:{seq}") for seq in (0, 1)]
    trainer.spin()
    assert knows == [True, False]
    assert trainer.engine.knows(client.tenant, f"{client.run_id}:1")
    assert not trainer.engine.knows("another", f"{client.run_id}:1")
    trainer.engine.hand_back_all()
    assert not trainer.engine.knows(client.tenant, f"{client.run_id}:1")


def test_an_idle_trainer_asks_the_store_once_a_look(service):
    trainer = service.trainer()
    service.client()
    trainer.spin()
    before = service.store.redis.info("commandstats")["cmdstat_evalsha"]["calls"]
    for _ in range(10):
        assert not trainer.engine.turn()
    assert service.store.redis.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 10


def overheard(service, trainer) -> queue.SimpleQueue:
    """Return what the owner's process hears, in place of its engine."""
    subscribed, said = threading.Event(), queue.SimpleQueue()
    service.completions.call_on_wake(trainer.name, subscribed.set)
    service.completions.call_with(trainer.name, said.put)
    assert subscribed.wait(60)
    return said


def hidden(service, client) -> None:
    """Let a look into the journal not find the run."""
    service.store.redis.zrem(keys.ready(BASE), f"{client.tenant} {client.run_id}")


def test_an_operation_that_was_told_of_is_carried_out_without_a_look(service):
    trainer, client = service.trainer(poll_s=600.0), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    client.submit(forward_backward(seed=1))
    hidden(service, client)
    trainer.engine.hear(said.get(timeout=60))
    assert trainer.engine.turn() and client.states() == "dd"
    assert trainer.engine.knows(client.tenant, f"{client.run_id}:1")


def test_an_operation_that_was_told_of_and_taken_is_carried_out_once(service):
    trainer, client = service.trainer(poll_s=600.0), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    client.submit(forward_backward(seed=1))
    trainer.spin()
    trainer.engine.hear(said.get(timeout=60))
    assert not trainer.engine.turn() and client.states() == "dd"
    assert trainer.resident(client).applied == 1


def test_an_engine_that_is_told_of_more_than_it_has_done_looks(service):
    trainer, client = service.trainer(poll_s=600.0), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    client.submit(forward_backward(seed=1))
    told = said.get(timeout=60)
    trainer.engine._holdings.drop((client.tenant, client.run_id))
    trainer.engine.hear(told)
    assert trainer.engine.turn() and client.states() == "dd"


def woken(trainer, said) -> None:
    """Let the engine do what it does once it rang with all that was said: go on as long as it knows of more."""
    while not said.empty():
        trainer.engine.hear(said.get())
    knows_more = True
    while knows_more:
        if trainer.engine._settling.taken is None:
            trainer.engine._bell.hush()
        knows_more = trainer.engine.turn() and (trainer.engine._has_more or trainer.engine._settling.taken)


def test_what_stands_behind_a_gap_is_carried_out_with_what_closes_it(service):
    trainer, client = service.trainer(poll_s=600.0), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    for seq in (2, 1):
        client.submit(forward_backward(seed=1), seq=seq)
        while said.empty():
            time.sleep(0.001)
        woken(trainer, said)
    client.seq = 2
    assert client.states() == "ddd"


def test_what_one_run_is_told_of_does_not_hold_up_what_another_has_queued(service):
    """The turn before left some of it, which nobody will ring for again."""
    trainer, client, other = service.trainer(poll_s=600.0, max_operations=2), service.client(), service.client("u")
    trainer.spin()
    for _ in range(5):
        other.submit(forward_backward(seed=1))
    assert trainer.engine.turn() and "p" in other.states()
    said = overheard(service, trainer)
    client.submit(forward_backward(seed=1))
    while said.empty():
        time.sleep(0.001)
    trainer.engine._settling.taken = None  # as when the commit's answer was lost
    woken(trainer, said)
    assert (client.states(), other.states()) == ("dd", "d" * 6)


def test_a_doorbell_beside_what_was_told_lets_the_engine_look_afterwards(service):
    trainer, client = service.trainer(poll_s=600.0), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    client.submit(forward_backward(seed=1))
    orphan = service.client()
    trainer.engine.hear(said.get(timeout=60))
    trainer.engine.wake()
    assert trainer.engine.turn() and trainer.engine._has_more
    trainer.spin()
    assert (client.states(), orphan.states()) == ("dd", "d")


def test_an_engine_that_is_told_all_the_time_looks_all_the_same(service):
    trainer, client = service.trainer(poll_s=0.001), service.client()
    trainer.spin()
    said = overheard(service, trainer)
    orphan = service.client()
    client.submit(forward_backward(seed=1))
    time.sleep(0.01)
    trainer.engine.hear(said.get(timeout=60))
    assert trainer.engine.turn() and (client.states(), orphan.states()) == ("dd", "d")


def test_what_arrives_during_a_pass_is_taken_along_with_its_commit_and_looked_for_no_second_time(service, monkeypatch):
    trainer, client, other = service.trainer(), service.client(), service.client()
    trainer.spin()
    calls, execute = [], trainer.device.execute

    def arriving(works):
        if works[0].kind == "forward_backward":
            client.submit(OptimStep())
            trainer.engine.wake()
        return execute(works)

    monkeypatch.setattr(trainer.device, "execute", arriving)
    scripts, take_next = service.store.scripts, service.journal.take_next
    monkeypatch.setattr(
        service.store, "scripts", lambda sent: calls.append([name for name, _ in sent]) or scripts(sent)
    )
    monkeypatch.setattr(service.journal, "take_next", lambda *asked: calls.append("take") or take_next(*asked))
    client.submit(forward_backward(seed=1))
    trainer.engine.turn()
    other.submit(forward_backward(seed=1))  # not seen by that look, and not lost by it
    assert trainer.engine.turn() and client.states() == "ddd"
    assert calls == ["take", ["commit", "take"], ["commit"]]
    trainer.spin()
    assert other.states() == "dd"


def test_the_outcomes_of_a_pass_are_committed_in_one_trip_each_by_itself(service, monkeypatch):
    trainer, clients = service.trainer(token_budget=1000), [service.client(name) for name in "abc"]
    trainer.spin()
    sent, scripts = [], service.store.scripts
    monkeypatch.setattr(service.store, "scripts", lambda calls: sent.append(len(calls)) or scripts(calls))
    service.store.redis.script_flush()  # a store that was started anew knows none of them
    execute = trainer.device.execute

    def overtaken(works):
        key = keys.run("b", clients[1].run_id)
        service.store.redis.hset(key, "token", "7")
        return execute(works)

    monkeypatch.setattr(trainer.device, "execute", overtaken)
    for client in clients:
        client.submit(forward_backward(seed=1))
    trainer.engine.turn()
    assert sent == [3]
    assert [client.states() for client in clients] == ["dd", "dp", "dd"]
    assert not trainer.engine._residents.get(("b", clients[1].run_id))


def test_a_store_that_knows_only_the_look_still_sees_the_commit_before_it(service, monkeypatch):
    trainer, client, other = service.trainer(), service.client(), service.trainer()
    trainer.spin()
    execute = trainer.device.execute

    def restarted(works):
        if works[0].kind == "forward_backward":
            service.store.redis.script_flush()
            other.engine.turn()  # another trainer has looked since: that script the store knows again
            client.submit(OptimStep())
            trainer.engine.wake()
        return execute(works)

    monkeypatch.setattr(trainer.device, "execute", restarted)
    client.submit(forward_backward(seed=1))
    trainer.engine.turn()
    before = trainer.resident(client)
    trainer.engine.turn()
    assert client.states() == "ddd"
    assert trainer.resident(client) is before, "what was brought along was stale"


def test_a_step_that_breaks_leaves_no_gradient_behind_as_its_replay_does(service, monkeypatch):
    trainer, client = service.trainer(), service.client()
    client.submit(forward_backward(seed=1))
    trainer.spin()

    def broken(runs):
        raise MemoryError("no room on the device")

    with monkeypatch.context() as patched:
        patched.setattr(trainer.device.residency, "admit", broken)
        client.submit(OptimStep())
        trainer.spin()
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddff"
    trainer.die()
    client.submit(forward_backward(seed=1))
    service.trainer().spin()
    assert client.states() == "ddffd"


def full_disk() -> DiskRefusal:
    """What the spool says of a disk that has no room."""
    try:
        with disk.translated():
            raise OSError(errno.ENOSPC, "No space left on device")
    except DiskRefusal as refusal:
        return refusal


class FlakyJournal:
    """Loses the store for a while: before a commit is written, or right after."""

    def __init__(self, journal, *, failures: int, written: bool) -> None:
        self._journal = journal
        self._failures = failures
        self._written = written

    def __getattr__(self, name):
        return getattr(self._journal, name)

    def commit(self, *args, **kwargs) -> None:
        if self._failures:
            self._failures -= 1
            if self._written:
                self._journal.commit(*args, **kwargs)
            raise StoreUnavailable("the store does not answer")
        self._journal.commit(*args, **kwargs)

    def commit_all(self, lease, committals, *, then=None):
        refusals = []
        for operation, outcome, token in committals:
            try:
                self.commit(lease, operation, outcome, token=token)
            except (OpenRLError, OSError) as refusal:
                refusals.append(refusal)
            else:
                refusals.append(None)
        return refusals, None


@pytest.mark.parametrize("written", [True, False])
def test_an_outcome_is_kept_and_committed_once_when_the_store_was_away(service, written):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    trainer.engine._settling._journal = FlakyJournal(service.journal, failures=1, written=written)
    client.submit(forward_backward(seed=1))
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddd"
    assert trainer.resident(client).moments.step == 1


def test_after_an_outage_the_outcomes_of_a_pass_wait_once_and_not_each(service, monkeypatch):
    trainer, clients = service.trainer(token_budget=1000), [service.client(name) for name in "abc"]
    trainer.spin()
    sent, scripts = [], service.store.scripts

    def away_once(calls):
        sent.append(len(calls))
        return [StoreUnavailable("the store does not answer")] * len(calls) if len(sent) == 1 else scripts(calls)

    monkeypatch.setattr(service.store, "scripts", away_once)
    waits = []
    monkeypatch.setattr(trainer.engine._stopping, "wait", lambda seconds: waits.append(seconds))
    for client in clients:
        client.submit(forward_backward(seed=1))
    trainer.engine.turn()
    assert sent == [3, 1, 2] and len(waits) == 1
    assert [client.states() for client in clients] == ["dd"] * 3


def test_threads_and_bells_serve_and_stop_hands_the_runs_back(service):
    trainer, client = service.trainer(poll_s=30.0), service.client()
    trainer.engine.start()
    client.submit(forward_backward(seed=1))
    trainer.engine.wake()
    waiting = threading.Thread(target=trainer.engine.wait_for, args=("t", f"{client.run_id}:1"))
    waiting.start()
    waiting.join(10)
    assert client.states() == "dd"
    began = time.monotonic()
    trainer.engine.release_waiters()
    trainer.engine.stop()
    assert time.monotonic() - began < 5
    assert service.store.redis.hget(keys.run("t", client.run_id), "owner") == b""
    assert service.journal.snapshot("t", client.run_id)[1] == 1
    assert not service.store.redis.exists(keys.worker(trainer.name))


def test_a_lost_lease_drops_every_run_and_a_new_one_goes_on(service):
    trainer, client = service.trainer(), service.client()
    client.submit(forward_backward(seed=1))
    trainer.spin()
    before = trainer.resident(client)
    trainer.lease.mark_lost()
    with pytest.raises(StaleOwner):
        trainer.engine.turn()
    assert trainer.engine._guarded(trainer.engine.turn) is False
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddd"
    assert trainer.resident(client) is not before
    assert json.loads(client.future(2).result)["metrics"]["step"] == 1


def test_idle_runs_are_handed_back_and_come_again(service):
    trainer, client, other = service.trainer(resident_bytes=1), service.client(), service.client()
    client.submit(forward_backward(seed=1))
    trainer.spin()
    assert len(trainer.engine._residents) == 0
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddd" and other.states() == "d"


class BrokenJournal(FlakyJournal):
    """Raises what nobody expects, in the second commit of a pass."""

    def commit(self, *args, **kwargs) -> None:
        self._failures -= 1
        if self._failures == 0:
            raise ZeroDivisionError
        self._journal.commit(*args, **kwargs)


def test_a_run_whose_operation_ran_but_could_not_be_committed_is_rebuilt(service):
    trainer, clients = service.trainer(token_budget=1000), [service.client(name) for name in "abc"]
    trainer.spin()
    trainer.engine._settling._journal = BrokenJournal(service.journal, failures=2, written=False)
    for client in clients:
        client.submit(forward_backward(seed=1))
    with pytest.raises(ZeroDivisionError):
        trainer.engine.turn()
    assert sorted(client.states() for client in clients) == ["dd", "dp", "dp"]
    trainer.spin()
    for client in clients:
        client.submit(OptimStep())
    trainer.spin()
    norms = [client.answer(2)["metrics"]["grad_norm"] for client in clients]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


@pytest.mark.parametrize(
    ("refusal", "words"),
    [(OSError(5, "Input/output error"), "error id"), (full_disk(), "disk is full")],
)
def test_a_result_that_can_not_be_stored_fails_and_voids(service, monkeypatch, refusal, words):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    ended = service.journal._ended

    def full(committal):
        operation, outcome, _ = committal
        if outcome.error is None and operation.kind == "forward_backward":
            raise refusal
        return ended(committal)

    monkeypatch.setattr(service.journal, "_ended", full)
    client.submit(forward_backward(seed=1))
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "dff"
    assert client.future(1).category == "server" and words in client.future(1).error
    assert "operation 1 failed" in client.future(2).error


def test_a_step_whose_result_can_not_be_stored_is_undone_as_it_is_recorded(service, monkeypatch):
    trainer, client, other = service.trainer(), service.client(), service.client()
    for each in (client, other):
        each.submit(forward_backward(seed=1))
    trainer.spin()
    before = bits(trainer.resident(client))
    ended = service.journal._ended

    def full(committal):
        operation, outcome, _ = committal
        if outcome.error is None and operation.request_id == f"{client.run_id}:2":
            raise full_disk()
        return ended(committal)

    with monkeypatch.context() as patched:
        patched.setattr(service.journal, "_ended", full)
        for each in (client, other):
            each.submit(OptimStep(learning_rate=0.1))
        trainer.spin()
    assert (client.states(), other.states()) == ("ddf", "ddd")
    client.submit(forward_backward(seed=1, forward=True))
    trainer.spin()
    run = trainer.resident(client)
    assert run.moments.step == 0 and run.gradient is None
    assert bits(run)[: len(run.weights().parameters())] == before[: len(run.weights().parameters())]


class Counting:
    """Notes which operations' bodies are read, call by call."""

    def __init__(self, journal) -> None:
        self._journal = journal
        self.calls: list[list[str]] = []

    def __getattr__(self, name):
        return getattr(self._journal, name)

    def bodies(self, operations):
        self.calls.append([operation.request_id for operation in operations])
        return self._journal.bodies(operations)


def test_bodies_are_read_once_and_for_all_of_a_pass_together(service):
    trainer = service.trainer(token_budget=96)
    clients = [service.client(tenant) for tenant in "ab"]
    trainer.spin()
    counting = trainer.engine._reading._journal = Counting(service.journal)
    for client in clients:
        for number in range(3):
            client.submit(forward_backward(lengths=[30, 10], seed=number))
        client.submit(OptimStep())
    passes = trainer.spin()
    assert len(counting.calls) == passes
    read = [name for call in counting.calls for name in call]
    assert sorted(read) == sorted(f"{client.run_id}:{seq}" for client in clients for seq in range(1, 5))
    assert not trainer.engine.turn()
    assert len(counting.calls) == passes


def test_a_backlog_of_large_bodies_hides_no_other_tenant(service):
    trainer = service.trainer(token_budget=64)
    crowd, visitor = [service.client("a") for _ in range(5)], service.client("b")
    trainer.spin()
    for client in crowd:
        for number in range(3):
            client.submit(forward_backward(lengths=[60], seed=number))
    visitor.submit(forward_backward(lengths=[6], seed=1))
    trainer.engine.turn()
    trainer.engine.turn()
    assert visitor.states() == "dd"


def test_a_body_that_can_not_be_read_now_makes_its_run_wait_and_no_other(service):
    now = [0.0]
    trainer = service.trainer(doubts=Doubts(1, clock=lambda: now[0]))
    client, other = service.client("a"), service.client("b")
    trainer.spin()
    client.submit(forward_backward(lengths=[90], seed=1))
    [path] = [path for path in (service.store.settings.data_dir / "spool").rglob("*") if path.is_file()]
    kept = path.read_bytes()
    path.unlink()
    path.mkdir()
    other.submit(forward_backward(seed=1))
    trainer.spin()
    assert (client.states(), other.states()) == ("dp", "dd")
    path.rmdir()
    path.write_bytes(kept)
    now[0] += 1
    trainer.spin()
    assert client.states() == "dd"


def test_a_body_that_is_lost_fails_its_operation_and_the_run_goes_on(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    client.submit(forward_backward(lengths=[90], seed=1))
    [path] = [path for path in (service.store.settings.data_dir / "spool").rglob("*") if path.is_file()]
    path.unlink()
    for message in (OptimStep(), forward_backward(seed=1), OptimStep()):
        client.submit(message)
    trainer.spin()
    assert client.states() == "dffdd"
    assert client.future(1).category == "server" and "error id" in client.future(1).error


class FaultyJournal(FlakyJournal):
    """Commits nothing that succeeds for one run: the store refuses the command."""

    def __init__(self, journal, run_id: str) -> None:
        super().__init__(journal, failures=0, written=False)
        self.run_id = run_id

    def commit(self, lease, operation, outcome, *, token) -> None:
        if operation.run_id == self.run_id and outcome.error is None:
            raise StoreFault("the store could not carry out a command (error id 00)")
        self._journal.commit(lease, operation, outcome, token=token)


def test_a_command_that_the_store_can_not_carry_out_costs_its_run_alone_and_is_answered(service):
    trainer, client, other = service.trainer(doubt_s=0.001), service.client("a"), service.client("b")
    trainer.spin()
    trainer.engine._settling._journal = FaultyJournal(service.journal, client.run_id)
    for each in (client, other):
        each.submit(forward_backward(seed=1))
        each.submit(OptimStep())
    trainer.spin()
    assert other.states() == "ddd"
    until(trainer, lambda: client.states() == "dff")
    assert client.future(1).category == "server" and "error id" in client.future(1).error
    trainer.engine._settling._journal = service.journal
    for message in (forward_backward(seed=1), OptimStep()):
        client.submit(message)
    until(trainer, lambda: client.states() == "dffdd")


class Killed(BaseException):
    """The process is gone in the middle of a pass."""


def deadly(trainer, guilty: str, seq: int) -> None:
    """Let this trainer die of one operation."""
    execute = trainer.device.execute

    def run(works):
        if any((work.run.run_id, work.seq_id) == (guilty, seq) for work in works):
            raise Killed
        return execute(works)

    trainer.device.execute = run


def serve_through_deaths(service, guilty: str, seq: int) -> int:
    """Trainers, one after the other, until one has nothing left to do; returns how many died."""
    for deaths in range(10):
        trainer = service.trainer(token_budget=1000)
        deadly(trainer, guilty, seq)
        try:
            trainer.spin()
            return deaths
        except Killed:
            trainer.die()
    raise AssertionError("it killed them all")


def test_an_operation_that_kills_three_workers_fails_and_the_innocent_of_its_pass_do_not(service):
    first = service.trainer(token_budget=1000)
    clients = [service.client(tenant) for tenant in "aabc"]
    first.spin()
    first.engine.hand_back_all()
    for number, client in enumerate(clients):
        client.submit(forward_backward(seed=number))
        client.submit(OptimStep())
    guilty = clients[2]
    assert serve_through_deaths(service, guilty.run_id, 1) == 3
    assert [client.states() for client in clients] == ["ddd", "ddd", "dff", "ddd"]
    future = guilty.future(1)
    assert future.category == "server" and "died 3 times" in future.error
    assert "operation 1 failed" in guilty.future(2).error
    for message in (forward_backward(seed=1), OptimStep()):
        guilty.submit(message)
    service.trainer().spin()


def test_deaths_at_different_operations_are_not_added_up(service):
    client = service.client()
    for seq in range(1, 7):
        client.submit(forward_backward(seed=seq))
    for seq in range(1, 7):
        trainer = service.trainer()
        deadly(trainer, client.run_id, seq)
        with pytest.raises(Killed):
            trainer.spin()
        trainer.die()
    service.trainer().spin()
    assert client.states() == "ddddddd"


def test_a_run_whose_owner_died_costs_one_more_trip_once(service):
    client, first = service.client(), service.trainer()
    first.spin()
    first.die()
    second = service.trainer()
    for number in range(3):
        client.submit(forward_backward(seed=number))
    second.engine.turn()

    def scripts() -> int:
        return service.store.redis.info("commandstats")["cmdstat_evalsha"]["calls"]

    before = scripts()
    second.engine.turn()
    assert client.states() == "dddp"
    assert scripts() - before == 2


def until(trainer, condition) -> None:
    """Let the engine look again and again."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        trainer.spin()


def test_an_engine_whose_every_step_fails_ends_its_process(service):
    left = []
    trainer = service.trainer()
    engine = trainer.engine
    engine._streak = Streak(left.append)
    engine._stopping.set()  # which ends the pauses

    def at_fault():
        raise TypeError("no such argument")

    for _ in range(MOST_FAILURES):
        assert not left
        assert engine._guarded(at_fault) is False
    assert left == [1]
