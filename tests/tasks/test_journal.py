from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from openrl.tasks import keys
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, Overloaded, StaleOwner
from openrl.tasks.journal import MAX_AHEAD, Journal, Outcome, checkpoint_row, sampler_row
from openrl.tasks.messages import (
    CreateModel,
    Datum,
    ForwardBackward,
    OptimStep,
    SaveWeights,
    SaveWeightsForSampler,
    decode,
)
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Checkpoint, Registry, Sampler
from openrl.tasks.store import Store
from tests.tasks.conftest import run_all

TENANT, OTHER, BASE = "local", "other", "tiny/base"
SLUG = keys.slug(BASE)


def step(seq: int) -> OptimStep:
    return OptimStep(learning_rate=seq * 1e-3)


def large(seq: int) -> SaveWeights:
    return SaveWeights(name=f"n{seq}", user_metadata={"x": "y" * 2000})


def named(seq: int) -> SaveWeights:
    """Just small enough to lie in the store."""
    return SaveWeights(name=f"n{seq}", user_metadata={"x": "y" * 850})


def seqs(slices) -> list[int]:
    return [operation.seq_id for piece in slices for operation in piece.operations]


def files(store: Store) -> list[str]:
    return [str(path) for path in store.settings.data_dir.rglob("*") if path.is_file()]


def age_gaps(store: Store, seconds: float) -> None:
    """Let that time pass for whatever is missing."""
    for member in store.redis.zrange(keys.GAPS, 0, -1):
        store.redis.zincrby(keys.GAPS, -seconds, member)


@pytest.fixture
def small(store: Store) -> Journal:
    """A journal that may hold one byte of each tenant."""
    limited = Store(store.redis, dataclasses.replace(store.settings, tenant_bytes=1))
    return Journal(limited)


# order, once


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_operations_are_handed_out_in_order_however_they_arrive(journal, created, order):
    run_id, lease, _ = created
    arrived = set()
    for seq in order:
        journal.submit(TENANT, run_id, seq, step(seq))
        arrived.add(seq)
        contiguous = list(itertools.takewhile(arrived.__contains__, itertools.count(1)))
        assert seqs(journal.take(SLUG, lease)) == contiguous
    assert run_all(journal, lease) == [1, 2, 3]


def test_the_same_operation_again_gets_the_same_promise_and_changes_nothing(journal, created, store):
    run_id, lease, _ = created
    first = journal.submit(TENANT, run_id, 1, large(1))
    before = (files(store), journal.depth(SLUG)["train"])
    assert journal.submit(TENANT, run_id, 1, large(1)) == first
    assert first.request_id == f"{run_id}:1"
    assert (files(store), journal.depth(SLUG)["train"]) == before
    run_all(journal, lease)
    assert journal.submit(TENANT, run_id, 1, large(1)) == first
    assert journal.take(SLUG, lease) == []


def test_a_different_operation_under_a_used_key_is_refused_before_and_after_it_took_effect(journal, created, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, step(1))
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 1, step(2))
    run_all(journal, lease)
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 1, large(1))
    assert files(store) == []


@pytest.mark.parametrize("seq", [0, -1, 2**31, 2**63])
def test_an_impossible_sequence_id_is_refused(journal, created, seq):
    with pytest.raises(InvalidRequest):
        journal.submit(TENANT, created[0], seq, step(1))
    journal.refuse(TENANT, created[0], seq, "", b"", "bad")
    assert journal.depth(SLUG)["train"] == {}


def test_a_sequence_id_absurdly_far_ahead_is_refused_and_consumes_nothing(journal, created, futures, store):
    run_id, _, _ = created
    for seq in (MAX_AHEAD + 1, 2**31 - 1):
        with pytest.raises(InvalidRequest, match="too far ahead"):
            journal.submit(TENANT, run_id, seq, large(1))
        journal.refuse(TENANT, run_id, seq, "optim_step", b"", "bad")
        with pytest.raises(NotFound):
            futures.get(TENANT, f"{run_id}:{seq}")
    assert (files(store), journal.depth(SLUG)["train"]) == ([], {})
    journal.submit(TENANT, run_id, MAX_AHEAD, step(1))


