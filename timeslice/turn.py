"""Turns on an accelerator: one holder at a time, each grant numbered, each step one script in the store.

Knows Redis, not what the holder does on the device: `seat` has that side. A turn ends when its holder gives it back,
or by proof that every process of the holder is gone (`holder`); never by time. The growing token lets a late holder be
told from the current one (Kleppmann 2016, "How to do distributed locking"). Who is next is deficit round-robin over the
seconds for which one owner kept others waiting (`fairness`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import redis

from openrl.timeslice import keys
from openrl.timeslice.errors import Refused
from openrl.timeslice.holder import Holder

log = logging.getLogger(__name__)

PATIENCE_S = 3.0
"""An owner that waits and hasn't asked for so long is passed over. `accelerator.lua` says it again."""

_READING = frozenset({"look"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How turns are cut.

    A holder with work keeps its turn for at least `multiple` times what the dearest switch (park + restore, as
    measured) of those concerned costs, and at least `floor_s`. With 8, switching takes about a ninth of the time.
    """

    floor_s: float = 0.1
    multiple: float = 8.0

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= 3600:
            raise ValueError(f"floor_s is {self.floor_s}; it must be above 0 and at most 3600 seconds")
        if not 0 <= self.multiple <= 1000:
            raise ValueError(f"multiple is {self.multiple}; it must be between 0 and 1000")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a holder is to do. `again_s`: when to look again; None: not before somebody comes."""

    hand_on: bool = False
    again_s: float | None = None


class Turns:
    """The turns of all accelerators of one store. Threads may share it; redis' own errors leave as they are."""

    def __init__(self, client: redis.Redis, sharing: Sharing | None = None) -> None:
        self.redis: Any = client
        self._sharing = sharing or Sharing()
        self._scripts: dict[str, Callable[..., Any]] = {}

    def ask(self, accelerator: str, owner: str, seat: str, holder: Holder) -> int | None:
        """Stand in line, and return the token once the turn is granted to this seat; None until then.

        To be asked again well within PATIENCE_S. `seat` names one place of one process, never used again.
        """
        floor, multiple = _us(self._sharing.floor_s), self._sharing.multiple
        keys.check("owner", owner)
        token = self._call("ask", accelerator, owner, seat, holder.to_json(), floor, multiple)
        return int(token) if token else None

    def withdraw(self, accelerator: str, owner: str, seat: str) -> None:
        """Leave the line, and a grant that was never heard of. Nothing of this seat may be on the accelerator."""
        self._call("withdraw", accelerator, owner, seat)

    def look(self, accelerator: str, token: int, *, idle_s: float | None) -> Look:
        """Say whether the holder goes on. `idle_s`: how long it has had no work; None: work is ready.

        Raises:
            Refused: this turn has ended.
        """
        answer = self._call("look", accelerator, token, "" if idle_s is None else _us(idle_s)).decode()
        if answer == "stale":
            raise _refused(accelerator, token)
        if answer in ("keep", "yield"):
            return Look(hand_on=answer == "yield")
        return Look(again_s=float(answer) / 1e6)

    def note(self, accelerator: str, token: int, **fields: str | float | Holder) -> None:
        """Write down how the turn goes: `state`, `holder`, and seconds of `busy`, `park` and `restore`.

        Raises:
            Refused: this turn has ended; nothing was written.
        """
        assert fields.keys() <= {"state", "holder", "busy", "park", "restore"}, fields
        parts = [part for pair in ((name, _text(value)) for name, value in fields.items()) for part in pair]
        if not self._call("note", accelerator, token, *parts):
            raise _refused(accelerator, token)

    def release(self, accelerator: str, token: int, *, busy_s: float = 0.0, park_s: float | None = None) -> None:
        """Give the turn back: nothing of the holder is on the accelerator any more. Twice is as once.

        Raises:
            Refused: another turn has begun, or none runs; nothing was changed.
        """
        if not self._call("release", accelerator, token, _us(busy_s), "" if park_s is None else _us(park_s)):
            raise _refused(accelerator, token)

    def sweep(self, accelerator: str, *, is_gone: Callable[[Holder], bool] = Holder.is_gone) -> bool:
        """End the present turn if its holder is proved to be gone; tell whether that was so."""
        token, text = self.redis.hmget(keys.accelerator(accelerator), ["token", "holder"])
        if not text or not is_gone(Holder.from_json(text)):
            return False
        ended = bool(self._call("bury", accelerator, int(token), text, "died"))
        if ended:
            log.warning("turn %d on %s has ended: its holder is gone", int(token), accelerator)
        return ended

    def end(self, accelerator: str, token: int) -> None:
        """End a turn on an operator's word that nothing of its holder is on the accelerator.

        Raises:
            Refused: this isn't the present turn; nothing was changed.
        """
        text = self.redis.hget(keys.accelerator(accelerator), "holder")
        if not text or not self._call("bury", accelerator, token, text, "ended"):
            raise _refused(accelerator, token)
        log.warning("turn %d on %s was ended by an operator", token, accelerator)

    def accelerators(self) -> list[str]:
        """Return every accelerator that was ever asked for."""
        return sorted(name.decode() for name in self.redis.smembers(keys.ACCELERATORS))

    def listen(self, accelerator: str) -> Any:
        """Return a subscription to the changes of an accelerator. What it says may be lost: look now and then too."""
        pubsub = self.redis.pubsub(ignore_subscribe_messages=True)
        pubsub.subscribe(keys.accelerator(accelerator))
        return pubsub

    def wake(self, accelerator: str) -> None:
        """Let all who listen look again."""
        self.redis.publish(keys.accelerator(accelerator), "wake")

    def source(self, name: str) -> str:
        """Return the text of a script."""
        flags = "no-writes" if name in _READING else "allow-oom"
        return f"#!lua flags={flags}\n" + _file("accelerator") + _file(name)

    def _call(self, name: str, accelerator: str, *args: str | bytes | float) -> Any:
        if name not in self._scripts:
            self._scripts[name] = self.redis.register_script(self.source(name))
        return self._scripts[name](args=[keys.accelerator(accelerator), *args])


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _text(value: str | float | Holder) -> str | int:
    if isinstance(value, Holder):
        return value.to_json()
    return value if isinstance(value, str) else _us(value)


def _refused(accelerator: str, token: int) -> Refused:
    return Refused(f"turn {token} on {accelerator} has ended; touch the accelerator no more, and leave")


@cache
def _file(name: str) -> str:
    return resources.files("openrl.timeslice").joinpath(f"{name}.lua").read_text(encoding="ascii")
