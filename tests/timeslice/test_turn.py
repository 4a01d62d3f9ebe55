"""One holder, tokens that grow, who is next, and when to hand on: the scripts on a clock that the test moves."""

from __future__ import annotations

import itertools
import random

import pytest
import redis

from openrl.timeslice import DeficitRoundRobin
from openrl.timeslice.errors import Refused
from openrl.timeslice.turn import Sharing, Turns
from tests.timeslice.world import START_US, World, holder

GPU = "gpu-0"
SECOND = 1_000_000


@pytest.fixture
def world(client: redis.Redis) -> World:
    return World(client, Sharing(floor_s=1.0, multiple=8.0))


def ask(world: World, owner: str) -> int | None:
    return world.ask(GPU, owner, f"seat of {owner}", holder(len(owner)))


def test_one_holds_the_others_wait_and_each_token_is_larger(world: World):
    first = ask(world, "a")
    assert first is not None and ask(world, "b") is None and ask(world, "c") is None
    world.release(GPU, first)
    assert ask(world, "c") is None, "b came first"
    second = ask(world, "b")
    assert second is not None and second > first
    assert ask(world, "c") is None and ask(world, "a") is None


def test_asking_and_releasing_twice_is_as_once(world: World):
    token = ask(world, "a")
    assert ask(world, "a") == token
    world.release(GPU, token)
    before = world.dump()
    world.release(GPU, token)
    assert world.dump() == before
    other = ask(world, "b")
    world.release(GPU, token)
    assert ask(world, "b") == other


def test_a_stale_token_can_do_nothing(world: World):
    token = ask(world, "a")
    assert ask(world, "b") is None
    assert world.sweep(GPU, is_gone=lambda holder: True)
    current = ask(world, "b")
    before = world.dump()
    for use in (
        lambda: world.release(GPU, token),
        lambda: world.note(GPU, token, state="resident", busy=1.0, holder=holder(9)),
        lambda: world.look(GPU, token, idle_s=None),
        lambda: world.end(GPU, token),
        lambda: world.release(GPU, current + 1),
    ):
        with pytest.raises(Refused, match="has ended"):
            use()
        assert world.dump() == before


def test_a_token_is_larger_even_over_a_store_that_lost_everything(world: World):
    token = ask(world, "a")
    world.redis.flushall()
    world.redis.set("test:clock", START_US + SECOND)
    assert ask(world, "a") > token


def test_a_proof_about_other_processes_than_the_holders_present_ones_ends_nothing(world: World):
    token = ask(world, "a")

    def is_gone(known):
        world.note(GPU, token, holder=holder(77))
        return True

    assert not world.sweep(GPU, is_gone=is_gone)
    assert ask(world, "a") == token
    assert not world.sweep(GPU, is_gone=lambda known: known != holder(77))
    assert world.sweep(GPU, is_gone=lambda known: known == holder(77))


def test_an_operator_ends_the_turn_that_is_named_and_no_other(world: World):
    token = ask(world, "a")
    with pytest.raises(Refused):
        world.end(GPU, token - 1)
    world.end(GPU, token)
    assert ask(world, "b") > token


def test_a_grant_that_was_never_heard_of_is_given_up_by_withdrawing(world: World):
    ask(world, "a")
    assert ask(world, "b") is None
    world.withdraw(GPU, "a", "another seat of a")
    assert ask(world, "b") is None, "only the very seat may withdraw from its turn"
    world.withdraw(GPU, "a", "seat of a")
    assert ask(world, "b") is not None


def test_a_call_that_arrives_after_its_seat_has_left_is_granted_nothing(world: World):
    token = ask(world, "a")
    assert ask(world, "b") is None
    world.withdraw(GPU, "b", "seat of b")
    world.release(GPU, token)
    assert ask(world, "b") is None, "it was sent before"
    assert ask(world, "c") is not None


def test_a_holder_with_work_goes_on_until_eight_switches_have_passed_and_then_hands_on(world: World):
    token = ask(world, "a")
    world.note(GPU, token, park=0.3, restore=0.2)
    assert world.look(GPU, token, idle_s=None).again_s is None, "nobody waits"
    assert ask(world, "b") is None
    look = world.look(GPU, token, idle_s=None)
    assert not look.hand_on and look.again_s == pytest.approx(4.0)
    world.pass_us(4 * SECOND - 1)
    ask(world, "b")
    assert not world.look(GPU, token, idle_s=None).hand_on
    world.pass_us(1)
    assert world.look(GPU, token, idle_s=None).hand_on


def test_the_dearest_switch_of_those_concerned_counts(world: World):
    token = ask(world, "b")
    world.note(GPU, token, park=1.0, restore=1.0)
    world.release(GPU, token, park_s=1.0)
    token = ask(world, "a")
    assert ask(world, "b") is None
    assert world.look(GPU, token, idle_s=None).again_s == pytest.approx(16.0)


def test_a_holder_without_work_waits_as_long_as_its_switch_costs(world: World):
    token = ask(world, "a")
    world.note(GPU, token, park=0.3, restore=0.2)
    assert world.look(GPU, token, idle_s=100.0).hand_on is False, "nobody wants it"
    assert ask(world, "b") is None
    assert world.look(GPU, token, idle_s=0.4).again_s == pytest.approx(0.1)
    assert world.look(GPU, token, idle_s=0.5).hand_on


