"""The engine thread on a real store, with a runner that counts in place of a model."""

import threading
import time

import pytest

from openrl.tasks import keys
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import DiskRefusal, OperationFailed
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import Sample
from openrl.tasks.ownership import Lease
from openrl.tasks.process import Streak
from openrl.tasks.quotas import Quotas
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage
from openrl.tasks.wire import codec
from openrl.workers.sampler.engine import SamplerEngine
from openrl.workers.sampler.requests import Finished, Limits, Result

SLUG = "tiny"
LIMITS = Limits(vocab_size=100, max_context=64, cache_tokens=64, eos_token_ids=(7,))


class Counter:
    """Counts `max_new` steps for each request; 13 in a prompt makes every step fail, one with 17 never ends."""

    def __init__(self, most_of_tenant=4):
        self.most_of_tenant = most_of_tenant
        self.left = {}
        self.gate = threading.Event()
        self.gate.set()
        self.most = 0
        self.foreseen = []

    @property
    def requests(self):
        return [request for request, _ in self.left.values()]

    def foresee(self, directory):
        self.foreseen.append(directory)

    def add(self, request):
        self.left[request.job.request_id] = [request, request.max_new]
        self.most = max(self.most, len(self.left))

    def step(self):
        self.gate.wait(10)
        if any(13 in request.prompt for request in self.requests):
            raise RuntimeError("secret detail")
        for entry in self.left.values():
            entry[1] -= 17 not in entry[0].prompt
        ended = [request for request, left in self.left.values() if not left]
        for request in ended:
            del self.left[request.job.request_id]
        return [Finished(request=request, result=drawn(request)) for request in ended]

    def drop(self, requests):
        left = [self.left.pop(request.job.request_id) for request in list(requests)]
        return [900 if 17 in request.prompt else request.max_new - steps for request, steps in left]

    def tidy(self):
        pass

    def wake(self):
        pass


def drawn(request):
    one = codec.SampledSequence(tokens=[1] * request.max_new, logprobs=[-1.0] * request.max_new, stop_reason="length")
    return Result(sequences=[one] * request.num_samples)


@pytest.fixture
def serve(store):
    """Start engines, each with its runner, that are stopped at the end."""
    running = []

    def begin(runner=None, name="sampler-1", journal=None, **options):
        def new_lease():
            return Lease(store, name, kind="sampler", slug=SLUG)

        waiter = Waiter(store, worker_id=lambda: name)
        engine = SamplerEngine(
            runner or Counter(), journal or Journal(store), waiter,
            lease=new_lease(), new_lease=new_lease, slug=SLUG, limits=LIMITS, poll_s=0.05, stop_s=2.0, **options,
        )  # fmt: skip
        engine.start()
        running.append(engine)
        return engine

    yield begin
    for engine in running:
        engine.release_waiters()
        engine.stop()


@pytest.fixture
def submit(store):
    """Submit samples of a tenant; returns their request ids."""
    samplers, numbers = {}, iter(range(1000))

    def send(tenant="local", **fields):
        if tenant not in samplers:
            session = Registry(store).create_session(tenant)
            samplers[tenant] = Registry(store).create_sampler(
                tenant, session_id=session.session_id, seq=0, base_model="Tiny", slug=SLUG
            )
        message = Sample(**({"adapter_dir": "", "prompt": (1, 2), "num_samples": 1, "max_tokens": 3} | fields))
        return Journal(store).submit_sample(tenant, samplers[tenant], next(numbers), message).request_id

    return send


def test_an_engine_whose_every_turn_fails_ends_its_process(store, serve):
    left = threading.Event()
    serve(streak=Streak(lambda status: left.set() if status else None), journal=Broken(store))
    assert left.wait(30)


class Broken(Journal):
    """A journal whose program is at fault."""

    def take_samples(self, *_args, **_options):
        raise TypeError("no such argument")


def shown(store):
    return store.redis.hgetall(keys.worker("sampler-1"))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it doesn't happen"
        time.sleep(0.01)