def test_unknown_and_foreign_runs_look_alike(journal, created):
    run_id = created[0]
    for tenant, name in ((OTHER, run_id), (TENANT, run_id + "9"), (TENANT, "x"), (TENANT, run_id + ":journal")):
        with pytest.raises(NotFound):
            journal.submit(tenant, name, 1, step(1))
        with pytest.raises(NotFound):
            journal.refuse(tenant, name, 1, "", b"", "bad")


def test_a_large_body_is_in_a_file_and_comes_back(journal, created, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, large(1))
    assert len(files(store)) == 1
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    assert (operation.kind, operation.body) == ("save_weights", b"")
    (body,) = journal.bodies([operation])
    assert SaveWeights.from_bytes(body) == large(1)
    assert len(body) == operation.size


def test_bodies_come_in_the_order_asked_for_and_one_that_is_lost_is_an_error_in_its_place(journal, created, store):
    run_id, lease, _ = created
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, large(seq) if seq == 2 else step(seq))
    operations = journal.take(SLUG, lease)[0].operations
    assert [OptimStep.from_bytes(body) for body in journal.bodies(operations[::-2])] == [step(3), step(1)]
    os.unlink(files(store)[0])
    first, lost, _ = journal.bodies(operations)
    assert OptimStep.from_bytes(first) == step(1)
    assert isinstance(lost, FileNotFoundError)


def test_the_first_small_bodies_come_with_what_is_taken_and_the_others_are_read_when_asked_for(journal, created):
    run_id, lease, _ = created
    sent = [OptimStep(learning_rate=1e-3), *(named(seq) for seq in range(2, 90))]
    for seq, message in enumerate(sent, start=1):
        journal.submit(TENANT, run_id, seq, message)
    ((operations,),) = [[piece.operations] for piece in journal.take(SLUG, lease, max_ops_per_run=100)]
    brought = [operation.seq_id for operation in operations if operation.body]
    assert brought[:2] == [1, 2] and 60 < len(brought) < len(sent)
    assert journal.bodies(operations) == [message.to_bytes() for message in sent]
    ((again,),) = [[piece.operations] for piece in journal.take(SLUG, lease, max_ops_per_run=100)]
    assert again == operations


def test_a_letter_is_laid_down_with_an_operation_that_is_accepted_and_with_no_other(journal, created, store):
    run_id, _, _ = created
    for learning_rate, seq in ((1e-3, 1), (1e-3, 1), (2e-3, 2)):
        journal.submit(TENANT, run_id, seq, OptimStep(learning_rate=learning_rate), letter=("box", f"letter {seq}"))
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 1, OptimStep(learning_rate=5e-3), letter=("box", "refused"))
    with pytest.raises(NotFound):
        journal.submit(OTHER, run_id, 3, OptimStep(), letter=("box", "foreign"))
    assert store.redis.lrange("box", 0, -1) == [b"letter 2", b"letter 1"]


def test_a_body_that_can_not_be_read_now_is_not_called_lost(journal, created, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, large(1))
    path = files(store)[0]
    os.unlink(path)
    os.mkdir(path)
    (body,) = journal.bodies(journal.take(SLUG, lease)[0].operations)
    assert isinstance(body, OSError) and not isinstance(body, FileNotFoundError)


def test_a_batch_is_taken_with_its_tokens_before_its_body_is_read(journal, created):
    run_id, lease, _ = created
    batch = ForwardBackward(data=tuple(Datum(tokens=np.zeros(n, np.int32), inputs={}) for n in (3, 4)), loss_fn="ppo")
    journal.submit(TENANT, run_id, 1, batch)
    journal.submit(TENANT, run_id, 2, step(2))
    assert [operation.tokens for operation in journal.take(SLUG, lease)[0].operations] == [7, 0]


