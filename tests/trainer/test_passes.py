"""The policy of passes: order within a run, shares between tenants, no cost for a lone run."""

import itertools
import random
from dataclasses import replace

import pytest

from openrl.workers.trainer.passes import Pass, Pending, Planner, Queue, Room


def queue(run_id: str, *operations: tuple[str, int], tenant: str = "t", first: int = 1, state_bytes: int = 0) -> Queue:
    """Build a queue from (kind, tokens) pairs."""
    pending = tuple(
        Pending(kind=kind, seq_id=first + index, tokens=tokens) for index, (kind, tokens) in enumerate(operations)
    )
    return Queue(tenant=tenant, run_id=run_id, pending=pending, state_bytes=state_bytes)


def names(chosen) -> list[tuple[str, int]]:
    return [(item.run_id, item.seq_id) for item in chosen]


def test_nothing_pending_gives_an_empty_pass():
    assert Planner(token_budget=100).plan([]) == Pass()
    assert Planner(token_budget=100).plan([queue("a")]) == Pass()


def test_forwards_of_several_runs_share_a_pass_and_a_step_ends_a_runs_part():
    fb = ("forward_backward", 10)
    queues = [queue("a", fb, ("forward", 10), ("optim_step", 0), fb), queue("b", fb, ("optim_step", 0))]
    plan = Planner(token_budget=100).plan(queues)
    assert sorted(names(plan.packed)) == [("a", 1), ("a", 2), ("b", 1)]
    assert plan.singles == ()


def test_a_lone_run_gets_one_forward_at_a_time_whatever_has_arrived():
    fb = ("forward_backward", 10)
    few, many = queue("a", fb), queue("a", fb, fb, fb)
    assert names(Planner(token_budget=100).plan([few]).packed) == [("a", 1)]
    assert names(Planner(token_budget=100).plan([many]).packed) == [("a", 1)]


def test_leading_singles_of_a_run_go_back_to_back_and_stop_before_a_forward():
    queues = [queue("a", ("optim_step", 0), ("save_weights", 0), ("forward_backward", 10), ("optim_step", 0))]
    plan = Planner(token_budget=10_000).plan(queues)
    assert names(plan.singles) == [("a", 1), ("a", 2)]
    assert plan.packed == ()


def test_singles_of_one_run_and_forwards_of_another_are_in_one_pass():
    queues = [queue("a", ("optim_step", 0)), queue("b", ("forward_backward", 10))]
    plan = Planner(token_budget=10_000).plan(queues)
    assert names(plan.singles) == [("a", 1)]
    assert names(plan.packed) == [("b", 1)]


def test_steps_of_different_runs_are_committed_together_and_any_other_single_by_itself():
    step, save, fb = ("optim_step", 0), ("save_weights", 0), ("forward_backward", 10)
    queues = [queue("a", step, save), queue("b", step, step), queue("c", step), queue("d", save), queue("e", fb)]
    plan = Planner(token_budget=10_000).plan(queues)
    groups = plan.groups()
    assert [one for group in groups for one in group] == [*plan.singles, *plan.packed]
    assert groups[-1] == list(plan.packed) and names(plan.packed) == [("e", 1)]
    assert max(map(len, groups)) == 3
    for group in groups:
        assert len({one.run for one in group}) == len(group)
        assert len(group) == 1 or {one.kind for one in group} == {"optim_step"}


def test_an_operation_over_the_budget_runs_by_itself():
    plan = Planner(token_budget=100).plan([queue("a", ("forward", 5000)), queue("b", ("forward", 10))])
    assert len(plan.packed) == 1


def test_a_pass_stays_within_the_budget():
    queues = [queue(name, ("forward", 60)) for name in "abcd"]
    assert len(Planner(token_budget=130).plan(queues).packed) == 2


def drive(planner: Planner, queues: dict[str, Queue]) -> list[list[tuple[str, int]]]:
    """Plan until all is done; return the passes."""
    passes = []
    while any(item.pending for item in queues.values()):
        plan = planner.plan([item for item in queues.values() if item.pending])
        done = names(plan.singles) + names(plan.packed)
        assert done
        for run_id, seq_id in done:
            head, *rest = queues[run_id].pending
            assert head.seq_id == seq_id
            queues[run_id] = replace(queues[run_id], pending=tuple(rest))
        passes.append(done)
    return passes


def test_a_short_tenant_waits_at_most_one_pass_for_a_long_one():
    planner = Planner(token_budget=100)
    long = queue("long", *[("forward_backward", 1000)] * 20, tenant="a")
    assert names(planner.plan([long]).packed) == [("long", 1)]
    rest = queue("long", *[("forward_backward", 1000)] * 19, tenant="a", first=2)
    short = queue("short", *[("forward_backward", 10)] * 5, tenant="b")
    passes = drive(planner, {"long": rest, "short": short})
    assert passes[0] == [("short", seq) for seq in range(1, 6)]
    assert len(passes) == 20


def test_a_tenant_with_many_runs_gets_no_more_than_one_with_a_single_run():
    runs = {f"a{index}": queue(f"a{index}", *[("forward", 50)] * 20, tenant="a") for index in range(10)}
    runs["b"] = queue("b", *[("forward", 50)] * 20, tenant="b")
    passes = drive(Planner(token_budget=100), runs)
    last_of_b = max(index for index, done in enumerate(passes) if any(run == "b" for run, _ in done))
    before = [run for done in passes[: last_of_b + 1] for run, _ in done]
    assert before.count("b") == 20
    assert abs(sum(run != "b" for run in before) - 20) <= 4


