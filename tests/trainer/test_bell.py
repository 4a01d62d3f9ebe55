"""What rings for the trainer's engine, and what comes along."""

from __future__ import annotations

from openrl.workers.trainer.bell import MOST, Bell


def test_what_was_told_is_heard_once() -> None:
    bell = Bell()
    bell.tell(b"a")
    bell.tell(b"b")
    assert bell.wait(0) and bell.heard() == ([b"a", b"b"], False)
    assert bell.heard() == ([], False)
    bell.hush()
    assert not bell.is_set()


def test_what_says_nothing_lets_the_engine_look_whatever_else_was_told() -> None:
    bell = Bell()
    bell.tell(b"a")
    bell.tell(b"")
    assert bell.is_set() and bell.heard() == ([], False)
    bell.tell(b"b")
    assert bell.heard() == ([b"b"], False)


def test_a_doorbell_takes_nothing_from_what_was_told_and_is_not_forgotten_beside_it() -> None:
    bell = Bell()
    bell.ring()
    assert bell.is_set() and bell.heard() == ([], True)
    bell.tell(b"a")
    bell.ring()
    assert bell.heard() == ([b"a"], True)


def test_more_than_it_keeps_lets_the_engine_look() -> None:
    bell = Bell()
    for number in range(MOST + 1):
        bell.tell(b"%d" % number)
    assert bell.is_set() and bell.heard() == ([], False)


def test_what_is_forgotten_rings_no_more() -> None:
    bell = Bell()
    bell.tell(b"a")
    bell.ring()
    bell.forget()
    assert not bell.is_set() and bell.heard() == ([], False)
    bell.tell(b"b")
    assert bell.heard() == ([b"b"], False)