def test_no_backlog_hides_another_tenants_operation(journal, registry, created, new_run):
    run_id, lease, _ = created
    for seq in range(1, 40):
        journal.submit(TENANT, run_id, seq, large(seq))
    for number in range(1, 6):
        new_run(number)
    session = registry.create_session(OTHER).session_id
    late = new_run(tenant=OTHER, session=session)
    assert [piece.run_id for piece in journal.take(SLUG, lease, max_runs=2)] == [run_id, late]


def test_operations_wait_within_their_bounds(journal, new_run, new_lease, created):
    first, lease, _ = created
    second = new_run(1)
    for seq in range(1, 6):
        journal.submit(TENANT, first, seq, step(seq))
    assert len(journal.take(SLUG, lease, max_runs=1)) == 1
    assert [len(piece.operations) for piece in journal.take(SLUG, lease, max_ops_per_run=2)] == [1, 2]
    journal.submit(TENANT, second, 1, step(1))
    assert journal.take("another-base", lease) == []


# creating


def test_a_run_is_recorded_with_its_creation_as_operation_zero(journal, registry, session_id, new_lease, futures):
    message = CreateModel(base_model=BASE, rank=4, seed=7, train_mlp=False, user_metadata={"a": "b"})
    promise = journal.create(TENANT, session_id, 2, message, slug=SLUG)
    assert (promise.request_id, promise.run_id) == (f"{session_id}:train:2:0", f"{session_id}:train:2")
    run = registry.run(TENANT, promise.run_id)
    assert (run.rank, run.seed, run.train_mlp, run.train_attn, run.state, run.applied) == (
        4,
        7,
        False,
        True,
        "creating",
        -1,
    )
    assert futures.get(TENANT, promise.request_id).state == "pending"
    assert futures.get(TENANT, promise.request_id).model_id == promise.run_id

    lease = new_lease("w1")
    (piece,) = journal.take(SLUG, lease)
    (operation,) = piece.operations
    assert (operation.kind, operation.seq_id, piece.applied) == ("create_model", 0, -1)
    journal.commit(lease, operation, Outcome(run_fields={"state": "ready", "rank": "16"}), token=piece.token)
    run = registry.run(TENANT, promise.run_id)
    assert (run.state, run.applied, run.rank) == ("ready", 0, 16)


def test_operations_may_arrive_before_their_run_is_created_by_a_worker(journal, new_run, new_lease):
    run_id = new_run()
    journal.submit(TENANT, run_id, 1, step(1))
    assert run_all(journal, new_lease("w1")) == [0, 1]


def test_the_same_creation_again_gets_the_same_run_and_a_different_one_is_refused(journal, session_id, registry):
    message = CreateModel(
        base_model=BASE, rank=4, seed=None, checkpoint_path="tinker://a/weights/b", checkpoint_dir="v1"
    )
    first = journal.create(TENANT, session_id, 0, message, slug=SLUG)
    seed = registry.run(TENANT, first.run_id).seed
    moved = dataclasses.replace(message, checkpoint_dir="v2")
    assert journal.create(TENANT, session_id, 0, moved, slug=SLUG) == first
    assert registry.run(TENANT, first.run_id).seed == seed
    with pytest.raises(KeyReused):
        journal.create(TENANT, session_id, 0, dataclasses.replace(message, rank=8), slug=SLUG)
    assert registry.runs(TENANT, 10, 0)[1] == 1


def test_a_drawn_seed_is_journaled(journal, session_id, registry, new_lease):
    promise = journal.create(TENANT, session_id, 0, CreateModel(base_model=BASE, rank=4, seed=None), slug=SLUG)
    (piece,) = journal.take(SLUG, new_lease("w1"))
    seed = CreateModel.from_bytes(*journal.bodies(piece.operations)).seed
    assert seed is not None
    assert seed == registry.run(TENANT, promise.run_id).seed