def ended(store, request_id, tenant="local"):
    deadline = time.monotonic() + 60
    while (future := Futures(store).get(tenant, request_id)).state == "pending":
        assert time.monotonic() < deadline, "the sample doesn't end"
        time.sleep(0.01)
    return future


def test_a_submitted_sample_is_drawn_and_its_result_is_protobuf(store, serve, submit):
    serve()
    future = ended(store, submit(num_samples=2, max_tokens=5))
    assert (future.state, future.content_type) == ("done", "application/x-protobuf")
    sequences = codec.sample_response_to_json(future.result)["sequences"]
    assert [one["tokens"] for one in sequences] == [[1] * 5] * 2


def test_a_shorter_sample_is_committed_before_a_longer_one_ends(store, serve, submit):
    runner = Counter()
    runner.gate.clear()
    serve(runner)
    long, short = submit(max_tokens=50), submit(max_tokens=2)
    wait_until(lambda: len(runner.left) == 2)
    runner.gate.set()
    assert ended(store, short).finished <= ended(store, long).finished


def test_no_more_of_a_tenant_are_taken_than_may_be_and_all_of_them_are_served(store, serve, submit):
    requests = [submit() for _ in range(20)]
    runner = Counter(most_of_tenant=3)
    serve(runner)
    assert {ended(store, request_id).state for request_id in requests} == {"done"}
    assert runner.most == 3


def test_a_newcomer_comes_in_however_many_another_tenant_has(store, serve, submit):
    runner = Counter(most_of_tenant=3)
    serve(runner)
    for _ in range(20):
        submit("a", prompt=(17,))
    wait_until(lambda: len(runner.left) == 3)
    assert ended(store, submit("b", max_tokens=2), "b").state == "done"


def test_a_sample_that_cannot_be_run_fails_as_the_users_fault_and_others_go_on(store, serve, submit):
    serve()
    bad, good = submit(prompt=(500,)), submit()
    future = ended(store, bad)
    assert (future.state, future.category) == ("failed", "user") and "vocabulary" in future.error
    assert ended(store, good).state == "done"


def test_a_cancelled_sample_leaves_the_running_batch_and_makes_room_for_others(store, serve, submit):
    runner = Counter(most_of_tenant=2)
    engine = serve(runner)
    endless = [submit(prompt=(17,)) for _ in range(2)]
    wait_until(lambda: len(runner.left) == 2)
    waiting = submit()
    assert Cancelling(store).cancel("local", endless[0]) == "cancelled"
    engine.let_go()
    assert ended(store, waiting).state == "done"
    assert list(runner.left) == endless[1:]
    assert ended(store, endless[0]).error == "cancelled by its client"


def test_what_a_cancelled_sample_has_drawn_counts_against_the_tokens_of_its_tenant(store, serve, submit):
    Quotas(store).set("local", {"tokens_per_minute": 60})
    runner = Counter()
    serve(runner)
    endless = submit(prompt=(17, 17))
    wait_until(lambda: runner.left)
    Cancelling(store).cancel("local", endless)
    wait_until(lambda: not runner.left)
    wait_until(lambda: Quotas(store).standing("local").use.tokens_per_minute > 100)


def test_a_cancelled_sample_is_dropped_also_when_nobody_tells_the_sampler(store, serve, submit):
    runner = Counter()
    serve(runner)
    endless = submit(prompt=(17,))
    wait_until(lambda: runner.left)
    Cancelling(store).cancel("local", endless)
    wait_until(lambda: not runner.left)


def test_a_broken_step_fails_its_batch_with_an_error_id_and_the_engine_goes_on(store, serve, submit, caplog):
    serve()
    future = ended(store, submit(prompt=(13,)))
    assert (future.state, future.category) == ("failed", "server")
    assert "secret detail" not in future.error
    error_id = future.error.split("error ")[1][:8]
    assert error_id in caplog.text and "secret detail" in caplog.text
    assert ended(store, submit()).state == "done"


