"""Runs that leave the device and come back are, to the bit, those that never moved."""

import weakref
from pathlib import Path

import pytest

from openrl.tasks.journal import Outcome
from openrl.tasks.messages import OptimStep, SaveWeights
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.residency import Residency, state_bytes
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.vectors import ALIGNMENT
from openrl.workers.trainer.work import Work
from tests.trainer.bench import Bench, forward_backward
from tests.trainer.service import Service
from tests.trainer.test_device import bits, result

RANKS = (1, 2, 3, 5, 8, 13, 32, 64)


def housed(loaded, data_dir: Path, residency: Residency) -> Bench:
    bench = Bench(loaded, data_dir)
    bench.device = Device(loaded, bench.checkpoints, token_budget=96, residency=residency)
    return bench


@pytest.fixture
def small(loaded, tmp_path: Path) -> Bench:
    """A device with room for two runs."""
    return housed(loaded, tmp_path, Residency(loaded.device, most_runs=2))


def trained(bench: Bench, num: int, *, together: int) -> list[Run]:
    """Let `num` runs of all ranks train in turns, `together` of them in a pass, with gradients pending meanwhile."""
    runs = [bench.run(n, rank=RANKS[n % len(RANKS)], seed=n, train_unembed=bool(n % 3)) for n in range(num)]
    for turn in range(2):
        for first in range(0, num, together):
            pairs = [(run, forward_backward(lengths=[3, 6], seed=turn)) for run in runs[first : first + together]]
            for outcome in bench.all(*pairs):
                result(outcome)
        for run in runs[turn::2]:
            assert bench.one(run, OptimStep(learning_rate=0.01, grad_clip_norm=1.0)).error is None
    return runs


def test_a_hundred_runs_with_eight_on_the_device_end_with_the_bits_of_those_that_never_moved(loaded, tmp_path):
    residency = Residency(loaded.device, most_runs=8)
    moved = trained(housed(loaded, tmp_path, residency), 100, together=8)
    assert len(residency) == 8 and residency.parked == 92 and residency.moves > 400
    stayed = trained(Bench(loaded, tmp_path), 100, together=8)
    assert any(run.gradient for run in moved) and any(run.moments.step for run in moved)
    for run, other in zip(moved, stayed, strict=True):
        assert bits(run) == bits(other)


def test_the_least_recently_used_run_gives_way_and_what_it_had_on_the_device_is_free(small):
    first, second, third = (small.run(n, seed=n) for n in range(3))
    residency = small.device.residency
    assert [run in residency for run in (first, second, third)] == [False, True, True]
    small.one(second, forward_backward())
    small.one(second, OptimStep())
    small.one(second, forward_backward())
    held = [weakref.ref(tensor) for group in second.tensors() for tensor in group]
    before = bits(second)
    small.one(third, forward_backward())
    small.one(first, forward_backward())
    assert [run in residency for run in (first, second, third)] == [True, False, True]
    assert len(held) == 4 * len(second.weights().parameters()) and not any(ref() for ref in held)
    assert bits(second) == before and second.gradient is not None


def test_a_run_that_came_back_lies_as_torch_would_have_laid_it(small):
    runs = [small.run(n, seed=n, rank=3) for n in range(3)]
    small.one(runs[0], forward_backward())
    assert runs[0] in small.device.residency
    for group in runs[0].tensors():
        assert all(tensor.data_ptr() % 64 == 0 for tensor in group)
        assert all(tensor.storage_offset() % ALIGNMENT == 0 for tensor in group)
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in runs[0].weights().parameters())


def test_a_parked_run_is_saved_and_voided_where_it_lies(small):
    parked = small.run(0, seed=0)
    small.one(parked, forward_backward())
    small.run(1), small.run(2)
    residency = small.device.residency
    moves = residency.moves
    assert small.one(parked, SaveWeights(name="here")).error is None
    parked.make_void(7, "lost")
    assert parked not in residency and residency.moves == moves
    step = small.one(parked, OptimStep())
    assert "operation 7" in step.error and parked in residency


def test_a_run_that_is_dropped_leaves_its_place_to_others(small):
    runs = [small.run(n, seed=n) for n in range(3)]
    residency = small.device.residency
    assert (len(residency), residency.parked) == (2, 1)
    runs.clear()
    assert (len(residency), residency.parked) == (0, 0)


