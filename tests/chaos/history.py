"""What the clients of a chaos test asked for and what they were told: enough to do it all once more, undisturbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True, kw_only=True)
class Action:
    """One thing that a client did: with what, what came of it, and the journal's operations that it took.

    `refused` of these ended in an error that the client was told, and left the run as it was.
    """

    kind: str
    asked: dict[str, Any]
    told: dict[str, Any] = field(default_factory=dict)
    operations: int = 0
    refused: int = 0


@dataclass(slots=True, kw_only=True)
class History:
    """All that one client did, in order."""

    number: int
    run_id: str = ""
    actions: list[Action] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def operations(self) -> int:
        """Return how many operations the run's journal must hold, with its creation."""
        return sum(action.operations + action.refused for action in self.actions)

    @property
    def done(self) -> int:
        """Return how many of them must have succeeded."""
        return sum(action.operations for action in self.actions)

    @property
    def samples(self) -> list[Action]:
        """Return the requests for samples."""
        return [action for action in self.actions if action.kind == "sample"]

    @property
    def steps(self) -> int:
        """Return the optimizer's step after all this: a load sets it back to the checkpoint's."""
        step, saved = 0, {}
        for action in self.actions:
            if action.kind == "step":
                step += 1
            elif action.kind == "save":
                saved[action.asked["name"]] = step
            elif action.kind == "load":
                step = saved[action.asked["name"]]
        return step


class Progress:
    """When each client last got an answer. Safe to share between threads."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._changed = threading.Condition()
        self._last = dict.fromkeys(numbers, 0.0)
        self._left: set[int] = set()

    def note(self, number: int) -> None:
        """Note an answer."""
        with self._changed:
            self._last[number] = time.monotonic()
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """Note that a client asks nothing more."""
        with self._changed:
            self._left.add(number)
            self._changed.notify_all()

    def first_since(self, when: float, *, timeout_s: float) -> float | None:
        """Wait until any client has an answer since `when`; return when that was, None if none came."""
        return self._wait(lambda: any(last > when for last in self._last.values()), timeout_s)

    def all_since(self, when: float, *, timeout_s: float) -> float | None:
        """Wait until every client that still asks has one."""
        return self._wait(
            lambda: all(last > when for number, last in self._last.items() if number not in self._left), timeout_s
        )

    def _wait(self, ready: Any, timeout_s: float) -> float | None:
        with self._changed:
            return time.monotonic() if self._changed.wait_for(ready, timeout_s) else None
