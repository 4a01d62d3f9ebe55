"""Workers that share an accelerator: real trainers and samplers come and go with the same bits, and never meet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from openrl.tasks import sampling as sampling_tasks
from openrl.tasks import training, turn_events, worker
from openrl.tasks.accelerator import AcceleratorTask
from openrl.tasks.celery import celery
from openrl.tasks.messages import OptimStep, SaveWeights
from openrl.tasks.store import Store
from openrl.timeslice.errors import Broken, NotGranted
from openrl.timeslice.seat import Seat
from openrl.timeslice.standing import standing
from openrl.timeslice.turn import Sharing, Turns
from openrl.workers.model.accelerator import Accelerator, SharedAccelerator
from openrl.workers.model.arena import Arena
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.model.parking import Parking, owned
from openrl.workers.model.settings import AcceleratorSettings, book_path
from openrl.workers.sampler.pools import PoolsParking
from openrl.workers.trainer import vectors
from tests.sampler.test_torch_engine import engine, request, run
from tests.timeslice.world import holder
from tests.tiny import make_tiny_model
from tests.trainer.bench import Bench, forward_backward, told

MB = 1 << 20
GPU = "gpu-0"
OPERATIONS = (training, sampling_tasks)
"""What Celery knows by being imported."""
STEP = OptimStep(learning_rate=1e-3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def share(store: Store) -> Iterator[Callable[..., SharedAccelerator]]:
    """Return what gives one owner its accelerator; turns are cut short."""
    given: list[SharedAccelerator] = []

    def new(owner: str, *, size_bytes: int = 64 * MB, **options: object) -> SharedAccelerator:
        settings = AcceleratorSettings(name=GPU, size_bytes=size_bytes)
        turns = Turns(store.redis, Sharing(floor_s=1e-6, multiple=0))
        # The process of the tests leads no session; in each worker's own these would be processes.
        seat = partial(Seat, holder=holder(len(given) + 1))
        given.append(SharedAccelerator(store, settings, owner=owner, turns=turns, seat=seat, **options))
        return given[-1]

    yield new
    list(turn_events.take())
    for one in given:
        one.close()


def bits(bench: Bench, state) -> list[bytes]:
    tensors = [tensor for group in state.tensors() for tensor in group]
    return [tensor.detach().numpy().tobytes() for tensor in (*bench.loaded.tensors(), *tensors)]


def trainer(path: Path, directory: Path) -> tuple[Bench, list]:
    """Return a trainer with a run in the midst of a step: adapter, moments and a pending gradient."""
    bench = Bench(load(path), directory)
    state = bench.run(seed=3)
    for message in (forward_backward(), STEP, forward_backward(seed=1)):
        assert bench.one(state, message).error is None
    return bench, [state]


def train(bench: Bench, state, steps: int, turn: Callable) -> list[dict]:
    results = []
    for step in range(steps):
        time.sleep(0.02)  # a client thinks: a step takes a few milliseconds, and who asks at once again keeps its turn
        with turn():
            outcomes = [bench.one(state, forward_backward(seed=step)), bench.one(state, STEP)]
        assert not any(outcome.error for outcome in outcomes)
        results += [told(outcome.result) for outcome in outcomes]
    return results


def test_without_the_variable_there_are_no_turns_and_the_store_hears_nothing(store: Store):
    before = store.redis.dbsize()
    alone = Accelerator.of(store, AcceleratorSettings.from_env({}), owner="a")
    with alone.turn(), alone.turn():
        alone.hold(lambda: [torch.ones(2)])
    alone.close()
    assert (alone.shared, store.redis.dbsize()) == (False, before)


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        ({"OPENRL_ACCELERATOR": "a b"}, "OPENRL_ACCELERATOR"),
        ({"OPENRL_ACCELERATOR_BYTES": "-1"}, "OPENRL_ACCELERATOR_BYTES"),
        ({"OPENRL_ACCELERATOR_BYTES": "1e9"}, "OPENRL_ACCELERATOR_BYTES"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(environ: dict[str, str], names: str):
    with pytest.raises(ValueError, match=names):
        AcceleratorSettings.from_env(environ)


def test_two_trainers_in_turns_learn_what_each_learns_alone_and_never_lie_there_together(share, path, tmp_path, store):
    expected = []
    for number in range(2):
        bench, [state] = trainer(path, tmp_path / f"alone-{number}")
        expected.append((train(bench, state, 6, Accelerator().turn), bits(bench, state)))
    size = sum(map(len, expected[0][1]))
    found: dict[int, tuple] = {}
    both_are_there = threading.Barrier(2)  # or one is done before the other is loaded

    def work(number: int) -> None:
        # Room for one state and a half: two of them, even for a moment, would be an ArenaFull.
        accelerator = share(f"trainer-{number}", size_bytes=size + size // 2)
        with accelerator.turn():
            bench, states = trainer(path, tmp_path / f"shared-{number}")
            accelerator.hold(bench.loaded.tensors)
            accelerator.hold(lambda: bench.device.residency.tensors(states))
        both_are_there.wait(60)
        results = train(bench, states[0], 6, accelerator.turn)
        with accelerator.turn():
            found[number] = (results, bits(bench, states[0]))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [found[number] for number in range(2)] == expected
    assert standing(Turns(store.redis), GPU).turns > 4
    assert len(Arena(book_path(store.settings.data_dir, GPU), size_bytes=size + size // 2).resident()) <= 1


def sampling(loaded: LoadedModel, arena: Arena, between: Callable[[Callable[[], None]], None]) -> list:
    """Draw several sequences, begun at different times; before each step `between` may park everything."""
    running = engine(loaded)
    arena.admit(owned([*loaded.tensors(), *running.adapters()]))
    pools = PoolsParking(running.pools, arena)
    parking = Parking(lambda: owned([*loaded.tensors(), *running.adapters()]), arena)

    def away_and_back() -> None:
        pools.park()
        parking.park()
        arena.leave()
        assert (pools.resident_bytes, parking.resident_bytes, arena.resident()) == (0, 0, {})
        parking.restore()
        pools.restore()

    # Loaded before, adapters are there in the step that asks for them: who is in a step decides the last bits.
    run(running, request(loaded, "first", max_tokens=1, seed=9, adapter_dir="1"))
    away_and_back()  # restored tensors are aligned as torch aligns them, which loaded ones needn't be
    requests = [
        request(loaded, f"r{n}", num_samples=2, max_tokens=9 + n, seed=n, adapter_dir=str(n % 2 or ""))
        for n in range(3)
    ]
    ended = {}
    for number in range(60):
        if number < len(requests):
            running.add(requests[number])
        between(away_and_back)
        for one in running.step():
            ended[one.request.job.request_id] = one.result.sequences
    return [ended[f"r{n}"] for n in range(3)]


def test_sequences_that_are_parked_at_every_step_go_on_with_the_same_bits(path: Path, tmp_path: Path):
    alone = sampling(load(path), Arena(tmp_path / "one", size_bytes=64 * MB), lambda park: None)
    assert sampling(load(path), Arena(tmp_path / "other", size_bytes=64 * MB), lambda park: park()) == alone


@pytest.mark.parametrize("parked", [False, True])
def test_a_request_that_is_dropped_while_it_is_parked_leaves_the_others_as_they_are(path: Path, parked: bool):
    loaded = load(path)
    kept, dropped = (request(loaded, name, max_tokens=20, seed=4 + n) for n, name in enumerate(("kept", "dropped")))
    running = engine(loaded)
    running.add(kept)
    running.add(dropped)
    for _ in range(3):
        running.step()
    assert running.requests == [kept, dropped]
    if parked:
        running.pools.park()
    running.drop([dropped])
    if parked:
        running.pools.restore()
    [drawn] = run(running)["kept"].result.sequences
    assert drawn.tokens == run(engine(loaded), kept)["kept"].result.sequences[0].tokens


def test_turns_are_told_to_celery_in_order(share):
    list(turn_events.take())
    first, second = share("a"), share("b")
    held = [torch.ones(1000)]
    with first.turn():
        first.hold(lambda: held)
    with second.turn():
        pass
    told = [(name, fields["owner"]) for name, fields in turn_events.take()]
    assert [name for name, owner in told if owner == "a"] == [
        "accelerator-granted", "accelerator-restored", "accelerator-parked",
    ]  # fmt: skip
    assert [name for name, owner in told if owner == "b"] == ["accelerator-granted", "accelerator-restored"]


def test_what_was_told_leaves_with_the_next_batch_of_celerys_events(share):
    list(turn_events.take())
    sent: list[tuple[str, str]] = []
    dispatcher = SimpleNamespace(
        send=lambda name, **fields: sent.append((name, fields["accelerator"])), flush=lambda: sent.append(("flush", ""))
    )
    with share("a").turn():
        pass
    for _ in range(2):
        worker._EventsTogether(None).flush(SimpleNamespace(event_dispatcher=dispatcher))
    told = [("accelerator-granted", GPU), ("accelerator-restored", GPU)]
    assert sent == [*told, ("flush", ""), ("flush", "")]


def test_every_operation_is_a_task_that_may_need_a_turn():
    operations = {name: task for name, task in celery.tasks.items() if name.startswith(("trainer.", "sampler."))}
    others = {name for name, task in operations.items() if not isinstance(task, AcceleratorTask)}
    assert others == {"trainer.notice", "sampler.notice"} and len(operations) > 8


def test_who_can_not_come_back_leaves_and_hands_nothing_on(share, store: Store):
    left = []
    first, second = share("a", size_bytes=5000, leave=lambda: left.append("a")), share("b", size_bytes=5000)
    held = [torch.ones(1000)]
    with first.turn():
        first.hold(lambda: held)
    with second.turn():
        pass
    stranger = Arena(book_path(store.settings.data_dir, GPU), size_bytes=5000)
    stranger.admit([torch.ones(1000)])
    with pytest.raises(Broken, match="don't fit"), first.turn():
        pass
    assert left == ["a"]
    with pytest.raises(NotGranted), second.turn(patience_s=0.2):
        pass
    assert standing(Turns(store.redis), GPU).present.state == "failed"


def test_who_waits_and_is_asked_to_stop_waits_no_longer(share):
    first, second = share("a"), share("b")
    stopping = threading.Event()
    with first.turn():
        threading.Timer(0.1, stopping.set).start()
        with pytest.raises(NotGranted), second.turn(gives_up=stopping.is_set):
            pass


@pytest.mark.parametrize("looks", ["nobody", "a save", "numpy"])
def test_a_run_trains_on_after_its_memory_was_moved_as_if_it_had_not_been(tmp_path, path, looks):
    """Whoever lets numpy see a tensor has its memory replaced when it is parked, and the run's vectors with it."""
    (moved_bench, [moved]), (bench, [state]) = (trainer(path, tmp_path / name) for name in "ab")
    arena = Arena(tmp_path / "arena", size_bytes=64 * MB)
    parking = Parking(lambda: owned(moved_bench.device.residency.tensors([moved])), arena)
    for number in range(3):
        if looks == "numpy":
            assert all(tensor.detach().numpy() is not None for group in moved.tensors() for tensor in group)
        elif looks == "a save":
            assert moved_bench.one(moved, SaveWeights(name=f"w{number}")).error is None
        parking.park()
        arena.leave()
        parking.restore()
        assert train(moved_bench, moved, 1, Accelerator().turn) == train(bench, state, 1, Accelerator().turn)
        pairs = zip(moved.tensors(), state.tensors(), strict=True)
        assert all(torch.equal(a, b) for mine, other in pairs for a, b in zip(mine, other, strict=True))
        assert torch.equal(vectors.vector_of(moved.parameters()), vectors.vector_of(list(moved.weights().parameters())))