def test_a_bound_in_bytes_counts_a_run_with_its_moments_and_gradient(loaded, tmp_path):
    one = sum(tensor.nbytes for tensor in Bench(loaded, tmp_path).run(0).weights().parameters())
    residency = Residency(loaded.device, most_bytes=4 * 3 * one)
    bench = housed(loaded, tmp_path, residency)
    trained(bench, 1, together=1)
    kept = [bench.run(10 + n, seed=n) for n in range(4)]
    assert (len(residency), residency.parked) == (3, 1) and kept[0] not in residency


def test_through_the_journal_more_runs_than_places_answer_as_those_with_places_for_all(service: Service):
    def answers(**settings: float) -> list[dict]:
        clients = [service.client(seed=n, rank=2 + n) for n in range(5)]
        trainer = service.trainer(runs_per_pass=2, **settings)
        last = []
        for turn in range(2):
            for client in clients:
                client.submit(forward_backward(lengths=[5], seed=turn))
                last.append((client, client.submit(OptimStep(learning_rate=0.01))))
            trainer.spin()
        assert trainer.device.residency.parked == (3 if settings else 0)
        assert len({client.states() for client in clients}) == 1
        trainer.die()
        return [client.answer(seq)["metrics"] for client, seq in last]

    assert answers(device_runs=2) == answers()


def test_through_the_journal_no_pass_holds_more_than_the_device_and_every_answer_is_the_same(service: Service):
    def answers(**settings: float) -> tuple[list[dict], list[int], int]:
        clients = [service.client(seed=n, rank=2 + n) for n in range(4)]
        trainer, held = service.trainer(token_budget=1000, **settings), []
        trainer.spin()
        execute = trainer.device.execute

        def weighed(works: list[Work]) -> list[Outcome]:
            held.append(sum(state_bytes(run.trained) for run in {work.run for work in works}))
            outcomes = execute(works)
            on_device = [run for run in trainer.engine._residents if run in trainer.device.residency]
            assert sum(state_bytes(run.trained) for run in on_device) <= settings.get("device_bytes", 0)
            return outcomes

        trainer.device.execute = weighed
        for client in clients:
            client.submit(forward_backward(lengths=[5]))
            client.submit(OptimStep(learning_rate=0.01))
        trainer.spin()
        assert [client.states() for client in clients] == ["ddd"] * 4
        metrics = [client.answer(2)["metrics"] for client in clients]
        sizes = [state_bytes(trainer.resident(client).trained) for client in clients]
        trainer.die()
        return metrics, held, sum(sizes[1:3])

    free, held, room = answers()
    bounded, cut, _ = answers(device_bytes=room)
    assert free == bounded
    assert max(held) > room >= max(cut) > 0 and len(cut) > len(held)


def test_a_run_that_has_no_room_by_itself_is_refused_when_it_is_created_and_one_that_has_is_not(service: Service):
    small, large = service.client(rank=2), service.client(rank=8)
    probe = service.trainer()
    probe.spin()
    room = state_bytes(probe.resident(large).trained) - 1
    probe.die()
    trainer, refused, taken = service.trainer(device_bytes=room), service.client(rank=8), service.client(rank=2)
    refused.submit(forward_backward(lengths=[5]))
    taken.submit(forward_backward(lengths=[5]))
    trainer.spin()
    assert (refused.states(), taken.states(), small.states()) == ("ff", "dd", "d")
    error = refused.future(0)
    assert error.category == "user" and f"takes {room + 1} bytes on the device" in error.error
    assert f"has {room} for its runs" in error.error and "OPENRL_TRAINER_DEVICE_BYTES" in error.error


def test_a_word_that_is_no_choice_is_refused_by_name():
    settings = TrainerSettings.from_env({"OPENRL_TRAINER_GRADIENT_CHECKPOINTING": "on"})
    assert settings.gradient_checkpointing == "on"
    with pytest.raises(ValueError, match="OPENRL_TRAINER_GRADIENT_CHECKPOINTING must be one of auto, on, off"):
        TrainerSettings.from_env({"OPENRL_TRAINER_GRADIENT_CHECKPOINTING": "yes"})
