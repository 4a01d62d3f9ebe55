from __future__ import annotations

import dataclasses

import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.errors import InvalidRequest, KeyReused, NotFound, Overloaded, StaleOwner, StoreUnavailable
from openrl.tasks.journal import Journal, Outcome
from openrl.tasks.messages import Sample
from openrl.tasks.store import Store

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


def test_of_a_tenant_so_many_are_taken_at_a_time_and_the_others_have_their_turns(journal, new_sampler, lease):
    samplers = {tenant: new_sampler(tenant) for tenant in ("a", "b", "c")}
    for seq in range(5):
        journal.submit_sample("a", samplers["a"], seq, message())
    first = journal.take_samples(SLUG, lease, limit=9, of_tenant=2)
    assert ids(first) == ["0", "1"]
    for tenant in ("b", "c"):
        for seq in range(3):
            journal.submit_sample(tenant, samplers[tenant], seq, message())
    second = journal.take_samples(SLUG, lease, limit=9, of_tenant=2)
    assert sorted(job.tenant for job in second) == ["b", "b", "c", "c"]
    assert journal.take_samples(SLUG, lease, limit=9, of_tenant=2) == []
    journal.commit_sample(lease, first[0], Outcome())
    assert [(job.tenant, *ids([job])) for job in journal.take_samples(SLUG, lease, limit=9, of_tenant=2)] == [
        ("a", "2")
    ]


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


def test_a_request_that_can_not_be_read_fails_alone(journal, sampler, lease, store, futures):
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    for seq, body in ((0, b"=\xff"), (1, b'={"adapter_dir": "", "no_such_field": 1}')):
        store.redis.hset(keys.job(TENANT, f"{sampler.sampler_id}:{seq}"), "body", body)
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["2"]
    for seq in (0, 1):
        future = futures.get(TENANT, f"{sampler.sampler_id}:{seq}")
        assert (future.state, future.category) == ("failed", "server") and "error id" in future.error
    assert journal.depth(SLUG)["sample"] == {TENANT: 1}


def test_a_store_that_goes_away_while_requests_are_read_loses_none(journal, sampler, lease, store, monkeypatch):
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message())
    store.redis.hset(keys.job(TENANT, f"{sampler.sampler_id}:0"), "body", b"=\xff")

    def away(*_args):
        raise StoreUnavailable("the store does not answer")

    with monkeypatch.context() as patched:
        patched.setitem(store._scripts, "sample_commit", away)
        with pytest.raises(StoreUnavailable):
            journal.take_samples(SLUG, lease, limit=9)
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["1"]


@pytest.fixture
def of_version(registry, session_id):
    """A sampler on a full run's version."""

    def create(number: int):
        return registry.create_sampler(
            TENANT, session_id=session_id, seq=number, base_model=BASE, slug=SLUG, adapter_dir=f"v{number}"
        )

    return create


@pytest.fixture
def taking(journal, new_lease):
    """Samplers that keep one version in memory each: takes what they do, and their leases."""

    class Taking:
        def __init__(self) -> None:
            self.leases = {name: new_lease(name, "sampler") for name in ("a", "b", "c")}

        def __call__(self, name: str, version: str, *, limit: int = 4, leaves_s: float = 3600.0) -> list[str]:
            jobs = journal.take_samples(
                SLUG, self.leases[name], limit=limit, of_tenant=limit, version=version, leaves_s=leaves_s
            )
            return [f"{job.request_id.rpartition(':')[2]} {job.request_id.split(':')[2]}" for job in jobs]

    return Taking()


def test_a_request_is_left_to_an_idle_sampler_that_has_its_version(journal, of_version, taking):
    first, second = of_version(0), of_version(1)
    assert taking("a", "v0") == taking("b", "v1") == []
    for seq in range(4):
        journal.submit_sample(TENANT, (first, second)[seq % 2], seq, message())
    assert taking("c", "") == []
    assert taking("b", "v1") == ["1 1", "3 1"]
    assert taking("a", "v0") == ["0 0", "2 0"]


