"""Answers that may be a moment old."""

from __future__ import annotations

from itertools import count

import pytest

from openrl.app import recent
from openrl.app.recent import Recent


def test_an_answer_is_found_out_once_for_all_who_ask_alike() -> None:
    known, asked = Recent[int](keep_s=60.0), count()
    assert [known.get(key, lambda: next(asked)) for key in ("a", "a", "b", "a")] == [0, 0, 1, 0]


def test_an_answer_that_is_too_old_is_found_out_anew() -> None:
    known, asked = Recent[int](keep_s=0.0), count()
    assert [known.get("a", lambda: next(asked)) for _ in range(3)] == [0, 1, 2]


def test_what_could_not_be_found_out_is_not_remembered() -> None:
    known = Recent[float](keep_s=60.0)
    with pytest.raises(ZeroDivisionError):
        known.get("a", lambda: 1 / 0)
    assert known.get("a", lambda: 0.5) == 0.5


def test_what_was_forgotten_is_found_out_anew() -> None:
    known, asked = Recent[int](keep_s=60.0), count()
    assert known.get("a", lambda: next(asked)) == 0
    known.forget()
    assert known.get("a", lambda: next(asked)) == 1


def test_only_so_many_answers_are_remembered() -> None:
    known = Recent[int](keep_s=60.0)
    for key in range(3 * recent.MOST):
        known.get(key, lambda: 0)
        assert len(known._known) <= recent.MOST
