"""Usage: each operation counted once by what it really was, stored bytes by the time that they lay there."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from openrl.tasks import audit, keys
from openrl.tasks.errors import StaleOwner
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import Datum, Forward, ForwardBackward, Sample, SaveWeights
from openrl.tasks.operations import Usage as Used
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage, by_run_and_day
from tests.tasks.conftest import BASE, SLUG, TENANT
from tests.tasks.test_quotas import run_all, saved


@pytest.fixture
def usage(store: Store) -> Usage:
    return Usage(store)


def totals(usage: Usage, tenant: str = TENANT) -> dict[str, int]:
    sums: dict[str, int] = {}
    for row in usage.between(tenant, time.time() - 14400, time.time() + 7200):
        sums[row.name] = sums.get(row.name, 0) + row.amount
    return sums


def batch(kind: type[ForwardBackward], *lengths: int) -> ForwardBackward:
    return kind(data=tuple(Datum(tokens=np.zeros(n, np.int32), inputs={}) for n in lengths), loss_fn="ppo")


def test_training_is_counted_by_run_and_kind_and_a_failure_is_not(usage, journal, created):
    run_id, lease, token = created
    before = totals(usage)
    for seq, message in enumerate((batch(ForwardBackward, 3, 4), batch(Forward, 5), batch(ForwardBackward, 6)), 1):
        journal.submit(TENANT, run_id, seq, message)
    (piece,) = journal.take(SLUG, lease)
    for operation, outcome in zip(
        piece.operations, (Outcome(usage=Used(seconds=0.25)), Outcome(), Outcome(error="no")), strict=True
    ):
        journal.commit(lease, operation, outcome, token=token)
    after = totals(usage)
    assert {name: after[name] - before.get(name, 0) for name in after} == {
        "trained_tokens": 7, "forward_tokens": 5, "operations": 2, "microseconds": 250_000,
    }  # fmt: skip
    rows = list(usage.between(TENANT, time.time() - 14400, time.time() + 7200))
    assert {(row.slug, row.session_id, row.run_id) for row in rows} == {(SLUG, keys.session_of(run_id), run_id)}


def test_what_is_committed_twice_or_by_a_stale_worker_is_counted_once(usage, journal, created, new_lease, kill):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, batch(ForwardBackward, 9))
    (piece,) = journal.take(SLUG, lease)
    kill(lease)
    other = new_lease("w2")
    (again,) = journal.take(SLUG, other)
    with pytest.raises(StaleOwner):
        journal.commit(lease, piece.operations[0], Outcome(), token=token)
    for _ in range(2):
        journal.commit(other, again.operations[0], Outcome(usage=Used(seconds=1)), token=again.token)
    assert totals(usage)["trained_tokens"] == 9 and totals(usage)["microseconds"] == 1_000_000


@pytest.mark.parametrize("of_run", [True, False])
def test_samples_are_counted_by_the_session_that_asked_and_the_run_that_was_sampled(
    usage, journal, registry, store, created, new_lease, of_run
):
    run_id = created[0] if of_run else ""
    session_id = registry.create_session(TENANT).session_id
    sampler = registry.create_sampler(
        TENANT, session_id=session_id, seq=0, base_model=BASE, slug=SLUG, adapter_dir="d" * of_run, run_id=run_id
    )
    message = Sample(adapter_dir="", prompt=(1, 2, 3), num_samples=2, max_tokens=5)
    for seq in (0, 1):
        journal.submit_sample(TENANT, sampler, seq, message)
    lease = new_lease("s1", "sampler")
    first, second = journal.take_samples(SLUG, lease, limit=9)
    used = Used(prompt_tokens=3, sampled_tokens=7, seconds=0.5)
    for _ in range(2):
        journal.commit_sample(lease, first, Outcome(result=b"r", usage=used))
    journal.commit_sample(lease, second, Outcome(error="no", usage=used))
    counted = {
        row.name: (row.amount, row.session_id, row.run_id)
        for row in usage.between(TENANT, time.time() - 14400, time.time() + 7200)
        if row.session_id == session_id
    }
    names = {"samples": 1, "prompt_tokens": 3, "sampled_tokens": 7, "microseconds": 500_000}
    assert counted == {name: (amount, session_id, run_id) for name, amount in names.items()}


def test_stored_bytes_are_counted_for_as_long_as_they_lie_and_by_nobody_twice(usage, journal, created, store):
    run_id, lease, token = created
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], saved(run_id, "a", 1000), token=token)
    usage.meter()
    assert totals(usage).get("byte_seconds", 0) == 0
    store.redis.hincrbyfloat(keys.account(TENANT), "metered", -5400)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: usage.meter(), range(8)))
    assert 5_400_000 <= totals(usage)["byte_seconds"] < 5_500_000
    rows = [row for row in usage.between(TENANT, time.time() - 14400, time.time()) if row.name == "byte_seconds"]
    assert len(rows) >= 2 and all(row.amount <= 3_600_000 for row in rows)  # each hour has its own
    assert totals(usage)["checkpoints"] == 1


def test_days_and_runs_are_added_up(usage, journal, created):
    run_id, lease, _ = created
    for seq in (1, 2):
        journal.submit(TENANT, run_id, seq, batch(ForwardBackward, 10))
    run_all(journal, lease)
    days = by_run_and_day(usage.between(TENANT, time.time() - 14400, time.time() + 7200))
    assert {run for _, run in days} == {run_id} and all(day % 86400 == 0 for day, _ in days)
    assert sum(used.get("trained_tokens", 0) for used in days.values()) == 20


def test_another_tenants_usage_is_its_own(usage, journal, created):
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, batch(ForwardBackward, 10))
    run_all(journal, lease)
    assert totals(usage, "other") == {}


# the audit log


def test_the_log_is_in_order_of_one_tenant_and_of_the_time_that_is_asked_for(store):
    for number in range(3):
        audit.record(store, "a", "checkpoint_deleted", actor="key:1", number=number, empty="")
    audit.record(store, "b", "quota_set")
    now = time.time()
    found = audit.entries(store, "a", since=now - 60, before=now + 60)
    assert [entry.details for entry in found] == [{"actor": "key:1", "number": str(n)} for n in range(3)]
    assert audit.entries(store, "a", since=now + 60, before=now + 90) == []
    assert audit.entries(store, "a", since=0, before=now + 9, kind="organizations") == []
    assert [entry.event for entry in audit.entries(store, "b", since=0, before=now + 9)] == ["quota_set"]


def test_the_log_is_bounded_and_a_detail_is_cut(store, monkeypatch):
    monkeypatch.setattr(audit, "MOST_ENTRIES", 50)
    for number in range(400):
        audit.record(store, "a", "quota_set", text="x" * 9999, number=number)
    found = audit.entries(store, "a", since=0, before=time.time() + 9)
    assert len(found) < 200 and found[-1].details["number"] == "399"
    assert max(len(entry.details["text"]) for entry in found) == 256


def test_a_key_that_is_refused_again_and_again_is_noted_once_an_hour(store):
    for _ in range(5):
        audit.record_refusal(store, "a", "expired", key_id="k1")
        audit.record_refusal(store, "", "unknown", address="10.0.0.1")
    audit.record_refusal(store, "a", "expired", key_id="k2")
    now = time.time() + 9
    assert [entry.details["key_id"] for entry in audit.entries(store, "a", since=0, before=now)] == ["k1", "k2"]
    (unknown,) = audit.entries(store, "", since=0, before=now)
    assert (unknown.event, unknown.details) == ("login_refused", {"reason": "unknown", "address": "10.0.0.1"})
