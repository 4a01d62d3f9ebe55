"""This process's accelerator: when it may be used, and what of this process lies there.

With OPENRL_ACCELERATOR (a claim's name) in the environment all device work is done in turns, and between two turns of
ours everything that was made known here (`hold`, `add`) may be parked: nobody may touch it then. Without it every
call does nothing and costs nothing. Whoever can't park or come back leaves: the process ends, its operations stay in
the journal, and a successor does them again from the last snapshot; those that have ended too many in that way fail.

Knows no engine. Importing it imports no torch: an engine with its own memory (vLLM's) brings its own `Parkable`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from openrl.tasks import turn_events
from openrl.tasks.accelerator import AcceleratorTask
from openrl.tasks.errors import OpenRLError
from openrl.tasks.store import Store, translated
from openrl.timeslice.errors import Broken, Refused
from openrl.timeslice.park import Parkable
from openrl.timeslice.seat import Event, Seat
from openrl.timeslice.turn import Turns
from openrl.workers.model.settings import STAYS, AcceleratorSettings, book_path, half_of_memory
from openrl.workers.model.whole_process import WholeProcess

if TYPE_CHECKING:
    from torch import Tensor

    from openrl.workers.model.parking import Device

log = logging.getLogger(__name__)

LEAVE_S = 0.5
"""So long may Celery take to send what went wrong before the process ends."""


class Accelerator:
    """The one of a process that has it to itself: nothing is asked, nothing is parked."""

    shared = False
    """Whether others take turns on it, so that no other thread of ours may touch what lies there."""

    @classmethod
    def of(cls, store: Store, settings: AcceleratorSettings, *, owner: str) -> Accelerator:
        """Return what the settings ask for. `owner` is who is charged for turns: the worker's name.

        Raises:
            ValueError: this process can't take turns; the text says why.
        """
        if settings.name:
            return SharedAccelerator(store, settings, owner=owner)
        if settings.context != STAYS:
            log.info("OPENRL_ACCELERATOR_CONTEXT has no effect: %s takes no turns", owner)
        return cls()

    @contextmanager
    def turn(self, *, patience_s: float | None = None, gives_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Use the device in the body of the `with`; in the same thread it may be nested.

        Raises:
            NotGranted: the patience is at its end, it was given up, or the accelerator is closed.
            StoreUnavailable: nothing can be granted now.
            Refused, Broken: it must not be used any more; the process is about to end.
        """
        yield

    def hold(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """Make tensors known, in the turn in which they were made: they are parked between turns.

        `tensors` names them whenever it is asked, from any thread: they may come and go. Each is to be changed through
        itself or its views, never through `.data`; views of what is held are taken after this call.
        """

    def add(self, parkable: Parkable) -> None:
        """Make known what isn't plain tensors, in the turn in which it came to lie there."""

    def name_processes(self, *pids: int) -> None:
        """Count processes outside of this one's session, before they touch the accelerator."""

    def close(self) -> None:
        """Leave for good: nothing that lies there is needed any more; give the turn back."""


class SharedAccelerator(Accelerator):
    """One that several processes use in turns."""

    shared = True

    def __init__(
        self,
        store: Store,
        settings: AcceleratorSettings,
        *,
        owner: str,
        turns: Turns | None = None,
        seat: Callable[..., Seat] = Seat,
        leave: Callable[[], object] | None = None,
    ) -> None:
        """`leave` ends the process; `turns` and `seat` say how turns are cut and who takes them.

        Raises:
            ValueError: what the settings ask for can't be had here.
        """
        self._settings = settings
        self._rest = WholeProcess.of(settings, owner=owner)
        self._book = book_path(store.settings.data_dir, settings.name)
        self._device: Device | None = None
        self._held: list[Callable[[], Iterable[Tensor]]] = []
        self._parts: list[Parkable] = []
        self._is_leaving = False
        self._leave = leave or _leave_soon
        self._user: int | None = None
        """The thread that has the turn."""
        self._seat = seat(turns or Turns(store.redis), settings.name, owner, self, on_event=self._tell)
        AcceleratorTask.accelerator = settings.name
        log.info("%s takes turns on %s", owner, settings.name)

    @contextmanager
    def turn(self, *, patience_s: float | None = None, gives_up: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """See `Accelerator.turn`."""
        if self._user == threading.get_ident():
            yield
            return
        with ExitStack() as held:
            with translated():
                held.enter_context(self._seat.turn(patience_s=patience_s, gives_up=gives_up))
            self._user = threading.get_ident()
            try:
                yield
            finally:
                self._user = None

    @property
    def device(self) -> Device:
        """Where tensors of this process lie while they are resident: a GPU, or what stands for one on a CPU."""
        import torch

        from openrl.workers.model.arena import Arena
        from openrl.workers.model.parking import Cuda

        if self._device is None:
            if torch.cuda.is_available():
                self._device = Cuda(torch.device("cuda", torch.cuda.current_device()))
            else:
                self._book.parent.mkdir(mode=0o700, exist_ok=True)
                self._device = Arena(self._book, size_bytes=self._settings.size_bytes or half_of_memory())
        return self._device

    def hold(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """See `Accelerator.hold`."""
        from openrl.workers.model.parking import Parking, owned

        self.device.admit(owned(tensors()))
        if not self._held:  # one parking for all: what two of them name is moved once
            self._parts.append(Parking(lambda: owned(each for named in self._held for each in named()), self.device))
        self._held.append(tensors)

    def add(self, parkable: Parkable) -> None:
        """See `Accelerator.add`."""
        self._parts.append(parkable)

    def name_processes(self, *pids: int) -> None:
        """See `Accelerator.name_processes`. Raises ValueError where all of theirs is to be put aside and can't be."""
        if self._rest is not None:
            self._rest.is_of(pids)
        self._seat.name_processes(*pids)

    def close(self) -> None:
        """See `Accelerator.close`. What a broken one leaves behind ends with the process."""
        self._is_leaving = True
        try:
            with translated():
                self._seat.close()
        except (Broken, Refused, OpenRLError) as trouble:
            log.warning("a turn ends with this process: %s", trouble)

    # What the seat parks

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything that was made known, on the device."""
        return sum(part.resident_bytes for part in self._parts)

    def park(self) -> None:
        """Take everything off the device; when leaving, without keeping it where a part can do that."""
        for part in reversed(self._parts):
            leave = getattr(part, "discard", part.park) if self._is_leaving else part.park
            leave()
        if self._device is not None:
            self._device.leave()
        if self._rest is not None and not self._is_leaving:
            self._rest.park()  # last: nothing can be called on the device after it

    def restore(self) -> None:
        """Bring everything back."""
        if self._rest is not None:
            self._rest.restore()
        for part in self._parts:
            part.restore()

    def _tell(self, event: Event) -> None:
        log.info("%s on %s: %.1f ms", event.kind, self._settings.name, event.seconds * 1e3)
        turn_events.tell(event)
        if event.kind == "failed":
            self._leave()


def _leave_soon() -> None:
    """End as if killed, handing nothing back: what is in doubt must not be written anywhere."""
    threading.Timer(LEAVE_S, os._exit, (1,)).start()