def test_a_run_needs_a_living_session_of_its_tenant(journal, session_id, registry, new_run):
    with pytest.raises(NotFound):
        new_run(session="s-unknown")
    with pytest.raises(NotFound):
        new_run(tenant=OTHER)
    with pytest.raises(InvalidRequest):
        new_run(-1)
    first = new_run(0)
    registry.finish_session(TENANT, session_id, "success")
    assert new_run(0) == first
    with pytest.raises(Gone):
        new_run(1)


# refused and missing operations


@pytest.mark.parametrize(
    ("kind", "voids"), [("forward_backward", True), ("", True), ("optim_step", False), ("forward", False)]
)
def test_a_refused_submission_takes_its_turn(journal, created, futures, kind, voids):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 2, step(2))
    assert journal.take(SLUG, lease) == []
    journal.refuse(TENANT, run_id, 1, kind, b"\x01", "data[0] is empty")
    journal.refuse(TENANT, run_id, 1, kind, b"\x01", "data[0] is empty")
    future = futures.get(TENANT, f"{run_id}:1")
    assert (future.state, future.error, future.category) == ("failed", "data[0] is empty", "user")
    (piece,) = journal.take(SLUG, lease)
    refused = piece.operations[0]
    assert (refused.kind, refused.voids, refused.error) == ("refused", voids, "data[0] is empty")
    assert run_all(journal, lease) == [1, 2]
    assert futures.get(TENANT, f"{run_id}:1") == future


def test_a_refusal_never_replaces_an_accepted_operation(journal, created, futures):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, step(1))
    journal.refuse(TENANT, run_id, 1, "optim_step", b"\x01", "bad")
    assert futures.get(TENANT, f"{run_id}:1").state == "pending"
    assert [piece.operations[0].kind for piece in journal.take(SLUG, lease)] == ["optim_step"]


def test_a_text_with_half_a_character_does_no_harm(journal, created, futures):
    journal.refuse(TENANT, created[0], 1, "forward", b"\x01", "no loss \ud800")
    assert futures.get(TENANT, f"{created[0]}:1").error == "no loss ?"
    assert run_all(journal, created[1]) == [1]


def test_a_refused_key_is_used(journal, created):
    journal.refuse(TENANT, created[0], 1, "optim_step", b"\x01", "bad")
    with pytest.raises(KeyReused):
        journal.submit(TENANT, created[0], 1, step(1))


def test_a_gap_that_stands_too_long_is_closed_as_failed(journal, created, futures, store):
    run_id, lease, _ = created
    for seq in (1, 4, 6):
        journal.submit(TENANT, run_id, seq, step(seq))
    assert run_all(journal, lease) == [1]
    age_gaps(store, 300)
    assert journal.close_gaps() == 0
    age_gaps(store, 31)
    assert journal.close_gaps() == 2
    assert journal.close_gaps() == 0
    future = futures.get(TENANT, f"{run_id}:3")
    assert (future.state, future.error) == ("failed", "seq 3 never arrived")
    (piece,) = journal.take(SLUG, lease)
    assert [(o.seq_id, o.kind, o.voids) for o in piece.operations] == [
        (2, "missing", True), (3, "missing", True), (4, "optim_step", False),
    ]  # fmt: skip
    assert run_all(journal, lease) == [2, 3, 4]
    with pytest.raises(KeyReused, match="too late"):
        journal.submit(TENANT, run_id, 3, step(3))
    age_gaps(store, 331)
    assert journal.close_gaps() == 1
    assert run_all(journal, lease) == [5, 6]


def test_a_gap_that_is_filled_is_forgotten(journal, created, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 2, step(2))
    journal.submit(TENANT, run_id, 1, step(1))
    assert store.redis.zcard(keys.GAPS) == 0
    age_gaps(store, 10_000)
    assert journal.close_gaps() == 0
    assert run_all(journal, lease) == [1, 2]


