"""The scripts of the turns, word for word, on a clock that stands still until the test moves it."""

from __future__ import annotations

from typing import Any

import redis

from openrl.timeslice.holder import Holder, Place, Process
from openrl.timeslice.turn import Sharing, Turns

CLOCK = "test:clock"
START_US = 1_800_000_000_000_000
_TIME = "local now = redis.call('TIME')\n  return now[1] * 1000000 + now[2]"
PLACE = Place(machine="", boot="a boot that is no more", pid_namespace="pid:[1]")

Damage = dict[str, tuple[tuple[str, str], ...]]
"""By script, what is replaced by what."""


class Fault(Exception):
    """A call that never arrived, or whose answer didn't."""


class World(Turns):
    """A store of turns with one accelerator, a clock of its own, and calls that go wrong when told to."""

    def __init__(self, client: redis.Redis, sharing: Sharing | None = None, damage: Damage | None = None) -> None:
        super().__init__(client, sharing)
        self.fault = ""
        self.late: list[tuple[str, str, tuple[Any, ...]]] = []
        """Calls that a broken connection still holds; the next call but one finds the oldest delivered."""
        self._damage = damage or {}
        client.flushall()
        client.set(CLOCK, START_US)

    def source(self, name: str) -> str:
        """Return the script on this clock, with its damage."""
        text = super().source(name)
        assert _TIME in text
        text = text.replace(_TIME, f"return tonumber(redis.call('GET', '{CLOCK}'))")
        for before, after in (*self._damage.get("accelerator", ()), *self._damage.get(name, ())):
            assert before in text, f"{name}: nothing to damage: {before}"
            text = text.replace(before, after)
        return text

    def pass_us(self, microseconds: int) -> None:
        """Move the clock."""
        self.redis.incrby(CLOCK, microseconds)

    @property
    def now_us(self) -> int:
        return int(self.redis.get(CLOCK))

    def dump(self) -> dict[bytes, Any]:
        """Read everything."""
        return {key: self._value(key) for key in self.redis.keys("*")}

    def deliver(self, most: int) -> None:
        """Let the oldest of the late calls arrive."""
        while self.late and most:
            name, accelerator, args = self.late.pop(0)
            super()._call(name, accelerator, *args)
            most -= 1

    def _value(self, key: bytes) -> Any:
        read = {
            b"hash": self.redis.hgetall,
            b"set": self.redis.smembers,
            b"list": lambda key: self.redis.lrange(key, 0, -1),
            b"zset": lambda key: self.redis.zrange(key, 0, -1, withscores=True),
        }
        return read.get(self.redis.type(key), self.redis.get)(key)

    def _call(self, name: str, accelerator: str, *args: Any) -> Any:
        fault, self.fault = self.fault, ""
        if len(self.late) > 1 or (self.late and not fault):
            self.deliver(1)
        if fault == "late":
            self.late.append((name, accelerator, args))
        if fault in ("lost", "late"):
            raise Fault
        answer = super()._call(name, accelerator, *args)
        if fault == "doubled":
            answer = super()._call(name, accelerator, *args)
        if fault == "unanswered":
            raise Fault
        return answer


def holder(number: int) -> Holder:
    """Return a holder of which this machine knows nothing."""
    return Holder(place=PLACE, leader=Process(number, number), group="session", uid=0)
