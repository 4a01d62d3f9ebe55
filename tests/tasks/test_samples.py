from __future__ import annotations

import pytest

from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest, KeyReused, NotFound, StaleOwner
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import Sample

TENANT, BASE = "local", "tiny/base"
SLUG = keys.slug(BASE)


def message(*prompt: int, seed: int | None = 1) -> Sample:
    return Sample(adapter_dir="", prompt=prompt or (1, 2, 3), num_samples=2, max_tokens=4, seed=seed)


@pytest.fixture
def sampler(registry, session_id):
    return registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model=BASE, slug=SLUG)


@pytest.fixture
def new_sampler(registry):
    def create(tenant: str):
        session_id = registry.create_session(tenant).session_id
        return registry.create_sampler(tenant, session_id=session_id, seq=0, base_model=BASE, slug=SLUG)

    return create


@pytest.fixture
def lease(new_lease):
    return new_lease("s1", "sampler")


def ids(jobs) -> list[str]:
    return [job.request_id.rpartition(":")[2] for job in jobs]


def test_a_request_is_taken_once_and_finished_once(journal, sampler, lease, futures):
    promise = journal.submit_sample(TENANT, sampler, 0, message())
    assert promise.request_id == f"{sampler.sampler_id}:0"
    (job,) = journal.take_samples(SLUG, lease, limit=8)
    assert (job.tenant, job.request_id) == (TENANT, promise.request_id)
    assert job.message == message()
    assert journal.take_samples(SLUG, lease, limit=8) == []
    journal.commit_sample(lease, job, Outcome(result=b"\x01", content_type="application/x-protobuf"))
    future = futures.get(TENANT, promise.request_id)
    assert (future.state, future.result, future.content_type) == ("done", b"\x01", "application/x-protobuf")
    with pytest.raises(StaleOwner):
        journal.commit_sample(lease, job, Outcome(result=b"\x02" * 5000))
    assert futures.get(TENANT, promise.request_id).result == b"\x01"
    assert journal.depth(SLUG)["sample"] == {}


def test_keys_beyond_doubles_are_different_keys(journal, sampler, lease):
    near = (432543029000000001, 432543029000000002)
    for seq in near:
        journal.submit_sample(TENANT, sampler, seq, message(seq % 10))
    jobs = journal.take_samples(SLUG, lease, limit=8)
    assert ids(jobs) == [str(seq) for seq in near]
    assert [job.message.prompt for job in jobs] == [(1,), (2,)]


def test_the_same_request_again_gets_the_same_promise_and_a_different_one_is_refused(journal, sampler, lease, store):
    first = journal.submit_sample(TENANT, sampler, 5, message(*range(2000), seed=None))
    assert journal.submit_sample(TENANT, sampler, 5, message(*range(2000), seed=None)) == first
    with pytest.raises(KeyReused):
        journal.submit_sample(TENANT, sampler, 5, message(9))
    (job,) = journal.take_samples(SLUG, lease, limit=8)
    assert job.message.seed is not None
    journal.commit_sample(lease, job, Outcome())
    assert journal.submit_sample(TENANT, sampler, 5, message(*range(2000), seed=None)) == first
    assert journal.take_samples(SLUG, lease, limit=8) == []
    assert [path for path in store.settings.data_dir.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("seq", [-1, 2**63])
def test_an_impossible_sequence_id_is_refused(journal, sampler, seq):
    with pytest.raises(InvalidRequest):
        journal.submit_sample(TENANT, sampler, seq, message())


def test_another_tenants_sampler_is_unknown(journal, sampler):
    with pytest.raises(NotFound):
        journal.submit_sample("other", sampler, 0, message())


def test_turns_go_round_the_tenants_whatever_each_has_waiting(journal, new_sampler, lease):
    samplers = {tenant: new_sampler(tenant) for tenant in ("a", "b", "c")}
    for seq in range(30):
        journal.submit_sample("a", samplers["a"], seq, message())
    assert [job.tenant for job in journal.take_samples(SLUG, lease, limit=3)] == ["a"] * 3
    for tenant in ("b", "c"):
        for seq in range(3):
            journal.submit_sample(tenant, samplers[tenant], seq, message())
    taken = [job for _ in range(3) for job in journal.take_samples(SLUG, lease, limit=3)]
    assert sorted(job.tenant for job in taken[:3]) == ["a", "b", "c"]
    assert sorted(job.tenant for job in taken) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert ids(job for job in taken if job.tenant == "b") == ["0", "1", "2"]


def test_a_tenant_that_comes_and_goes_gets_no_more_than_its_turn(journal, new_sampler, lease):
    busy, visitor = new_sampler("a"), new_sampler("b")
    for seq in range(20):
        journal.submit_sample("a", busy, seq, message())
    order = []
    for seq in range(6):
        journal.submit_sample("b", visitor, seq, message())
        order += [job.tenant for job in journal.take_samples(SLUG, lease, limit=2)]
    assert order.count("a") == order.count("b") == 6


def test_requests_of_a_dead_sampler_are_taken_by_another_in_their_old_order(journal, sampler, lease, new_lease, kill):
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    held = journal.take_samples(SLUG, lease, limit=2)
    other = new_lease("s2", "sampler")
    assert ids(journal.take_samples(SLUG, other, limit=1)) == ["2"]
    kill(lease)
    assert ids(journal.take_samples(SLUG, other, limit=9)) == ["0", "1"]
    with pytest.raises(StaleOwner):
        journal.commit_sample(lease, held[0], Outcome())
    assert journal.take_samples(SLUG, lease, limit=1) == []
    assert lease.lost


def test_a_sampler_that_leaves_gives_back_what_it_holds(journal, sampler, lease, new_lease):
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    first, *_ = journal.take_samples(SLUG, lease, limit=2)
    journal.commit_sample(lease, first, Outcome())
    assert journal.requeue_samples(lease) == 1
    assert ids(journal.take_samples(SLUG, new_lease("s2", "sampler"), limit=9)) == ["1", "2"]


def test_a_lost_answer_loses_no_request(journal, sampler, lease, store):
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    store.script("sample_take")(SLUG, lease.worker_id, lease.generation, 2, lease.call_number)
    assert ids(journal.take_samples(SLUG, lease, limit=2)) == ["0", "1"]
    assert ids(journal.take_samples(SLUG, lease, limit=2)) == ["2"]


def test_a_request_whose_file_is_lost_fails_alone(journal, sampler, lease, store, futures):
    journal.submit_sample(TENANT, sampler, 0, message(*range(2000)))
    (path,) = [path for path in store.settings.data_dir.rglob("*") if path.is_file()]
    path.unlink()
    journal.submit_sample(TENANT, sampler, 1, message())
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["1"]
    assert futures.get(TENANT, f"{sampler.sampler_id}:0").category == "server"


def test_depth_and_age_hold_until_a_request_is_finished(journal, sampler, lease):
    journal.submit_sample(TENANT, sampler, 0, message())
    (job,) = journal.take_samples(SLUG, lease, limit=1)
    depth = journal.depth(SLUG)
    assert depth["sample"] == {TENANT: 1}
    assert depth["oldest_s"]["sample"] > 0
    journal.commit_sample(lease, job, Outcome(error="out of memory", category="server"))
    assert journal.depth(SLUG)["sample"] == {}
    assert journal.depth(SLUG)["oldest_s"]["sample"] == 0.0