@pytest.mark.parametrize("ended", ["finished", "silent"])
def test_a_gap_of_a_session_that_is_away_waits_longer(journal, created, store, session_id, registry, ended):
    run_id, _, _ = created
    journal.submit(TENANT, run_id, 2, step(2))
    if ended == "finished":
        registry.finish_session(TENANT, session_id, "success")
    else:
        store.redis.hset(keys.session(TENANT, session_id), "last_seen", store.now() - 600)
    age_gaps(store, 331)
    assert journal.close_gaps() == 0
    age_gaps(store, 2970)
    assert journal.close_gaps() == 1


def test_a_wide_gap_is_closed_at_once_in_steps_that_hold_up_nobody(journal, created, store):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 26, step(26))
    journal.submit(TENANT, run_id, 28, step(28))
    age_gaps(store, 331)
    store.script("close_gaps")(330, 3300, 120, 60, 10, 1000)
    assert journal.take(SLUG, lease) == []
    assert journal.close_gaps(at_once=10) == 15
    assert run_all(journal, lease) == list(range(1, 27))
    assert journal.close_gaps() == 0
    assert store.redis.zcard(keys.GAPS) == 1


# committing


def test_a_commit_moves_the_run_and_keeps_the_promise_and_writes_the_rows_together(
    journal, created, futures, registry, session_id
):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    checkpoint = Checkpoint(
        run_id=run_id, checkpoint_id="weights/a", kind="training", directory=f"weights/a.{token}", size_bytes=1,
        created=2.0, base_model=BASE, rank=8, train_attn=True, train_mlp=True, train_unembed=True, step=0,
        has_optimizer=True,
    )  # fmt: skip
    sampler = Sampler(
        sampler_id=f"{session_id}:sample:0", session_id=session_id, base_model=BASE, slug=SLUG, created=2.0
    )
    rows = (checkpoint_row(TENANT, checkpoint), *sampler_row(TENANT, sampler))
    journal.commit(lease, operation, Outcome(result=b"{}", rows=rows), token=token)
    future = futures.get(TENANT, operation.request_id)
    assert (future.state, future.result, future.content_type) == ("done", b"{}", "application/json")
    assert registry.run(TENANT, run_id).applied == 1
    assert registry.checkpoint(TENANT, run_id, "weights/a") == checkpoint
    assert registry.sampler(TENANT, sampler.sampler_id) == sampler
    assert registry.session_contents(TENANT, session_id)[1] == [sampler.sampler_id]
    assert journal.depth(SLUG)["train"] == {}


def test_a_failed_operation_is_reported_and_recorded(journal, created, futures):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, step(1))
    journal.submit(TENANT, run_id, 2, step(2))
    first, second = journal.take(SLUG, lease)[0].operations
    journal.commit(lease, first, Outcome(error="no gradients", category="user"), token=token)
    journal.commit(lease, second, Outcome(), token=token)
    future = futures.get(TENANT, first.request_id)
    assert (future.state, future.error, future.category, future.result) == ("failed", "no gradients", "user", b"")
    history = list(journal.history(TENANT, run_id, after=0, upto=9))
    assert [(o.seq_id, o.error, o.replay) for o in history] == [(1, "no gradients", True), (2, "", True)]
    assert OptimStep.from_bytes(history[1].body) == step(2)


def test_a_commit_out_of_order_or_under_another_token_changes_nothing(journal, created, futures, registry, store):
    run_id, lease, token = created
    for seq in (1, 2):
        journal.submit(TENANT, run_id, seq, step(seq))
    first, second = journal.take(SLUG, lease)[0].operations
    result = Outcome(result=b"x" * 5000)
    for operation, wrong in ((second, token), (first, token - 1), (first, token + 1)):
        with pytest.raises(StaleOwner):
            journal.commit(lease, operation, result, token=wrong)
    assert registry.run(TENANT, run_id).applied == 0
    assert futures.get(TENANT, first.request_id).state == "pending"
    assert files(store) == []


