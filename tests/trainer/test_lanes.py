"""Micro-batches side by side: the same numbers, the same bits each time, and nobody's failure is another's."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from openrl.tasks.messages import OptimStep
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer.batch import Load, micro_batches
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.lanes import LANE_TOKENS, Lanes
from openrl.workers.trainer.runs import Run
from tests.plain import furthest
from tests.trainer.bench import Bench, forward_backward, make_data

CPU = torch.device("cpu")
RANKS = (1, 4, 8, 2)
WORK = [
    forward_backward("cross_entropy", [30, 7, 12], seed=1),
    forward_backward("ppo", [9, 41], seed=2),
    forward_backward("cross_entropy", [16, 3], seed=3, width=3),
    forward_backward("importance_sampling", [22, 5, 1], seed=4),
]
STEP = OptimStep(learning_rate=1e-2, eps=1e-3, grad_clip_norm=0.5)


def side_by_side(most: int) -> Lanes:
    return Lanes(CPU, most, lane_tokens=8, least_flops=0.0)


def trained(loaded: LoadedModel, folder: Path, lanes: Lanes, *, steps: int = 1) -> tuple[Bench, list[Run]]:
    bench = Bench(loaded, folder)
    bench.device = Device(loaded, bench.checkpoints, token_budget=96, lanes=lanes)
    runs = [bench.run(number, rank=rank, seed=number) for number, rank in enumerate(RANKS)]
    for _ in range(steps):
        outcomes = bench.all(*zip(runs, WORK, strict=True))
        assert [one.error for one in outcomes] == [None] * len(runs)
        outcomes = bench.all(*((run, STEP) for run in runs))
        assert [one.error for one in outcomes] == [None] * len(runs)
    return bench, runs


def weights(runs: list[Run]) -> list[list[Tensor]]:
    return [[tensor.detach().clone() for tensor in run.weights().parameters()] for run in runs]


def _named(run: Run) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in run.weights().named_parameters()}


def same_bits(one: list[list[Tensor]], other: list[list[Tensor]]) -> bool:
    return all(all(map(torch.equal, *pair)) for pair in zip(one, other, strict=True))


def test_what_lanes_compute_is_what_one_thread_does(loaded: LoadedModel, tmp_path: Path) -> None:
    _, alone = trained(loaded, tmp_path / "1", side_by_side(1))
    _, beside = trained(loaded, tmp_path / "3", side_by_side(3))
    for one, other in zip(alone, beside, strict=True):
        worst, name = furthest(*(_named(run) for run in (one, other)))
        assert worst < 1e-5, name


def test_the_same_work_gives_the_same_bits_in_lanes(loaded: LoadedModel, tmp_path: Path) -> None:
    _, first = trained(loaded, tmp_path / "a", side_by_side(2), steps=3)
    _, again = trained(loaded, tmp_path / "b", side_by_side(2), steps=3)
    assert same_bits(weights(first), weights(again))


def test_a_nan_in_one_lane_leaves_every_other_run_its_bits(loaded: LoadedModel, tmp_path: Path) -> None:
    bench, runs = trained(loaded, tmp_path / "well", side_by_side(2))
    ill, sick = trained(loaded, tmp_path / "ill", side_by_side(2))
    data = make_data("importance_sampling", [22, 5, 1], seed=4)
    data[0].inputs["advantages"][3] = np.nan
    poisoned = forward_backward("importance_sampling", [1])
    poisoned = type(poisoned)(data=data, loss_fn="importance_sampling", loss_fn_config={})
    bench.all(*zip(runs, WORK, strict=True))
    outcomes = ill.all(*zip(sick, [*WORK[:3], poisoned], strict=True))
    assert [bool(one.error) for one in outcomes] == [False, False, False, True]
    for run, other in zip(runs[:3], sick[:3], strict=True):
        assert run.gradient is not None and other.gradient is not None
        assert all(map(torch.equal, run.gradient, other.gradient))
    assert "data[0], position 3" in (outcomes[3].error or "")


def test_steps_beside_each_other_are_those_taken_in_turn(loaded: LoadedModel, tmp_path: Path) -> None:
    together, runs = trained(loaded, tmp_path / "a", side_by_side(2))
    in_turn, others = trained(loaded, tmp_path / "b", side_by_side(2))
    for bench, mine in ((together, runs), (in_turn, others)):
        bench.all(*zip(mine, WORK, strict=True))
    together.all(*((run, STEP) for run in runs))
    for run in others:
        in_turn.one(run, STEP)
    assert same_bits(weights(runs), weights(others))


def test_a_step_that_fails_fails_alone(loaded: LoadedModel, tmp_path: Path) -> None:
    bench, runs = trained(loaded, tmp_path, side_by_side(2))
    bench.all(*zip(runs[1:], WORK[1:], strict=True))
    outcomes = bench.all(*((run, STEP) for run in runs))
    assert [bool(one.error) for one in outcomes] == [True, False, False, False]
    assert "nothing was accumulated" in (outcomes[0].error or "")


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", [[64] * 32, [200, 7, 30, 90, 90, 13], [5], [1000, 1, 1, 1], list(range(1, 60))])
def test_side_by_side_have_the_budget_together_and_nothing_is_lost(lanes: int, lengths: list[int]) -> None:
    budget, longest = 256, max(lengths)
    load = Load(owner="a", data=make_data("cross_entropy", lengths))
    batches = list(micro_batches([load], token_budget=budget, device=CPU, side_by_side=lanes))
    assert sorted(length for batch in batches for length in batch.lengths) == sorted(lengths)
    assert all(sum(batch.lengths) <= budget // lanes or len(batch.lengths) == 1 for batch in batches)
    if longest <= budget // (4 * lanes) and sum(lengths) > budget and lanes > 1:  # an even cut is possible
        assert len(batches) % lanes == 0
        assert max(sum(batch.lengths) for batch in batches) <= sum(lengths) / len(batches) + longest


def test_a_failure_is_heard_when_all_lanes_have_ended() -> None:
    ended = []

    def work(item: int) -> int:
        if item == 0:
            raise ValueError("no")
        threading.Event().wait(0.05)
        ended.append(item)
        return item

    with pytest.raises(ValueError, match="no"):
        Lanes(CPU, 3).map(work, [0, 1, 2])
    assert sorted(ended) == [1, 2]


def test_small_work_takes_one_lane_and_a_gpu_has_one() -> None:
    assert Lanes(CPU, 8).number(4096, 1e3) == 1
    assert Lanes(CPU, 8).number(LANE_TOKENS - 1, 1e12) == Lanes(CPU, 8).number(2 * LANE_TOKENS - 1, 1e12) == 1
    assert Lanes(CPU, 8).number(2 * LANE_TOKENS, 1e12) == 2
    assert Lanes(torch.device("cuda")).number(10**6, 1e9) == 1