def test_an_idle_sampler_takes_what_one_that_is_at_work_has_room_for(journal, of_version, taking):
    sampler = of_version(0)
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    assert taking("a", "v0", limit=2) == ["0 0", "1 0"]
    assert taking("b", "", limit=4) == ["2 0"]


def test_no_request_waits_for_a_sampler_that_is_full(journal, of_version, taking):
    first, second = of_version(0), of_version(1)
    assert taking("b", "v1", limit=2) == []
    journal.submit_sample(TENANT, first, 0, message())
    assert taking("a", "v0") == ["0 0"]  # at work from here on
    for seq in range(1, 5):
        journal.submit_sample(TENANT, second, seq, message())
    assert taking("a", "v0", limit=9) == ["3 1", "4 1"], "the other has room for two of the four"
    assert taking("b", "v1", limit=2) == ["1 1", "2 1"]
    journal.submit_sample(TENANT, second, 5, message())
    assert taking("a", "v0", limit=9) == ["5 1"]


def test_no_request_waits_long_for_a_sampler_that_does_not_take_it_or_at_all_for_one_that_is_gone(
    journal, of_version, taking, kill, store
):
    sampler = of_version(1)
    assert taking("b", "v1") == []
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message())
    store.redis.zadd(keys.waiting(TENANT, SLUG), {f"{sampler.sampler_id}:1": store.now() - 60})
    assert taking("a", "v0", leaves_s=30) == ["1 1"]
    kill(taking.leases["b"])
    assert taking("a", "v0", leaves_s=30) == ["0 1"]


def test_a_tenant_whose_requests_are_left_holds_nobody_up(journal, registry, of_version, taking):
    sampler = of_version(1)
    session_id = registry.create_session("other").session_id
    others = registry.create_sampler(
        "other", session_id=session_id, seq=0, base_model=BASE, slug=SLUG, adapter_dir="v0"
    )
    assert taking("b", "v1") == []
    journal.submit_sample(TENANT, sampler, 0, message())
    journal.submit_sample("other", others, 1, message())
    assert taking("a", "v0") == ["1 0"]
    assert taking("b", "v1") == ["0 1"]


def serve_until_it_kills(journal, new_lease, kill, guilty: str, limit: int) -> list[str]:
    """Samplers, one after the other, that die with everything in their hands once `guilty` is among it."""
    done: list[str] = []
    for number in range(20):
        lease = new_lease(f"killed-{number}", "sampler")
        while True:
            jobs = journal.take_samples(SLUG, lease, limit=limit)
            if guilty in ids(jobs):
                kill(lease)
                break
            if not jobs:
                return done
            for job in jobs:
                journal.commit_sample(lease, job, Outcome())
            done += ids(jobs)
    raise AssertionError("it killed them all")


def test_a_request_that_kills_three_samplers_fails_and_those_beside_it_are_drawn(
    journal, sampler, new_lease, kill, futures, store
):
    for seq in range(5):
        journal.submit_sample(TENANT, sampler, seq, message(*range(2000)))
    done = serve_until_it_kills(journal, new_lease, kill, guilty="2", limit=5)
    assert sorted(done) == ["0", "1", "3", "4"]
    future = futures.get(TENANT, f"{sampler.sampler_id}:2")
    assert (future.state, future.category) == ("failed", "server") and "died 3 times" in future.error
    assert journal.depth(SLUG)["sample"] == {}
    assert not store.redis.exists(keys.queued(TENANT))
    assert store.redis.zcard(keys.unfinished(SLUG)) == 0
    for member in store.redis.zrange(keys.FILES, 0, -1):
        store.redis.zadd(keys.FILES, {member: store.now() - 120})
    futures.sweep()
    assert [path for path in store.settings.data_dir.rglob("*") if path.is_file()] == []


