"""Which of several versions of a full model has its turn: of a client on each, none starves."""

import pytest

from openrl.workers.sampler.rotation import Decision, Rotation

TURN_S, DRAIN_S = 2.0, 10.0


def rotation(current=None, *, at=0.0, took_s=0.0) -> Rotation:
    found = Rotation(turn_s=TURN_S, drain_s=DRAIN_S)
    if current is not None:
        found.begin(current, now=at, took_s=took_s)
    return found


def decide(rotating: Rotation, asked: dict, now: float, *, running=True, ready=True) -> Decision:
    return rotating.decide(asked, running=running, ready=lambda version: ready, now=now)


def test_the_first_version_is_fetched_and_then_switched_to():
    rotating = rotation()
    assert decide(rotating, {"a": 0.0}, 0.0, running=False, ready=False) == Decision(fetch="a")
    assert decide(rotating, {"a": 0.0}, 0.1, running=False) == Decision(fetch="a", switch=True)


def test_alone_a_version_keeps_going_for_ever():
    assert decide(rotation("a"), {"a": 0.0}, 1e6) == Decision(enter=True)
    assert decide(rotation("a"), {}, 1e6, running=False) == Decision(enter=True)


def test_sampling_goes_on_while_the_next_version_is_fetched_however_long_that_takes():
    assert decide(rotation("a"), {"a": 0.0, "b": 1.0}, 1e3, ready=False) == Decision(enter=True, fetch="b")


def test_a_version_has_its_time_then_drains_and_at_last_is_laid_aside():
    rotating, asked = rotation("a"), {"a": 0.0, "b": 0.5}
    assert decide(rotating, asked, 1.9) == Decision(enter=True, fetch="b")
    assert decide(rotating, asked, 2.0) == Decision(fetch="b")
    assert decide(rotating, asked, 11.9) == Decision(fetch="b")
    assert decide(rotating, asked, 12.0) == Decision(fetch="b", lay_aside=True)
    assert decide(rotating, asked, 12.0, running=False) == Decision(fetch="b", switch=True)


def test_a_version_that_nobody_asks_for_makes_way_at_once():
    assert decide(rotation("a"), {"b": 0.0}, 0.1, running=False) == Decision(fetch="b", switch=True)


def test_where_a_switch_takes_long_turns_are_longer():
    rotating, asked = rotation("a", took_s=0.7), {"a": 0.0, "b": 0.0}
    assert decide(rotating, asked, 6.9).enter
    assert not decide(rotating, asked, 7.1).enter


def test_one_slow_switch_makes_no_turn_longer_than_two_may_wait_for():
    rotating, asked = rotation("a", took_s=60.0), {"a": 0.0, "b": 0.0}
    assert decide(rotating, asked, TURN_S + DRAIN_S - 0.1).enter
    assert not decide(rotating, asked, TURN_S + DRAIN_S).enter


def test_a_newcomer_that_gives_up_again_stops_the_draining():
    rotating = rotation("a")
    decide(rotating, {"a": 0.0, "b": 0.0}, 2.0)
    assert decide(rotating, {"a": 0.0}, 3.0) == Decision(enter=True)
    assert not decide(rotating, {"a": 0.0, "b": 4.0}, 13.0).lay_aside


def test_what_was_laid_aside_does_not_come_before_who_has_waited_longer():
    rotating = rotation("a")
    rotating.begin("b", now=12.0)
    assert decide(rotating, {"a": 0.0, "b": 1.0, "c": 2.0}, 14.0).fetch == "c"
    rotating.begin("c", now=14.0)
    assert decide(rotating, {"a": 0.0, "b": 1.0, "c": 2.0}, 16.0).fetch == "a"


@pytest.mark.parametrize("num_versions", [2, 3, 7])
def test_of_any_number_of_versions_that_are_asked_for_all_the_time_each_has_the_same_time(num_versions):
    rotating: Rotation[int] = Rotation(turn_s=TURN_S, drain_s=DRAIN_S)
    had, waited = dict.fromkeys(range(num_versions), 0.0), dict.fromkeys(range(num_versions), 0.0)
    running, last = False, dict.fromkeys(range(num_versions), 0.0)
    for step in range(40_000):
        now = 0.1 * step
        decision = rotating.decide(dict.fromkeys(had, 0.0), running=running, ready=lambda version: True, now=now)
        if decision.switch:
            rotating.begin(decision.fetch, now=now, took_s=0.1)
        elif decision.enter:
            running = True
        elif decision.lay_aside:  # only what has to be: here nothing ends by itself
            running = False
        current = rotating.current
        had[current] += 0.1
        waited[current] = max(waited[current], now - last[current])
        last[current] = now
    assert max(had.values()) < 1.1 * min(had.values())
    assert max(waited.values()) < num_versions * (TURN_S + DRAIN_S + 1)