@pytest.mark.parametrize("seed", range(30))
def test_every_run_is_served_in_order_and_completely(seed):
    draw = random.Random(seed)
    kinds = ["forward", "forward_backward", "optim_step", "save_weights", "load_weights"]
    queues = {}
    for index in range(draw.randint(1, 6)):
        operations = [(kind, draw.randint(1, 300)) for kind in draw.choices(kinds, k=draw.randint(1, 12))]
        queues[f"r{index}"] = queue(f"r{index}", *operations, tenant=draw.choice("ab"))
    total = sum(len(item.pending) for item in queues.values())
    passes = drive(Planner(token_budget=200), queues)
    assert sum(map(len, passes)) == total


def test_with_one_run_a_pass_no_forward_is_shared_by_runs_or_operations():
    fb = ("forward_backward", 10)
    queues = {name: queue(name, fb, fb, ("optim_step", 0), fb) for name in "abc"}
    planner = Planner(token_budget=1000, runs_per_pass=1)
    while any(item.pending for item in queues.values()):
        plan = planner.plan([item for item in queues.values() if item.pending])
        assert len(plan.packed) <= 1
        for run_id, _ in names(plan.singles) + names(plan.packed):
            queues[run_id] = queue(run_id, *[(one.kind, one.tokens) for one in queues[run_id].pending[1:]])


def test_no_more_runs_share_a_pass_than_may():
    queues = [queue(name, ("forward", 10), ("forward", 10)) for name in "abcd"]
    plan = Planner(token_budget=1000, runs_per_pass=2).plan(queues)
    assert len({run for run, _ in names(plan.packed)}) == 2 and len(plan.packed) == 4


def test_runs_that_have_no_room_together_train_one_after_another_and_a_larger_one_by_itself():
    sizes = {"a": 60, "b": 50, "c": 40, "whale": 300}
    queues = {name: queue(name, ("forward", 10), ("forward", 10), state_bytes=size) for name, size in sizes.items()}
    passes = drive(Planner(token_budget=1000, room=Room(state_bytes=100)), queues)
    together = [{run for run, _ in done} for done in passes]
    assert {"whale"} in together and {"b", "c"} in together
    for runs in together:
        assert len(runs) == 1 or sum(sizes[run] for run in runs) <= 100


def test_steps_side_by_side_have_room_together_too():
    queues = [
        queue(name, ("optim_step", 0), state_bytes=size) for name, size in zip("abcd", (60, 40, 30, 300), strict=True)
    ]
    plan = Planner(token_budget=10_000, room=Room(state_bytes=100)).plan(queues)
    assert [[one.run_id for one in group] for group in plan.groups()] == [["a", "b"], ["c"], ["d"]]
    plan = Planner(token_budget=10_000, room=Room(runs=3)).plan(queues)
    assert [len(group) for group in plan.groups()] == [3, 1]


def test_a_large_run_waits_at_most_one_pass_for_small_ones_that_fill_the_room():
    planner, room = Planner(token_budget=100, room=Room(state_bytes=100)), []
    for number in range(1, 20):
        small = [queue(name, ("forward", 10), first=number, state_bytes=30, tenant=name) for name in "abc"]
        large = queue("large", ("forward", 10), first=number, state_bytes=90, tenant="z")
        room.append({run for run, _ in names(planner.plan([*small, large]).packed)})
    assert all({"large"} in pair for pair in itertools.pairwise(room))


@pytest.mark.parametrize("seed", range(30))
def test_within_any_room_every_run_is_served_and_what_shares_a_pass_fits(seed):
    draw = random.Random(seed)
    room = Room(runs=draw.randint(0, 3), state_bytes=draw.choice([0, 100]))
    queues = {}
    for index in range(draw.randint(1, 6)):
        kinds = draw.choices(["forward", "forward_backward", "optim_step", "save_weights"], k=draw.randint(1, 12))
        operations = [(kind, draw.randint(1, 300)) for kind in kinds]
        size = draw.randint(1, 150)
        queues[f"r{index}"] = queue(f"r{index}", *operations, tenant=draw.choice("ab"), state_bytes=size)
    sizes = {name: item.state_bytes for name, item in queues.items()}
    planner, left = Planner(token_budget=200, room=room), sum(len(item.pending) for item in queues.values())
    while left:
        plan = planner.plan([item for item in queues.values() if item.pending])
        groups = plan.groups()
        assert groups
        for group in groups:
            runs = {one.run_id for one in group}
            assert len(runs) == 1 or len(runs) <= (room.runs or len(runs))
            assert len(runs) == 1 or not room.state_bytes or sum(sizes[run] for run in runs) <= room.state_bytes
        for one in [one for group in groups for one in group]:
            head, *rest = queues[one.run_id].pending
            assert head.seq_id == one.seq_id
            queues[one.run_id] = replace(queues[one.run_id], pending=tuple(rest))
            left -= 1


@pytest.mark.parametrize("seed", range(10))
def test_what_is_foreseen_is_the_next_pass_if_nothing_else_comes_and_changes_nothing(seed):
    draw = random.Random(seed)
    queues = {}
    for index in range(4):
        operations = [(draw.choice(["forward", "optim_step"]), draw.randint(1, 80)) for _ in range(6)]
        queues[f"r{index}"] = queue(f"r{index}", *operations, tenant=draw.choice("ab"))
    planner, undisturbed, foreseen = Planner(token_budget=100), Planner(token_budget=100), None
    while any(item.pending for item in queues.values()):
        waiting = [item for item in queues.values() if item.pending]
        plan = planner.plan(waiting)
        assert plan == undisturbed.plan(waiting)
        chosen = [*plan.singles, *plan.packed]
        assert foreseen is None or foreseen == chosen
        foreseen = planner.foresee(waiting, plan)
        for run_id, _ in names(chosen):
            queues[run_id] = replace(queues[run_id], pending=queues[run_id].pending[1:])
    assert foreseen == []
