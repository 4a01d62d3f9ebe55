"""Quotas: exact whoever comes at once, never in the way of what could free them, and nothing left behind."""

from __future__ import annotations

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, NotFound, Overloaded, QuotaExceeded
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Outcome, checkpoint_row, sampler_row
from openrl.tasks.messages import CreateModel, Datum, ForwardBackward, OptimStep, Sample, SaveWeights
from openrl.tasks.operations import Usage
from openrl.tasks.quotas import NAMES, Amounts, Quotas, refusal
from openrl.tasks.registry import Checkpoint, Registry, Sampler
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage as Books
from tests.tasks.conftest import run_all

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


@pytest.fixture
def quotas(store: Store) -> Quotas:
    return Quotas(store)


@pytest.fixture
def sampler(registry: Registry, session_id: str) -> Sampler:
    return registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model=BASE, slug=SLUG)


def batch(num_tokens: int) -> ForwardBackward:
    return ForwardBackward(data=(Datum(tokens=np.zeros(num_tokens, np.int32), inputs={}),), loss_fn="ppo")


def prompt(num_tokens: int) -> Sample:
    return Sample(adapter_dir="", prompt=tuple(range(num_tokens)), num_samples=1, max_tokens=1)


def saved(run_id: str, name: str, size: int) -> Outcome:
    checkpoint = Checkpoint(
        run_id=run_id, checkpoint_id=f"weights/{name}", kind="training", directory=f"d/{name}", size_bytes=size,
        created=1.0, base_model=BASE, rank=8, train_attn=True, train_mlp=True, train_unembed=True, step=1,
        has_optimizer=True,
    )  # fmt: skip
    return Outcome(rows=(checkpoint_row(TENANT, checkpoint),))


def later(store: Store, seconds: float) -> None:
    """Let time pass for the tokens of the tenant's minute."""
    store.redis.hincrbyfloat(keys.account(TENANT), "tokens_at", -seconds)


# what there is


def test_without_quotas_nothing_is_limited_and_all_is_counted(quotas, journal, created):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    standing = quotas.standing(TENANT)
    assert (standing.limits, standing.own) == (Amounts(), ())
    assert (standing.use.runs, standing.use.operations) == (1, 1) and standing.use.stored_bytes > 0
    run_all(journal, lease)
    assert quotas.standing(TENANT).use == Amounts(runs=1)


def test_a_tenants_own_quota_counts_before_the_services_and_may_be_taken_back(quotas):
    quotas.publish(Amounts(runs=3, operations=9))
    quotas.set("a", {"runs": 0})
    assert quotas.standing("a").limits == Amounts(runs=0, operations=9)
    assert quotas.standing("b").limits == Amounts(runs=3, operations=9)
    quotas.reset("a")
    assert quotas.standing("a").limits == Amounts(runs=3, operations=9)


@pytest.mark.parametrize("limits", [{"run": 1}, {"runs": -1}, {"stored_bytes": 2**60}])
def test_a_quota_that_makes_no_sense_is_not_set(quotas, limits):
    with pytest.raises(InvalidRequest):
        quotas.set("a", limits)
    assert quotas.standing("a").own == ()


@pytest.mark.parametrize("name", NAMES)
def test_a_refusal_names_the_quota_the_use_and_whom_to_ask(name):
    error = refusal(f"QUOTA {name} 60 75 1".encode())
    assert f"quota {name}: 60 are allowed and 75 in use" in str(error) and "`openrl quota set`" in str(error)
    assert isinstance(error, Overloaded) == (name in ("operations", "tokens_per_minute"))
    assert name != "tokens_per_minute" or error.retry_after_s == 15


# runs


def create(journal, session_id, number):
    message = CreateModel(base_model=BASE, rank=8, seed=1)
    return journal.create(TENANT, session_id, number, message, slug=SLUG).run_id