def test_saving_a_run_leaves_its_memory_releasable(tmp_path, path):
    bench, [state] = trainer(path, tmp_path)
    assert bench.one(state, SaveWeights(name="w")).error is None
    assert all(tensor.untyped_storage().resizable() for tensor in bench.device.residency.tensors([state]))


def test_a_turn_in_a_turn_is_the_same_one(share):
    with (accelerator := share("a")).turn(), accelerator.turn():
        assert isinstance(accelerator._seat, Seat)


def cycles(path: Path, tmp_path: Path, count: int) -> None:
    bench, [state] = trainer(path, tmp_path)
    arena = Arena(tmp_path / "arena", size_bytes=64 * MB)
    parking = Parking(lambda: owned([*bench.loaded.tensors(), *bench.device.residency.tensors([state])]), arena)
    arena.admit(owned(bench.loaded.tensors()))
    for cycle in range(count):
        if cycle == count // 4:
            buffers, memory = parking.host_bytes, psutil.Process().memory_info().rss
        if cycle % 3 == 0:
            train(bench, state, 1, Accelerator().turn)
        before = bits(bench, state)
        parking.park()
        arena.leave()
        parking.restore()
        assert bits(bench, state) == before
    assert parking.host_bytes <= buffers * 1.5
    grown = (psutil.Process().memory_info().rss - memory) / sum(map(len, before))
    assert grown < count / 8, f"{grown:.1f} states more after {count} cycles"


def test_twenty_cycles_of_a_real_trainer_change_no_bit(path: Path, tmp_path: Path):
    cycles(path, tmp_path, 20)


@pytest.mark.full
def test_a_thousand_cycles_of_a_real_trainer_change_no_bit_and_take_no_more_memory(path: Path, tmp_path: Path):
    cycles(path, tmp_path, 1000)
