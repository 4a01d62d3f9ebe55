"""A process's seat at an accelerator: its turns as a context manager, its state parked only when others want the place.

Between two turns the state stays where it is while nobody waits: then a turn costs one read of the store. Where
somebody waits, the seat hands on before its next turn once its quantum is used up and the other is next, and without
work after as long as a switch costs. A failed park or restore ends it for good (`Broken`): the process must leave, and
the turn ends with its last process. Knows neither what is parked nor Celery: grants and switches go to a callback.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, NoReturn, Self

import redis

from openrl.timeslice import keys
from openrl.timeslice.errors import Broken, NotGranted, Refused
from openrl.timeslice.holder import Holder, Process
from openrl.timeslice.park import Parkable
from openrl.timeslice.turn import PATIENCE_S, Turns

log = logging.getLogger(__name__)

ASK_S = PATIENCE_S / 6
"""Between two questions of one that waits, where nothing calls it before."""
PROVE_S = 1.0
"""Between two looks of one that waits at whether the holder is gone."""
WATCH_S, WATCH_WANTED_S = 1.0, 0.02
"""How long the watching thread sleeps, while nobody waits and while somebody does."""
NOTE_S = 2.0
"""Between two reports of a holder's use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A turn that runs."""

    accelerator: str
    owner: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that took `seconds`: waiting for a grant, parking, restoring, or what failed."""

    kind: Literal["granted", "parked", "restored", "failed"]
    turn: Turn
    seconds: float
    resident_bytes: int


class Seat:
    """One place of one process. Give each owner of an accelerator one seat; close it when the process ends.

    `owner` is who is charged, and keeps its name over the processes that serve it. With `watch=False` no thread parks:
    whoever must do it itself (an engine bound to its thread) calls `rest` in its own loop, some times a second.
    """

    def __init__(
        self,
        turns: Turns,
        accelerator: str,
        owner: str,
        parkable: Parkable,
        *,
        holder: Holder | None = None,
        on_event: Callable[[Event], None] | None = None,
        watch: bool = True,
    ) -> None:
        self.accelerator = keys.check("accelerator", accelerator)
        self.owner = keys.check("owner", owner)
        self._name = ""
        """Of this wait for a turn and no other: what a broken connection delivers late finds nothing to do."""
        self._turns = turns
        self._parkable = parkable
        self._holder = holder or Holder.this_process()
        self._on_event = on_event
        self._parks_itself = watch
        self._using = threading.Lock()
        """Held while a turn is used, and by whoever changes what follows."""
        self._turn: Turn | None = None
        """The turn whose holder's state is on the accelerator."""
        self._token: int | None = None
        """What the store has granted, also before anything was restored."""
        self._broken = ""
        self._has_parked = False
        self._busy_s = self._began = self._idle_since = self._noted = 0.0
        self._owed: Callable[[], None] | None = None
        """What the store hasn't heard yet: that a parked seat gave its turn back, or left the line."""
        self._changed, self._closed = threading.Event(), threading.Event()
        self._wanted = False
        self._watcher = threading.Thread(target=self._watch, name=f"turns-{owner}", daemon=True)
        self._watcher.start()

    @contextmanager
    def turn(self, *, patience_s: float | None = None, gives_up: Callable[[], bool] = lambda: False) -> Iterator[Turn]:
        """Use the accelerator in the body of the `with`; not to be nested.

        Wait at most `patience_s`, None: for ever; `gives_up` is asked twice a second, and ends the waiting too.

        Afterwards the state stays on the accelerator until somebody wants it.

        Raises:
            NotGranted: the patience is at its end, it was given up, or the seat is closed.
            Refused: the turn was ended from outside. Like Broken, this is for good.
            Broken: parking or restoring failed, now or before.
        """
        with self._using:
            turn = self._enter(patience_s, gives_up)
            self._began = time.monotonic()
            try:
                yield turn
            finally:
                self._idle_since = time.monotonic()
                self._busy_s += self._idle_since - self._began
                self._began = 0.0

    def rest(self) -> None:
        """Hand on, if somebody waits and there was no work for as long as a switch costs. Nothing happens in a turn."""
        if not self._using.acquire(blocking=False):
            return
        try:
            self._settle()
            self._rest()
        finally:
            self._using.release()

    def name_processes(self, *pids: int) -> None:
        """Let processes outside of this one's session count as holders. Call it before they touch the accelerator."""
        others = tuple(one for one in self._holder.others if not one.is_gone()) + tuple(map(Process.of, pids))
        self._holder = dataclasses.replace(self._holder, others=others)
        if (token := self._token) is not None:
            self._turns.note(self.accelerator, token, holder=self._holder)

    def close(self) -> None:
        """Leave: park, and give the turn back. A broken seat gives nothing back. Closing twice is fine."""
        self._closed.set()
        self._changed.set()
        try:
            self._turns.wake(self.accelerator)
        except redis.RedisError as error:
            log.warning("the watching thread of %s ends a little later (%s)", self.owner, type(error).__name__)
        self._watcher.join()
        with self._using:
            if self._turn is not None and not self._broken:
                self._hand_on()
            self._settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _enter(self, patience_s: float | None, gives_up: Callable[[], bool]) -> Turn:
        if self._broken:
            raise Broken(f"{self.owner} can't use {self.accelerator} any more: {self._broken}; it must leave")
        if self._closed.is_set():
            raise NotGranted(f"the seat of {self.owner} at {self.accelerator} is closed")
        if self._turn is not None and self._look(self._turn, idle_s=None):
            self._hand_on()
        if self._turn is None:
            self._come_in(patience_s, gives_up)
        assert self._turn is not None
        return self._turn

    def _look(self, turn: Turn, *, idle_s: float | None) -> bool:
        """Tell whether to hand on."""
        try:
            look = self._turns.look(self.accelerator, turn.token, idle_s=idle_s)
        except Refused as refused:
            self._break("the turn was ended from outside", turn, refused)
        self._wanted = look.hand_on or look.again_s is not None
        return look.hand_on

    def _come_in(self, patience_s: float | None, gives_up: Callable[[], bool]) -> None:
        began = time.monotonic()
        token = self._wait(patience_s, gives_up)
        turn = Turn(accelerator=self.accelerator, owner=self.owner, token=token)
        self._tell("granted", turn, time.monotonic() - began)
        began = time.monotonic()
        try:
            self._parkable.restore()
        except BaseException as failure:
            self._break("restoring failed", turn, failure)
        restore_s = time.monotonic() - began
        self._turn, self._idle_since, self._noted = turn, time.monotonic(), time.monotonic()
        # The first time it was loaded: that is no measure of a switch.
        cost = {"restore": restore_s} if self._has_parked else {}
        try:
            self._turns.note(self.accelerator, token, state="resident", **cost)
        except Refused as refused:
            self._break("the turn was ended from outside", turn, refused)
        self._tell("restored", turn, restore_s)

    def _wait(self, patience_s: float | None, gives_up: Callable[[], bool]) -> int:
        """Stand in line until the turn is granted; return its token."""
        until = float("inf") if patience_s is None else time.monotonic() + patience_s
        prove_at = time.monotonic() + PROVE_S
        self._pay(until, patience_s, gives_up)
        name = self._name = secrets.token_hex(8)
        self._owed = lambda: self._turns.withdraw(self.accelerator, self.owner, name)
        while True:
            self._changed.clear()
            holder = self._holder
            token = self._token = self._turns.ask(self.accelerator, self.owner, self._name, holder)
            if token is not None:
                if self._holder is not holder:
                    self._turns.note(self.accelerator, token, holder=self._holder)
                self._owed = None
                return token
            left = until - time.monotonic()
            if left <= 0 or self._closed.is_set() or gives_up():
                self._settle()
                why = f"not granted within {patience_s} s" if left <= 0 else "it was given up"
                raise NotGranted(f"{self.owner} has no turn on {self.accelerator}: {why}")
            self._changed.wait(min(ASK_S, left))
            if time.monotonic() >= prove_at:
                self._turns.sweep(self.accelerator)
                prove_at = time.monotonic() + PROVE_S

    def _pay(self, until: float, patience_s: float | None, gives_up: Callable[[], bool]) -> None:
        """Tell the store what it is owed before anything else is asked of it."""
        self._settle()
        while self._owed is not None:
            left = until - time.monotonic()
            if left <= 0 or self._closed.is_set() or gives_up():
                why = f"the store did not answer within {patience_s} s"
                if left > 0:
                    why = "it was given up while the store did not answer"
                raise NotGranted(f"{self.owner} has no turn on {self.accelerator}: {why}")
            self._changed.wait(min(ASK_S, left))
            self._changed.clear()
            self._settle()

    def _hand_on(self) -> None:
        """Park, then give the turn back; in this order, or not at all."""
        turn = self._turn
        assert turn is not None
        began = time.monotonic()
        try:
            self._turns.note(self.accelerator, turn.token, state="parking")
        except Refused as failure:
            self._break("the turn had ended before it was parked", turn, failure)
        try:
            self._parkable.park()
            if left := self._parkable.resident_bytes:
                raise RuntimeError(f"{left} bytes are still on the accelerator")
        except BaseException as failure:
            self._break("parking failed", turn, failure)
        park_s, busy_s = time.monotonic() - began, self._busy_s
        self._turn = self._token = None
        self._busy_s, self._wanted, self._has_parked = 0.0, False, True
        self._owed = lambda: self._turns.release(self.accelerator, turn.token, busy_s=busy_s, park_s=park_s)
        self._settle()
        self._tell("parked", turn, park_s)

    def _settle(self) -> None:
        """Tell the store what it is owed; if it doesn't answer, the watching thread tries again."""
        if (owed := self._owed) is None:
            return
        try:
            owed()
        except redis.RedisError as error:
            log.warning("%s could not leave %s yet (%s)", self.owner, self.accelerator, type(error).__name__)
            return
        except Refused:
            # Its first answer was lost, and others have had turns since; or somebody ended it from outside.
            log.info("the turn of %s on %s had ended already", self.owner, self.accelerator)
        self._owed = None

    def _rest(self) -> None:
        if self._turn is None or self._broken:
            return
        if self._look(self._turn, idle_s=time.monotonic() - self._idle_since):
            self._hand_on()

    def _break(self, what: str, turn: Turn, cause: BaseException) -> NoReturn:
        """Be of no use any more. The turn stays: nobody may come where something may still lie."""
        self._broken = f"{what} ({type(cause).__name__}: {cause})"
        self._turn = turn
        log.critical("%s on %s: %s; the process must leave", self.owner, self.accelerator, self._broken)
        try:
            self._turns.note(self.accelerator, turn.token, state="failed")
        except (redis.RedisError, Refused) as error:
            log.warning("the store was not told: %s", error)
        self._tell("failed", turn, 0.0)
        if isinstance(cause, Refused):
            raise cause
        raise Broken(f"{self.owner} on {self.accelerator}: {self._broken}; the process must leave") from cause

    def _tell(self, kind: Literal["granted", "parked", "restored", "failed"], turn: Turn, seconds: float) -> None:
        if self._on_event is None:
            return
        try:
            size = self._parkable.resident_bytes
            self._on_event(Event(kind=kind, turn=turn, seconds=seconds, resident_bytes=size))
        except Exception:
            log.exception("whoever listens to the turns of %s has failed", self.owner)

    def _watch(self) -> None:
        """Wake whoever waits, hand on what rests, report what is used, until closed. Goes on after every failure."""
        pubsub = None
        while not self._closed.is_set():
            try:
                if pubsub is None:
                    pubsub = self._turns.listen(self.accelerator)
                self._hear(pubsub)
                self._attend()
            except redis.RedisError as error:
                log.warning("the turns of %s can't be watched now (%s)", self.owner, type(error).__name__)
                pubsub = None
                self._closed.wait(ASK_S)
            except (Broken, Refused):
                pass
        if pubsub is not None:
            pubsub.close()

    def _hear(self, pubsub: redis.client.PubSub) -> None:
        expects = self._wanted and self._turn is not None
        if pubsub.get_message(timeout=WATCH_WANTED_S if expects else WATCH_S) is not None:
            # A look says whether it was so; during a turn none is taken.
            self._wanted = True
            self._changed.set()

    def _attend(self) -> None:
        # Without a call too: what the store tells may be lost.
        if self._parks_itself or self._owed:
            self.rest()
        turn, began = self._turn, self._began
        if turn is None or self._broken or time.monotonic() - self._noted < NOTE_S:
            return
        self._noted = time.monotonic()
        busy_s = self._busy_s + (time.monotonic() - began if began else 0.0)
        try:
            self._turns.note(self.accelerator, turn.token, busy=busy_s)
        except Refused:
            self.rest()