def test_of_many_runs_made_at_once_as_many_are_made_as_there_may_be(quotas, journal, session_id, registry):
    quotas.set(TENANT, {"runs": 5})

    def attempt(number: int) -> str:
        try:
            return create(journal, session_id, number)
        except QuotaExceeded:
            return ""

    with ThreadPoolExecutor(8) as pool:
        made = [run_id for run_id in pool.map(attempt, range(20)) if run_id]
    assert len(made) == 5 == quotas.standing(TENANT).use.runs
    assert sorted(made) == sorted(run.run_id for run in registry.runs(TENANT, 99, 0)[0])
    number = int(made[0].rpartition(":")[2])
    assert create(journal, session_id, number) == made[0]  # the same again is not one more


def test_a_run_leaves_the_quota_with_its_session_or_its_failure_and_never_while_it_works(
    quotas, journal, registry, store, new_lease
):
    quotas.set(TENANT, {"runs": 1})
    first, second = (registry.create_session(TENANT).session_id for _ in range(2))
    run_id, lease = create(journal, first, 0), new_lease("w1")
    registry.finish_session(TENANT, first, "done")
    with pytest.raises(QuotaExceeded):  # its creation waits
        create(journal, second, 0)
    run_all(journal, lease)
    other = create(journal, second, 0)
    (piece,) = journal.take(SLUG, lease)
    failure = Outcome(error="no", run_fields={"state": "failed"})
    journal.commit(lease, piece.operations[0], failure, token=piece.token)
    assert quotas.standing(TENANT).use.runs == 0
    create(journal, second, 1)
    run_all(journal, lease)
    store.redis.hincrbyfloat(keys.session(TENANT, second), "last_seen", -3601)
    assert quotas.standing(TENANT).use.runs == 0
    assert run_id != other


# operations


def test_over_its_operations_a_tenant_waits_and_the_next_of_each_run_is_taken(quotas, journal, created, sampler):
    run_id, lease, _ = created
    quotas.set(TENANT, {"operations": 2})
    for seq in (1, 2):
        journal.submit(TENANT, run_id, seq, OptimStep())
    with pytest.raises(Overloaded, match="quota operations: 2 are allowed and 2 in use"):
        journal.submit(TENANT, run_id, 3, OptimStep())
    with pytest.raises(Overloaded):
        journal.submit_sample(TENANT, sampler, 0, prompt(3))
    with pytest.raises(NotFound):
        Futures(journal._store).get(TENANT, f"{run_id}:3")
    assert run_all(journal, lease) == [1, 2]
    journal.submit(TENANT, run_id, 3, OptimStep())
    journal.submit_sample(TENANT, sampler, 0, prompt(3))
    create(journal, keys.session_of(run_id), 7)
    assert quotas.standing(TENANT).use.operations == 3


def test_the_chunks_of_a_call_arrive_whatever_the_quota_though_the_first_comes_last(quotas, journal, created):
    run_id, lease, _ = created
    quotas.set(TENANT, {"operations": 1, "tokens_per_minute": 1})
    for call in range(3):
        first = 4 * call + 1
        for seq in (first + 1, first + 2, first + 3, first):
            journal.submit(TENANT, run_id, seq, batch(5))
        for _ in range(4):
            later(journal._store, 3600)
            run_all(journal, lease)
    assert journal.depth(SLUG)["train"] == {}


def test_of_many_samples_at_once_as_many_are_taken_as_there_may_be(quotas, journal, sampler, new_lease):
    quotas.set(TENANT, {"operations": 7})

    def attempt(seq: int) -> bool:
        try:
            journal.submit_sample(TENANT, sampler, seq, prompt(3))
        except Overloaded:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(30))) == 7
    lease = new_lease("s1", "sampler")
    for job in journal.take_samples(SLUG, lease, limit=99):
        journal.commit_sample(lease, job, Outcome(error="no", category="server"))
    assert quotas.standing(TENANT).use.operations == 0


# tokens


