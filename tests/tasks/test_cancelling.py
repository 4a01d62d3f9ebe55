"""Operations of a run that are cancelled while they wait: failed in their turn, and never done."""

from __future__ import annotations

import numpy as np
import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import BY_OPERATOR, Cancelling
from openrl.tasks.errors import InvalidRequest, NotFound, StaleOwner
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import ForwardBackward, OptimStep, Sample, SaveWeights
from openrl.tasks.wire.codec import Datum

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


@pytest.fixture
def cancelling(store):
    return Cancelling(store)


def gradient(size: int = 10) -> ForwardBackward:
    return ForwardBackward(data=(Datum(tokens=np.zeros(size, np.int32), inputs={}),), loss_fn="ppo")


def kinds(pieces) -> list[tuple[int, str, str, bool]]:
    return [(one.seq_id, one.kind, one.error, one.voids) for piece in pieces for one in piece.operations]


def test_what_waits_for_nobody_is_cancelled_at_once_and_passed_over_in_its_turn(
    journal, created, cancelling, futures, store
):
    run_id, lease, token = created
    journal.release(lease, TENANT, run_id, token)
    for seq, message in ((1, gradient(5000)), (2, OptimStep()), (3, SaveWeights(name="a"))):
        journal.submit(TENANT, run_id, seq, message)
    assert cancelling.cancel(TENANT, f"{run_id}:1") == "cancelled"
    assert cancelling.cancel(TENANT, f"{run_id}:3") == "cancelled"
    for seq in (1, 3):
        future = futures.get(TENANT, f"{run_id}:{seq}")
        assert (future.state, future.error, future.category) == ("failed", "cancelled by its client", "user")
    (piece,) = journal.take(SLUG, lease)
    reason = "cancelled by its client"
    assert kinds([piece]) == [(1, "refused", reason, True), (2, "optim_step", "", False), (3, "refused", reason, False)]
    for operation in piece.operations:
        journal.commit(lease, operation, Outcome(error="void", category="user"), token=piece.token)
    assert futures.get(TENANT, f"{run_id}:1").error == reason
    assert journal.depth(SLUG)["train"] == {}
    assert not store.redis.exists(keys.queued(TENANT))
    assert cancelling.cancel(TENANT, f"{run_id}:2") == "finished"


def test_the_same_submission_again_gets_the_promise_that_was_cancelled(journal, created, cancelling, futures):
    run_id, lease, token = created
    journal.release(lease, TENANT, run_id, token)
    promise = journal.submit(TENANT, run_id, 1, gradient())
    cancelling.cancel(TENANT, promise.request_id)
    assert journal.submit(TENANT, run_id, 1, gradient()) == promise
    assert futures.get(TENANT, promise.request_id).state == "failed"


def test_what_an_owner_has_in_hand_is_finished_and_what_waits_behind_it_is_cancelled_when_it_looks_again(
    journal, created, cancelling, futures
):
    run_id, lease, _ = created
    for seq, message in ((1, gradient()), (2, gradient()), (3, OptimStep())):
        journal.submit(TENANT, run_id, seq, message)
    (piece,) = journal.take(SLUG, lease)
    assert [cancelling.cancel(TENANT, f"{run_id}:{seq}") for seq in (1, 2)] == ["asked", "asked"]
    journal.commit(lease, piece.operations[0], Outcome(result=b"{}"), token=piece.token)
    assert futures.get(TENANT, f"{run_id}:1").state == "done"
    assert futures.get(TENANT, f"{run_id}:2").state == "pending"
    (piece,) = journal.take(SLUG, lease)
    assert kinds([piece]) == [(2, "refused", "cancelled by its client", True), (3, "optim_step", "", False)]
    assert futures.get(TENANT, f"{run_id}:2").state == "failed"
    assert futures.get(TENANT, f"{run_id}:1").state == "done"


def test_the_next_owner_cancels_what_a_dead_one_had_in_hand_and_the_dead_ones_outcome_counts_for_nothing(
    journal, created, cancelling, new_lease, kill, futures
):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, gradient())
    (held,) = journal.take(SLUG, lease)
    cancelling.cancel(TENANT, f"{run_id}:1")
    kill(lease)
    (piece,) = journal.take(SLUG, new_lease("w2"))
    assert kinds([piece]) == [(1, "refused", "cancelled by its client", True)]
    with pytest.raises(StaleOwner):
        journal.commit(lease, held.operations[0], Outcome(result=b"{}"), token=held.token)
    assert futures.get(TENANT, f"{run_id}:1").state == "failed"


def test_the_owner_hears_that_something_was_cancelled(journal, created, cancelling, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, gradient())
    with store.redis.pubsub() as heard:
        heard.subscribe(keys.wake(lease.worker_id))
        heard.get_message(timeout=60)
        cancelling.cancel(TENANT, f"{run_id}:1")
        assert heard.get_message(timeout=60)["type"] == "message"


def test_what_stands_behind_a_gap_is_in_nobodys_hands(journal, created, cancelling, futures):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 2, gradient())
    assert cancelling.cancel(TENANT, f"{run_id}:2") == "cancelled"
    assert futures.get(TENANT, f"{run_id}:2").state == "failed"
    journal.submit(TENANT, run_id, 1, OptimStep())
    assert [one[:2] for one in kinds(journal.take(SLUG, lease))] == [(1, "optim_step"), (2, "refused")]


def test_a_creation_is_not_cancelled_and_what_never_was_is_not_found(journal, new_run, created, cancelling):
    run_id = new_run(1)
    with pytest.raises(InvalidRequest, match="creates a run"):
        cancelling.cancel(TENANT, f"{run_id}:0")
    for tenant, name in ((TENANT, f"{run_id}:7"), ("other", f"{run_id}:0"), (TENANT, "s-1:train:9:1")):
        with pytest.raises(NotFound):
            cancelling.cancel(tenant, name)
    assert cancelling.cancel(TENANT, f"{created[0]}:0") == "finished"


def test_a_whole_run_is_cancelled_with_the_samples_of_its_samplers(journal, registry, created, cancelling, futures):
    run_id, lease, token = created
    session = run_id.partition(":")[0]
    mine, base = (
        registry.create_sampler(TENANT, session_id=session, seq=seq, base_model=BASE, slug=SLUG, run_id=run)
        for seq, run in ((0, run_id), (1, ""))
    )
    for sampler in (mine, base):
        journal.submit_sample(TENANT, sampler, 0, Sample(adapter_dir="", prompt=(1,), num_samples=1))
    for seq in (1, 2, 4):
        journal.submit(TENANT, run_id, seq, gradient())
    assert cancelling.cancel_run(TENANT, run_id) == (1, 3)
    (piece,) = journal.take(SLUG, lease)
    assert kinds([piece]) == [(seq, "refused", BY_OPERATOR, True) for seq in (1, 2)]
    for operation in piece.operations:
        journal.commit(lease, operation, Outcome(error=BY_OPERATOR), token=token)
    states = {seq: futures.get(TENANT, f"{run_id}:{seq}").state for seq in (1, 2, 4)}
    assert states == {1: "failed", 2: "failed", 4: "failed"}
    assert futures.get(TENANT, f"{mine.sampler_id}:0").error == BY_OPERATOR
    assert futures.get(TENANT, f"{base.sampler_id}:0").state == "pending"
    assert cancelling.cancel_run(TENANT, run_id) == (0, 0)
    with pytest.raises(NotFound, match="no run"):
        cancelling.cancel_run("other", run_id)