def test_time_during_which_nobody_waits_costs_nothing(world: World):
    token = ask(world, "a")
    world.pass_us(3600 * SECOND)
    assert ask(world, "b") is None
    world.pass_us(2 * SECOND)
    ask(world, "b")
    world.release(GPU, token)
    assert float(world.redis.hget(f"openrl:accelerator:{GPU}:credit", "a") or 0) == -1 * SECOND


def test_a_stopped_waiter_is_passed_over_and_keeps_nobody(world: World):
    token = ask(world, "a")
    assert ask(world, "stopped") is None
    world.pass_us(4 * SECOND)
    assert world.look(GPU, token, idle_s=None).again_s is None, "who doesn't ask doesn't wait"
    assert ask(world, "b") is None
    world.release(GPU, token)
    assert ask(world, "b") is not None
    assert ask(world, "stopped") is None


def test_waits_are_counted_and_measured_by_owner(world: World):
    token = ask(world, "a")
    assert ask(world, "b") is None
    for _ in range(3):
        world.pass_us(SECOND)
        ask(world, "b")
    world.release(GPU, token, busy_s=2.5, park_s=0.1)
    ask(world, "b")
    row = {name.decode(): int(value) for name, value in
           world.redis.hgetall(f"openrl:accelerator:{GPU}:owner:b").items()}  # fmt: skip
    assert row == {"turns": 1, "waits": 1, "waited": 3 * SECOND, "longest": 3 * SECOND}
    row = world.redis.hgetall(f"openrl:accelerator:{GPU}:owner:a")
    assert (row[b"held"], row[b"busy"], row[b"park"]) == (b"3000000", b"2500000", b"100000")


@pytest.mark.parametrize("seed", range(4))
def test_who_is_next_is_what_the_pure_arithmetic_says(client: redis.Redis, seed: int):
    """All wait always and no switch is measured, so that the quantum is the floor and each service is charged whole."""
    draw, owners = random.Random(seed), ["a", "b", "c", "d"]
    world, fairness = World(client, Sharing(floor_s=0.05, multiple=0)), DeficitRoundRobin(quantum=50_000)
    token = ask(world, "first")
    line = draw.sample(owners, 4)
    for owner in line:
        ask(world, owner)
        world.pass_us(1)
    world.release(GPU, token)
    fairness.charge("first", 4)
    for _ in range(40):
        served = fairness.next(line)
        granted = {owner: ask(world, owner) for owner in line if owner != served}
        assert set(granted.values()) == {None}
        token = ask(world, served)
        assert token is not None
        line.remove(served)
        for owner in line:
            ask(world, owner)
        cost = draw.randint(1, 400_000)
        world.pass_us(cost)
        for owner in line:
            ask(world, owner)
        world.release(GPU, token)
        fairness.charge(served, cost)
        ask(world, served)
        line.append(served)
        world.pass_us(1)


def test_whoever_owes_is_served_although_others_come_and_go(world: World):
    """Each of the others has used little of its credit when it leaves the line, and comes again a little later."""
    token = ask(world, "long")
    ask(world, "a")
    for _ in range(3):
        world.pass_us(SECOND)
        ask(world, "a")
    world.release(GPU, token)
    for turns, (short, following) in enumerate(itertools.pairwise(itertools.cycle("abc")), 1):
        if ask(world, "long") is not None:
            break
        token = ask(world, short)
        assert token is not None
        world.pass_us(SECOND // 20)
        ask(world, following)
        ask(world, "long")
        world.release(GPU, token)
        assert turns < 200, "three seconds each are 180 turns"
    assert turns > 60, "what it owes it waits for"


def test_what_an_owner_of_dear_switches_has_used_is_remembered_while_only_cheap_ones_wait(world: World):
    credit = f"openrl:accelerator:{GPU}:credit"
    token = ask(world, "dear")
    world.note(GPU, token, park=1.0, restore=1.0)
    world.release(GPU, token, park_s=1.0)
    world.redis.hset(credit, "dear", 14 * SECOND)  # of 16, and many times what is whole for a cheap one
    token = ask(world, "cheap")
    assert token is not None
    world.release(GPU, token)
    assert world.redis.hget(credit, "dear") == str(14 * SECOND).encode()


@pytest.mark.parametrize("name", ["", "two words", "new\nline", "x" * 201, "-first"])
def test_names_that_make_no_sense_are_refused(world: World, name: str):
    before = world.dump()
    with pytest.raises(ValueError, match="accelerator is"):
        world.ask(name, "a", "seat", holder(1))
    with pytest.raises(ValueError, match="owner is"):
        world.ask(GPU, name, "seat", holder(1))
    assert world.dump() == before


@pytest.mark.parametrize("given", [{"floor_s": 0.0}, {"floor_s": float("nan")}, {"multiple": -1.0}])
def test_a_sharing_that_makes_no_sense_is_refused(given: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(given))):
        Sharing(**given)


def test_the_scripts_run_on_the_stores_own_clock(client: redis.Redis):
    turns = Turns(client)
    token = turns.ask(GPU, "a", "seat", holder(1))
    seconds, microseconds = client.time()
    assert token is not None and abs(seconds * SECOND + microseconds - token) < 60 * SECOND