def test_samples_are_refused_until_a_minutes_tokens_are_back(quotas, journal, sampler, store, new_lease):
    quotas.set(TENANT, {"tokens_per_minute": 60})
    journal.submit_sample(TENANT, sampler, 0, prompt(50))
    lease = new_lease("s1", "sampler")
    (job,) = journal.take_samples(SLUG, lease, limit=9)
    journal.commit_sample(lease, job, Outcome(usage=Usage(prompt_tokens=50, sampled_tokens=40)))
    with pytest.raises(Overloaded, match="tokens_per_minute: 60 are allowed") as refused:
        journal.submit_sample(TENANT, sampler, 1, prompt(1))
    assert 25 < refused.value.retry_after_s <= 30
    assert 25 < quotas.seconds_to_wait(TENANT) <= 30
    later(store, 31)
    assert quotas.seconds_to_wait(TENANT) == 0
    journal.submit_sample(TENANT, sampler, 1, prompt(1))
    later(store, 9999)
    assert quotas.standing(TENANT).use.tokens_per_minute == 0


def test_training_over_its_tokens_waits_in_the_journal_and_goes_on_by_itself(quotas, journal, created, store):
    run_id, lease, _ = created
    quotas.set(TENANT, {"tokens_per_minute": 60})
    for seq, message in enumerate((batch(100), OptimStep(), OptimStep(), batch(100), OptimStep()), 1):
        journal.submit(TENANT, run_id, seq, message)
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], Outcome(error="no", category="user"), token=piece.token)
    assert run_all(journal, lease) == [2, 3]  # what needs no tokens goes on
    assert journal.take(SLUG, lease) == []
    assert 30 < quotas.seconds_to_wait(TENANT) <= 40
    later(store, 41)
    assert run_all(journal, lease) == [4, 5]


def test_one_tenants_tokens_are_not_anothers(quotas, journal, created, registry, new_run):
    run_id, lease, _ = created
    other = new_run(tenant="other", session=registry.create_session("other").session_id)
    quotas.set(TENANT, {"tokens_per_minute": 1})
    run_all(journal, lease)
    for tenant, run in ((TENANT, run_id), ("other", other)):
        journal.submit(tenant, run, 1, batch(9))
        journal.submit(tenant, run, 2, batch(9))
    for piece in journal.take(SLUG, lease):
        journal.commit(lease, piece.operations[0], Outcome(), token=piece.token)
    assert [(piece.tenant, piece.operations[0].seq_id) for piece in journal.take(SLUG, lease)] == [("other", 2)]


# stored bytes


def test_a_save_that_would_be_over_is_refused_whole_and_its_number_is_free_to_fail(quotas, journal, created, registry):
    run_id, lease, token = created
    quotas.set(TENANT, {"stored_bytes": 1000})
    for seq, name in ((1, "a"), (2, "b")):
        journal.submit(TENANT, run_id, seq, SaveWeights(name=name))
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], saved(run_id, "a", 600), token=token)
    with pytest.raises(QuotaExceeded, match=r"stored_bytes: 1000 are allowed and 668 in use, and this is 5.. more"):
        journal.commit(lease, piece.operations[1], saved(run_id, "b", 600), token=token)
    assert registry.run(TENANT, run_id).applied == 1
    assert [each.checkpoint_id for each in registry.checkpoints(TENANT, run_id, 9, 0)[0]] == ["weights/a"]
    journal.commit(lease, piece.operations[1], Outcome(error="over"), token=token)
    assert quotas.standing(TENANT).use.stored_bytes == 600