def test_committing_twice_changes_nothing(journal, created, futures, store):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, step(1))
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    journal.commit(lease, operation, Outcome(result=b"a" * 5000), token=token)
    journal.commit(lease, operation, Outcome(result=b"b" * 5000), token=token)
    assert futures.get(TENANT, operation.request_id).result == b"a" * 5000
    assert len(files(store)) == 1


def test_an_ephemeral_save_reserves_its_sampler_at_once(journal, created, session_id, registry):
    run_id, lease, _ = created
    sampler_id = f"{session_id}:sample:4"
    message = SaveWeightsForSampler(sampler_id=sampler_id)
    promise = journal.submit(TENANT, run_id, 1, message)
    assert journal.submit(TENANT, run_id, 1, message) == promise
    with pytest.raises(KeyReused):
        registry.create_sampler(TENANT, session_id=session_id, seq=4, base_model=BASE, slug=SLUG)
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 2, message)
    with pytest.raises(NotFound):
        registry.sampler(TENANT, sampler_id)
    registry.create_sampler(TENANT, session_id=session_id, seq=5, base_model=BASE, slug=SLUG)
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 3, SaveWeightsForSampler(sampler_id=f"{session_id}:sample:5"))
    kinds = [operation.kind for operation in journal.take(SLUG, lease)[0].operations]
    assert kinds == ["save_weights_for_sampler", "refused", "refused"]


def test_an_ephemeral_save_sent_again_under_another_sampler_is_the_same_save(journal, created, session_id, registry):
    run_id, lease, _ = created
    promise = journal.submit(TENANT, run_id, 1, SaveWeightsForSampler(sampler_id=f"{session_id}:sample:4"))
    again = SaveWeightsForSampler(sampler_id=f"{session_id}:sample:5")
    assert journal.submit(TENANT, run_id, 1, again) == promise
    for other in (SaveWeightsForSampler(name="final"), dataclasses.replace(again, ttl_seconds=60)):
        with pytest.raises(KeyReused):
            journal.submit(TENANT, run_id, 1, other)
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    assert decode(operation.kind, operation.body).sampler_id == f"{session_id}:sample:4"
    registry.create_sampler(TENANT, session_id=session_id, seq=5, base_model=BASE, slug=SLUG)  # it is free


# snapshots


def test_a_snapshot_drops_the_bodies_that_it_covers_and_keeps_the_digests(journal, created, store):
    run_id, lease, token = created
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, large(seq))
    for operation in journal.take(SLUG, lease)[0].operations[:2]:
        journal.commit(lease, operation, Outcome(), token=token)
    assert journal.snapshot(TENANT, run_id) is None
    journal.record_snapshot(lease, TENANT, run_id, token, "snapshots/2", 2)
    assert journal.snapshot(TENANT, run_id) == ("snapshots/2", 2)
    assert len(files(store)) == 1
    assert store.redis.hlen(keys.bodies(TENANT, run_id)) == 1
    assert journal.submit(TENANT, run_id, 1, large(1)).request_id == f"{run_id}:1"
    with pytest.raises(KeyReused):
        journal.submit(TENANT, run_id, 2, large(1))
    assert [o.body for o in journal.history(TENANT, run_id, after=0, upto=2)] == [b"", b""]
    assert run_all(journal, lease) == [3]


def test_a_snapshot_is_fenced_and_never_goes_back(journal, created):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, step(1))
    run_all(journal, lease)
    journal.record_snapshot(lease, TENANT, run_id, token, "new", 1)
    for wrong, applied in ((token + 1, 1), (token, 0), (token, 2)):
        with pytest.raises(StaleOwner):
            journal.record_snapshot(lease, TENANT, run_id, wrong, "other", applied)
    assert journal.snapshot(TENANT, run_id) == ("new", 1)