def test_a_request_that_two_dead_samplers_held_is_in_nobodys_hands_beside_others(
    journal, sampler, new_lease, kill, lease
):
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message())
    for name in ("a", "b"):
        dying = new_lease(name, "sampler")
        assert ids(journal.take_samples(SLUG, dying, limit=2)) == ["0", "1"]
        kill(dying)
    journal.submit_sample(TENANT, sampler, 2, message())
    (first,) = journal.take_samples(SLUG, lease, limit=9)
    assert journal.take_samples(SLUG, lease, limit=9) == []
    journal.commit_sample(lease, first, Outcome())
    (second,) = journal.take_samples(SLUG, lease, limit=9)
    journal.commit_sample(lease, second, Outcome())
    assert ids([first, second]) == ["0", "1"]
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["2"]


def test_giving_back_in_order_is_no_death(journal, sampler, new_lease):
    journal.submit_sample(TENANT, sampler, 0, message())
    for number in range(5):
        leaving = new_lease(f"s{number}", "sampler")
        assert ids(journal.take_samples(SLUG, leaving, limit=1)) == ["0"]
        journal.requeue_samples(leaving)
        leaving.close()


def test_over_its_bytes_a_tenants_sample_is_refused_and_consumes_nothing(journal, sampler, lease, store, futures):
    small = Journal(Store(store.redis, dataclasses.replace(store.settings, tenant_bytes=1)))
    small.submit_sample(TENANT, sampler, 0, message())
    with pytest.raises(Overloaded):
        small.submit_sample(TENANT, sampler, 1, message(*range(2000)))
    assert [path for path in store.settings.data_dir.rglob("*") if path.is_file()] == []
    with pytest.raises(NotFound):
        futures.get(TENANT, f"{sampler.sampler_id}:1")
    (job,) = small.take_samples(SLUG, lease, limit=9)
    small.commit_sample(lease, job, Outcome())
    small.submit_sample(TENANT, sampler, 1, message(*range(2000)))


def test_depth_and_age_hold_until_a_request_is_finished(journal, sampler, lease):
    journal.submit_sample(TENANT, sampler, 0, message())
    (job,) = journal.take_samples(SLUG, lease, limit=1)
    depth = journal.depth(SLUG)
    assert depth["sample"] == {TENANT: 1}
    assert depth["oldest_s"]["sample"] > 0
    journal.commit_sample(lease, job, Outcome(error="out of memory", category="server"))
    assert journal.depth(SLUG)["sample"] == {}
    assert journal.depth(SLUG)["oldest_s"]["sample"] == 0.0


@pytest.fixture
def cancelling(store):
    return Cancelling(store)


def test_a_waiting_sample_that_is_cancelled_is_never_run_and_nothing_of_it_is_left(
    journal, sampler, lease, cancelling, futures, store
):
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message(*range(2000)))
    first = f"{sampler.sampler_id}:0"
    assert [cancelling.cancel(TENANT, first) for _ in range(2)] == ["cancelled", "finished"]
    future = futures.get(TENANT, first)
    assert (future.state, future.error, future.category) == ("failed", "cancelled by its client", "user")
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["1"]
    assert journal.depth(SLUG)["sample"] == {TENANT: 1}
    assert cancelling.cancel(TENANT, f"{sampler.sampler_id}:1") == "cancelled"
    assert journal.depth(SLUG) == {"train": {}, "sample": {}, "oldest_s": {"train": 0.0, "sample": 0.0}}
    assert not store.redis.exists(keys.queued(TENANT), keys.turns(SLUG), keys.waiting(TENANT, SLUG))
    assert [path for path in store.settings.data_dir.rglob("*") if path.is_file()] == []
    assert journal.submit_sample(TENANT, sampler, 0, message(*range(2000))).request_id == first
    assert journal.take_samples(SLUG, lease, limit=9) == []


