"""Doorbells wait while their engine is at work, and pass when that takes long."""

from __future__ import annotations

from openrl.tasks.worker import Patience


class Day:
    """An engine that rests at given times, and the clock of its day."""

    def __init__(self, *, rests_at: float) -> None:
        self.now, self.rests_at = 0.0, rests_at

    def rests(self, timeout_s: float) -> bool:
        """Let the time pass until the engine rests, or the patience is over."""
        before = self.now
        self.now = max(before, min(self.rests_at, before + timeout_s))
        return self.now >= self.rests_at

    def clock(self) -> float:
        return self.now


def test_a_doorbell_waits_until_the_engine_rests() -> None:
    day = Day(rests_at=0.03)
    patience = Patience(day.rests, most_s=0.2, clock=day.clock)
    patience.wait()
    assert day.now == 0.03
    patience.wait()
    assert day.now == 0.03


def test_a_long_pass_holds_doorbells_up_half_of_the_time_at_most() -> None:
    day = Day(rests_at=100.0)
    patience = Patience(day.rests, most_s=0.2, clock=day.clock)
    for _ in range(50):
        patience.wait()
    assert day.now == 0.2
    day.now = 0.5
    patience.wait()
    assert day.now == 0.7