def test_a_history_reads_only_the_bodies_that_are_asked_for_and_one_at_a_time(journal, created, store):
    run_id, lease, token = created
    for seq in (1, 2, 3, 4):
        journal.submit(TENANT, run_id, seq, step(seq) if seq == 3 else large(seq))
    for operation in journal.take(SLUG, lease)[0].operations:
        journal.commit(lease, operation, Outcome(error="full" if operation.seq_id == 2 else None), token=token)
    history = journal.history(TENANT, run_id, after=0, upto=4, bodies_of={"optim_step"})
    for path in files(store):
        os.unlink(path)
    assert [bool(operation.body) for operation in history] == [False, False, True, False]
    history = journal.history(TENANT, run_id, after=1, upto=4)
    assert [next(history).seq_id, next(history).seq_id] == [2, 3]
    with pytest.raises(FileNotFoundError):
        next(history)


# what a tenant may have queued


def test_over_its_bytes_a_tenant_is_asked_to_wait_and_nothing_is_consumed(small, created, futures, store):
    run_id, lease, _ = created
    small.submit(TENANT, run_id, 1, large(1))
    before = files(store)
    for _ in range(2):
        with pytest.raises(Overloaded):
            small.submit(TENANT, run_id, 2, large(2))
    with pytest.raises(NotFound):
        futures.get(TENANT, f"{run_id}:2")
    assert files(store) == before
    assert small.submit(TENANT, run_id, 1, large(1)).request_id == f"{run_id}:1"
    run_all(small, lease)
    small.submit(TENANT, run_id, 2, large(2))


def test_with_room_for_one_byte_five_chunks_still_arrive_and_other_runs_and_tenants_do_too(
    small, created, new_run, registry, store
):
    run_id, lease, _ = created
    other = new_run(1)
    foreign = new_run(tenant=OTHER, session=registry.create_session(OTHER).session_id)
    run_all(small, lease)
    done: list[int] = []
    waiting = [1, 2, 3, 4, 5]
    while waiting:
        refused = []
        for seq in reversed(waiting):
            try:
                small.submit(TENANT, run_id, seq, large(seq))
            except Overloaded:
                refused.append(seq)
        small.refuse(TENANT, other, 1, "optim_step", b"", "bad")
        small.submit(OTHER, foreign, 1, step(1))
        waiting = sorted(refused)
        done += run_all(small, lease)
    assert sorted(done) == [1, 1, 1, 2, 3, 4, 5]
    assert not store.redis.exists(keys.queued(TENANT))


def test_what_is_queued_is_counted_until_it_is_applied(journal, created, store):
    run_id, lease, _ = created
    for seq in (1, 2):
        journal.submit(TENANT, run_id, seq, large(seq))
        journal.submit(TENANT, run_id, seq, large(seq))
    journal.refuse(TENANT, run_id, 3, "optim_step", b"", "bad")
    assert int(store.redis.get(keys.queued(TENANT))) == len(large(1).to_bytes()) + len(large(2).to_bytes())
    run_all(journal, lease)
    assert not store.redis.exists(keys.queued(TENANT))


# depth


def test_depth_counts_what_is_acknowledged_and_not_applied(journal, created, new_run):
    run_id, lease, _ = created
    assert journal.depth(SLUG) == {"train": {}, "sample": {}, "oldest_s": {"train": 0.0, "sample": 0.0}}
    journal.submit(TENANT, run_id, 1, step(1))
    journal.submit(TENANT, run_id, 3, step(3))
    new_run(1)
    depth = journal.depth(SLUG)
    assert depth["train"] == {TENANT: 3}
    assert 0 < depth["oldest_s"]["train"] < 60
    run_all(journal, lease)
    assert journal.depth(SLUG)["train"] == {TENANT: 1}
    assert journal.depth(SLUG)["oldest_s"]["train"] == 0.0