def test_a_sample_cancelled_in_a_samplers_hands_ends_at_once_and_its_result_counts_for_nothing(
    journal, sampler, lease, cancelling, futures, store
):
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message())
    jobs = journal.take_samples(SLUG, lease, limit=9)
    assert journal.held_samples(lease) == {(TENANT, job.request_id) for job in jobs}
    with store.redis.pubsub() as heard:
        heard.subscribe(keys.wake(keys.cancelling("s1")))
        assert cancelling.cancel(TENANT, jobs[0].request_id) == "cancelled"
        heard.get_message(timeout=60)
        assert heard.get_message(timeout=60)["type"] == "message"
    assert journal.held_samples(lease) == {(TENANT, jobs[1].request_id)}
    with pytest.raises(StaleOwner):
        journal.commit_sample(lease, jobs[0], Outcome(result=b"\x01"))
    assert futures.get(TENANT, jobs[0].request_id).state == "failed"
    journal.commit_sample(lease, jobs[1], Outcome(result=b"\x01"))
    assert cancelling.cancel(TENANT, jobs[1].request_id) == "finished"
    assert futures.get(TENANT, jobs[1].request_id).state == "done"
    assert journal.depth(SLUG)["sample"] == {}


def test_a_call_that_is_repeated_brings_no_sample_back_that_was_cancelled_in_between(
    journal, sampler, lease, cancelling, store
):
    for seq in range(2):
        journal.submit_sample(TENANT, sampler, seq, message())
    store.script("sample_take")(SLUG, lease.worker_id, lease.generation, 9, lease.call_number)
    cancelling.cancel(TENANT, f"{sampler.sampler_id}:0")
    assert ids(journal.take_samples(SLUG, lease, limit=9)) == ["1"]


def test_a_sample_of_a_dead_sampler_can_be_cancelled_and_is_not_drawn_again(
    journal, sampler, lease, cancelling, new_lease, kill
):
    journal.submit_sample(TENANT, sampler, 0, message())
    journal.take_samples(SLUG, lease, limit=9)
    kill(lease)
    assert cancelling.cancel(TENANT, f"{sampler.sampler_id}:0") == "cancelled"
    assert journal.take_samples(SLUG, new_lease("s2", "sampler"), limit=9) == []
    assert journal.depth(SLUG)["sample"] == {}


def test_nobody_cancels_what_is_another_tenants_or_never_was(journal, sampler, cancelling, futures):
    request_id = journal.submit_sample(TENANT, sampler, 0, message()).request_id
    for tenant, name in (("other", request_id), (TENANT, f"{sampler.sampler_id}:1"), (TENANT, "nonsense")):
        with pytest.raises(NotFound):
            cancelling.cancel(tenant, name)
    assert futures.get(TENANT, request_id).state == "pending"


def test_with_its_session_all_unfinished_samples_end_and_no_others(
    journal, registry, sampler, new_sampler, lease, cancelling, futures
):
    beside = registry.create_sampler(
        TENANT, session_id=registry.create_session(TENANT).session_id, seq=0, base_model=BASE, slug=SLUG
    )
    others = [journal.submit_sample(TENANT, beside, 0, message())]
    others.append(journal.submit_sample("b", new_sampler("b"), 0, message()))
    for seq in range(3):
        journal.submit_sample(TENANT, sampler, seq, message())
    taken = journal.take_samples(SLUG, lease, limit=4)
    done = next(job for job in taken if job.request_id.startswith(sampler.session_id))
    journal.commit_sample(lease, done, Outcome())
    assert cancelling.cancel_samples(TENANT, sampler.session_id) == 2
    states = [futures.get(TENANT, f"{sampler.sampler_id}:{seq}").state for seq in range(3)]
    assert sorted(states) == ["done", "failed", "failed"]
    assert {futures.get(tenant, one.request_id).state for tenant, one in zip((TENANT, "b"), others, strict=True)} == {
        "pending"
    }
    assert cancelling.cancel_samples(TENANT, sampler.session_id) == 0
