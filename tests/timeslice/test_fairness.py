"""Deficit round-robin: shares, bounds, and no cost for whoever is alone."""

import itertools
import random

import pytest

from openrl.timeslice import DeficitRoundRobin
from openrl.timeslice.fairness import MOST_ABSENT


def served(fairness: DeficitRoundRobin, costs: dict[str, float], *, turns: int) -> dict[str, float]:
    """Serve always-waiting owners for a number of turns; return what each of them got."""
    got = dict.fromkeys(costs, 0.0)
    for _ in range(turns):
        owner = fairness.next(list(costs))
        fairness.charge(owner, costs[owner])
        got[owner] += costs[owner]
    return got


def test_owners_with_equal_costs_alternate():
    fairness = DeficitRoundRobin(quantum=1)
    order = []
    for _ in range(6):
        order.append(fairness.next(["a", "b", "c"]))
        fairness.charge(order[-1], 10)
    assert order == ["a", "b", "c", "a", "b", "c"]


@pytest.mark.parametrize("seed", range(20))
def test_what_two_always_waiting_owners_got_differs_by_at_most_one_service_and_a_quantum(seed):
    draw = random.Random(seed)
    costs = {name: draw.uniform(1, 1000) for name in "abcd"}
    got = served(DeficitRoundRobin(quantum=50), costs, turns=3000)
    assert max(got.values()) - min(got.values()) <= max(costs.values()) + 50


def test_many_cheap_services_go_before_the_next_dear_one():
    fairness = DeficitRoundRobin(quantum=10)
    fairness.charge("long", 1000)
    order = []
    for _ in range(50):
        order.append(fairness.next(["long", "short"]))
        fairness.charge(order[-1], 20)
    assert set(order[:48]) == {"short"}


def test_a_debt_outlives_absence_but_ends_with_the_rounds_that_pass():
    fairness = DeficitRoundRobin(quantum=10)
    fairness.charge("long", 100)
    fairness.forget_idle([])
    assert fairness.next(["long", "short"]) == "short"
    for _ in range(20):
        fairness.charge(fairness.next(["short"]), 10)
    assert fairness.next(["long", "short"]) == "long"


def test_whoever_is_alone_is_served_whatever_it_owes():
    fairness = DeficitRoundRobin(quantum=1)
    for _ in range(5):
        assert fairness.next(["alone"]) == "alone"
        fairness.charge("alone", 1e9)


def test_nobody_saves_up_credit_by_waiting_elsewhere():
    fairness = DeficitRoundRobin(quantum=10)
    served(fairness, {"a": 10, "b": 10}, turns=2)
    for _ in range(1000):
        fairness.charge(fairness.next(["a"]), 10)
    got = served(fairness, {"a": 10, "b": 10}, turns=10)
    assert abs(got["a"] - got["b"]) <= 20


def test_whoever_owes_is_served_although_others_come_and_go():
    fairness, turns = DeficitRoundRobin(quantum=10), itertools.count(1)
    fairness.charge("long", 110)
    for short in itertools.cycle(["a", "b", "c"]):
        if (chosen := fairness.next(["long", short])) == "long":
            break
        fairness.charge(chosen, 1)
        fairness.forget_idle(["long"])
        assert next(turns) <= 3 * 11 * 10, "the others have had as much, each of them"


def test_an_owner_whose_credit_is_whole_and_who_does_not_wait_is_forgotten():
    fairness = DeficitRoundRobin(quantum=10)
    fairness.next(["a", "b", "c"])
    fairness.charge("a", 50)
    fairness.charge("c", 5)
    fairness.forget_idle(["b"])
    assert set(fairness._credit) == {"a", "b", "c"}
    fairness.forget_idle([])
    assert set(fairness._credit) == {"a", "c"}
    for _ in range(20):
        fairness.charge(fairness.next(["d"]), 10)
    fairness.forget_idle([])
    assert set(fairness._credit) <= {"d"}, "rounds make every credit whole"


def test_of_those_who_are_absent_the_poorest_are_remembered():
    fairness = DeficitRoundRobin(quantum=10)
    for number in range(MOST_ABSENT):
        fairness.charge(f"run {number}", 2)
    fairness.charge("richer", 1)
    fairness.charge("poorer", 3)
    fairness.forget_idle([])
    assert len(fairness._credit) == MOST_ABSENT
    assert "poorer" in fairness._credit and "richer" not in fairness._credit


def test_a_quantum_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="quantum"):
        DeficitRoundRobin(quantum=0)
