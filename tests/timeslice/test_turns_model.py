"""Thousands of random turns against a model of what lies on the accelerator (see `actors`).

The long forms (`make test-full`) have 9,500 turns, orders that hypothesis thinks of, and scripts with one thing wrong
each, which must be found.
"""

from __future__ import annotations

import random

import hypothesis
import pytest
import redis
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from openrl.timeslice.turn import Sharing
from tests.timeslice.actors import FAULTS, FLOOR_US, Floor, storm
from tests.timeslice.world import Damage, World

SHARING = Sharing(floor_s=FLOOR_US / 1e6, multiple=8.0)

DAMAGES: dict[str, Damage] = {
    "a turn that runs is granted again": {"ask": (("if turn[2] then", "if false then"),)},
    "whoever asks first is served": {
        "ask": (("if next_of(owners, credit, quantum(owners)) ~= owner then", "if false then"),)
    },
    "tokens do not grow": {"ask": (("whole(math.max(tonumber(turn[1] or 0) + 1, now))", "'7'"),)},
    "a stale token releases": {"release": (("if not holds(token) then", "if false then"),)},
    "a stale token notes": {"note": (("if not holds(ARGV[2]) then", "if false then"),)},
    "a stale token looks": {"look": (("if not holds(token) then", "if false then"),)},
    "a turn costs nothing": {"accelerator": (("return math.max(0, now -", "return math.min(0, now -"),)},
    "the rich wait": {"accelerator": (("credit[owner] > credit[richest]", "credit[owner] < credit[richest]"),)},
    "a turn that was never heard of stays": {"withdraw": (("finish('unused')", ""),)},
}  # fmt: skip


def world(client: redis.Redis, damage: Damage | None = None) -> World:
    return World(client, SHARING, damage)


def test_in_hundreds_of_random_turns_no_two_states_meet_and_nobody_is_kept_waiting(client: redis.Redis):
    floor = Floor(world(client))
    storm(floor, random.Random(1), turns=200)
    floor.run_out()
    assert floor.kills > 10 and floor.refusals > 10


@pytest.mark.full
def test_in_9500_random_turns_no_two_states_meet_and_nobody_is_kept_waiting(client: redis.Redis):
    floor = Floor(world(client))
    storm(floor, random.Random(9500), turns=9500)
    floor.run_out()
    assert floor.kills > 500 and floor.refusals > 500


class Machine(RuleBasedStateMachine):
    """The same floor, its events in an order that hypothesis chooses."""

    client: redis.Redis
    index, fault = st.integers(0, 4), st.sampled_from(("", "", "", *FAULTS))

    @initialize()
    def begin(self) -> None:
        self.floor = Floor(world(self.client))

    @rule(index=index, fault=fault)
    def want(self, index: int, fault: str) -> None:
        self.floor.want(self.floor.actors[index], fault)

    @rule(index=index, microseconds=st.integers(1, 400_000))
    def use(self, index: int, microseconds: int) -> None:
        self.floor.use(self.floor.actors[index], microseconds)

    @rule(index=index, fault=fault, idle_us=st.sampled_from((None, 0, 50_000)))
    def look(self, index: int, fault: str, idle_us: int | None) -> None:
        self.floor.look(self.floor.actors[index], idle_us=idle_us, fault=fault)

    @rule(index=index, fault=fault)
    def settle(self, index: int, fault: str) -> None:
        self.floor.settle(self.floor.actors[index], fault)

    @rule(index=index, fault=fault)
    def leave_line(self, index: int, fault: str) -> None:
        self.floor.leave_line(self.floor.actors[index], fault)

    @rule(index=index, engine=st.booleans())
    def kill(self, index: int, engine: bool) -> None:
        self.floor.kill(self.floor.actors[index], engine=engine)

    @rule(index=index)
    def fail(self, index: int) -> None:
        self.floor.fail(self.floor.actors[index])

    @rule(index=index, on=st.booleans())
    def stop(self, index: int, on: bool) -> None:
        self.floor.stop(self.floor.actors[index], on=on)

    @rule(fault=fault)
    def sweep(self, fault: str) -> None:
        self.floor.sweep(fault)

    @rule()
    def end_engines(self) -> None:
        for actor in self.floor.past:
            self.floor.kill_engine(actor)

    @rule(index=index)
    def try_stale(self, index: int) -> None:
        self.floor.try_stale(self.floor.actors[index])
        for actor in self.floor.past:
            self.floor.try_stale(actor)

    def teardown(self) -> None:
        self.floor.run_out()


def run(client: redis.Redis, examples: int, steps: int) -> None:
    machine = type("MachineHere", (Machine,), {"client": client})
    settings = hypothesis.settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(machine, settings=settings)


def test_orders_of_events_that_hypothesis_thinks_of(client: redis.Redis):
    run(client, examples=8, steps=30)


@pytest.mark.full
def test_many_orders_of_events_that_hypothesis_thinks_of(client: redis.Redis):
    run(client, examples=150, steps=60)


@pytest.mark.full
@pytest.mark.parametrize("name", DAMAGES)
def test_a_script_with_one_thing_wrong_is_found(client: redis.Redis, name: str):
    with pytest.raises((AssertionError, redis.ResponseError)):
        for seed in range(40):
            floor = Floor(world(client, DAMAGES[name]))
            storm(floor, random.Random(seed), turns=60)
            floor.run_out()