def test_stop_gives_unfinished_samples_back_within_its_bound_and_another_sampler_draws_them(store, serve, submit):
    stuck = Counter()
    stuck.gate.clear()
    first = serve(stuck)
    request_id = submit(max_tokens=4)
    wait_until(lambda: stuck.left)
    started = time.monotonic()
    first.stop()
    assert time.monotonic() - started < 5
    serve(name="sampler-2")
    assert ended(store, request_id).state == "done"
    stuck.gate.set()


def test_a_lost_lease_drops_everything_and_a_new_one_draws_it_again(store, serve, submit):
    runner = Counter()
    runner.gate.clear()
    engine = serve(runner)
    request_id = submit(max_tokens=4)
    wait_until(lambda: runner.left)
    before = engine.lease
    before.mark_lost()
    runner.gate.set()
    assert ended(store, request_id).state == "done"
    assert engine.lease is not before and engine.lease.generation != before.generation


def test_waiting_for_a_failed_sample_raises_its_error(store, serve, submit):
    engine = serve()
    with pytest.raises(OperationFailed, match="vocabulary"):
        engine.wait_for("local", submit(prompt=(500,)))


def test_the_worker_shows_as_busy_while_it_draws_and_ready_when_not(store, serve, submit):
    runner = Counter()
    runner.gate.clear()
    serve(runner)
    request_id = submit()
    wait_until(lambda: shown(store)[b"state"] == b"busy")
    runner.gate.set()
    ended(store, request_id)
    wait_until(lambda: shown(store)[b"state"] == b"ready")


def test_a_result_that_the_store_can_not_take_keeps_no_other_from_being_answered(store, serve, submit):
    bad, good = submit(), submit()
    store.redis.delete(keys.future("local", bad))
    store.redis.set(keys.future("local", bad), "not what a promise is kept in")
    serve()
    assert ended(store, good).state == "done"
    assert store.redis.get(keys.future("local", bad)) == b"not what a promise is kept in"


def test_a_result_that_a_full_disk_has_no_room_for_waits_and_holds_up_no_other(store, serve, submit, monkeypatch):
    bad, good, later = submit(), submit(), submit(max_tokens=9)
    full, whole = threading.Event(), Journal._ended_sample
    full.set()

    def refused(self, lease, tenant, request_id, outcome):
        if request_id == bad and full.is_set():
            raise DiskRefusal("the service's disk is full")
        return whole(self, lease, tenant, request_id, outcome)

    monkeypatch.setattr(Journal, "_ended_sample", refused)
    serve()
    assert {ended(store, one).state for one in (good, later, submit())} == {"done"}
    assert Futures(store).get("local", bad).state == "pending"
    full.clear()
    assert ended(store, bad).state == "done"


def test_what_ends_in_one_step_is_committed_in_one_trip_even_to_a_store_that_forgot_the_scripts(
    store, serve, submit, monkeypatch
):
    trips, scripts = [], Store.scripts
    monkeypatch.setattr(Store, "scripts", lambda self, calls: trips.append(len(calls)) or scripts(self, calls))
    runner = Counter()
    runner.gate.clear()
    asked = [submit() for _ in range(3)]
    serve(runner)
    wait_until(lambda: len(runner.left) == 3)
    store.redis.script_flush()
    runner.gate.set()
    assert {ended(store, one).state for one in asked} == {"done"}
    assert [number for number in trips if number] == [3]


def test_what_a_sample_used_is_counted_as_it_was_measured(store, serve, submit):
    serve()
    done = submit(prompt=(1, 2, 3), num_samples=2, max_tokens=5)
    ended(store, done)
    used = {row.name: row for row in Usage(store).between("local", time.time() - 7200, time.time() + 3600)}
    assert (used["prompt_tokens"].amount, used["sampled_tokens"].amount, used["samples"].amount) == (3, 10, 1)
    assert used["microseconds"].amount > 0
    assert used["samples"].session_id == done.partition(":")[0]


def test_a_new_version_is_told_to_the_runner_while_nothing_is_asked_for(serve):
    engine = serve(runner := Counter())
    engine.hear_version("t/r/@1.1")
    wait_until(lambda: runner.foreseen == ["t/r/@1.1"])