def test_submitting_taking_and_committing_are_one_round_trip_each(journal, created, store):
    run_id, lease, token = created

    def calls() -> int:
        stats = store.redis.info("commandstats")
        return sum(row["calls"] for name, row in stats.items() if name in ("cmdstat_evalsha", "cmdstat_hgetall"))

    before = calls()
    journal.submit(TENANT, run_id, 1, step(1))
    ((operation,),) = [piece.operations for piece in journal.take(SLUG, lease)]
    journal.commit(lease, operation, Outcome(), token=token)
    assert calls() - before == 3


# everything at once

COUNT = 6
MOVES = st.one_of(
    st.tuples(st.just("submit"), st.integers(0, 1), st.integers(1, COUNT)),
    st.tuples(st.just("take"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("commit"), st.integers(0, 1), st.integers(1, 3)),
    st.tuples(st.just("kill"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("release"), st.integers(0, 1), st.just(0)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=st.lists(MOVES, max_size=60))
def test_whatever_happens_each_operation_takes_effect_once_and_in_order(store, moves):
    """Two workers with stale leases and stale work in their hands; submissions doubled and reordered."""
    store.redis.flushall()
    journal, registry = Journal(store), Registry(store)
    session_id = registry.create_session(TENANT).session_id
    message = CreateModel(base_model=BASE, rank=8, seed=1)
    runs = [journal.create(TENANT, session_id, number, message, slug=SLUG).run_id for number in (0, 1)]
    workers = [Lease(store, f"w{number}", "trainer", SLUG) for number in (0, 1)]
    hands: list[dict] = [{}, {}]
    effects: list[tuple[str, int]] = []
    tokens: dict[str, int] = {}

    def take(index: int, limit: int) -> None:
        for piece in journal.take(SLUG, workers[index], max_ops_per_run=limit):
            assert piece.token >= tokens.get(piece.run_id, 0)
            tokens[piece.run_id] = piece.token
            assert [o.seq_id for o in piece.operations] == list(
                range(piece.applied + 1, piece.applied + 1 + len(piece.operations))
            )
            hands[index][piece.run_id] = piece

    def commit(index: int, limit: int) -> None:
        for piece in hands[index].values():
            for operation in piece.operations[:limit]:
                before = registry.run(TENANT, piece.run_id).applied
                try:
                    journal.commit(workers[index], operation, Outcome(), token=piece.token)
                except StaleOwner:
                    assert registry.run(TENANT, piece.run_id).applied == before
                    break
                if registry.run(TENANT, piece.run_id).applied == before + 1:
                    effects.append((piece.run_id, operation.seq_id))

    for move, index, number in moves:
        if move == "submit":
            journal.submit(TENANT, runs[index], number, step(number))
        elif move == "take":
            take(index, number)
        elif move == "commit":
            commit(index, number)
        elif move == "kill":
            store.redis.delete(keys.worker(workers[index].worker_id))
            assert journal.take(SLUG, workers[index]) == []
            assert workers[index].lost
            workers[index].close()
            workers[index] = Lease(store, f"w{index}", "trainer", SLUG)
        else:
            for piece in hands[index].values():
                journal.release(workers[index], TENANT, piece.run_id, piece.token)

    for run_id in runs:
        for seq in range(COUNT, 0, -1):
            journal.submit(TENANT, run_id, seq, step(seq))
    for worker in workers:
        worker.close()
    workers[0] = Lease(store, "last", "trainer", SLUG)
    hands[0].clear()
    for _ in range(COUNT + 2):
        take(0, 32)
        commit(0, 32)
    workers[0].close()
    assert set(Counter(effects).values()) == {1}
    for run_id in runs:
        assert [seq for name, seq in effects if name == run_id] == list(range(COUNT + 1))
    assert journal.depth(SLUG)["train"] == {}
    assert store.redis.zcard(keys.ready(SLUG)) == store.redis.zcard(keys.GAPS) == 0