def test_bytes_follow_rows_and_files_and_come_back_to_nothing(quotas, journal, created, registry, store):
    run_id, lease, token = created
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, SaveWeights(name="a", overwrite=True))
    (piece,) = journal.take(SLUG, lease)
    for operation, size in zip(piece.operations, (500, 300, 700), strict=True):
        outcome = dataclasses.replace(saved(run_id, "a", size), result=b"r" * 5000)
        journal.commit(lease, operation, outcome, token=token)
        journal.commit(lease, operation, outcome, token=token)  # sent again by the client's library
    assert quotas.standing(TENANT).use.stored_bytes == 700 + 3 * 5000
    store.redis.zadd(keys.FILES, dict.fromkeys(store.redis.zrange(keys.FILES, 0, -1), 1))
    assert Futures(store).sweep() == 3 and Futures(store).sweep() == 0
    registry.delete_checkpoint(TENANT, run_id, "weights/a")
    assert quotas.standing(TENANT).use == Amounts(runs=1)


def test_over_its_bytes_a_tenant_is_told_before_it_saves_and_trains_on(quotas, journal, created):
    run_id, lease, token = created
    quotas.set(TENANT, {"stored_bytes": 500})
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], saved(run_id, "a", 500 - 1), token=token)
    journal.submit(TENANT, run_id, 2, batch(3))
    with pytest.raises(QuotaExceeded):
        journal.submit(TENANT, run_id, 3, SaveWeights(name="b"))
    assert run_all(journal, lease) == [2]


def test_a_version_for_one_sampler_counts_while_its_record_is_there(quotas, journal, created, store, session_id):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    (piece,) = journal.take(SLUG, lease)
    sampler_id = f"{session_id}:sample:4"
    record = Sampler(sampler_id=sampler_id, session_id=session_id, base_model=BASE, slug=SLUG, run_id=run_id,
                     adapter_dir="d", size_bytes=321)  # fmt: skip
    beside = saved(run_id, "beside", 5000)
    outcome = Outcome(rows=(*sampler_row(TENANT, record), *beside.rows))
    journal.commit(lease, piece.operations[0], outcome, token=token)
    assert quotas.standing(TENANT).use.stored_bytes == 5321
    Books(store).meter()
    assert quotas.standing(TENANT).use.stored_bytes == 5321
    assert store.script("sampler_drop")(TENANT, sampler_id, "", "d") == 1
    assert quotas.standing(TENANT).use.stored_bytes == 5000


def test_a_wrong_count_is_put_right_by_the_next_measurement(quotas, journal, created, store):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], saved(run_id, "a", 600), token=token)
    for wrong in (0, 10**9):
        store.redis.hset(keys.account(TENANT), "stored", wrong)
        Books(store).meter()
        assert quotas.standing(TENANT).use.stored_bytes == 600


def test_a_save_while_rows_are_measured_stays_counted(quotas, journal, created, store):
    run_id, lease, token = created

    class Slow(Books):
        def _stored(self, tenant):
            found = super()._stored(tenant)
            journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
            (piece,) = journal.take(SLUG, lease)
            journal.commit(lease, piece.operations[0], saved(run_id, "a", 600), token=token)
            return found

    Slow(store).meter()
    assert quotas.standing(TENANT).use.stored_bytes == 600


def test_whatever_happens_to_samples_nothing_stays_counted(quotas, journal, sampler, store, new_lease, kill):
    for seq in range(9):
        journal.submit_sample(TENANT, sampler, seq, prompt(900))
    for number in range(4):  # three of them die with requests in their hands
        lease = new_lease(f"s{number}", "sampler")
        jobs = journal.take_samples(SLUG, lease, limit=3)
        if number < 3:
            kill(lease)
    while jobs:
        for job in jobs:
            journal.commit_sample(lease, job, Outcome(result=b"x" * 3000))
        jobs = journal.take_samples(SLUG, lease, limit=3)
    use = quotas.standing(TENANT).use
    assert use.operations == 0
    store.redis.zadd(keys.FILES, dict.fromkeys(store.redis.zrange(keys.FILES, 0, -1), 1))
    Futures(store).sweep()
    assert quotas.standing(TENANT).use.stored_bytes == 0
    assert list(itertools.chain(store.settings.data_dir.rglob("spool/*/*/*"))) == []
