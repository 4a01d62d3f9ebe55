"""Which versions of the weights are resident: by directory, each immutable, the recent ones kept.

They are loaded one after another in a thread of their own, beside the steps. A directory names one version for ever,
so what was loaded under a name can never be stale. Knows neither torch nor the adapter format: it is given a function
that loads.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from openrl.tasks.errors import NotFound, OperationFailed
from openrl.workers.weights import layout

log = logging.getLogger(__name__)

Adapter = TypeVar("Adapter")


class Versions(Generic[Adapter]):
    """Loads versions on demand; those in use stay, and of the others the `max_idle` most recently used.

    One that wasn't used for `idle_s` leaves with the next `tidy`: whoever sampled from it may have vanished.
    """

    def __init__(
        self,
        load: Callable[[str], Adapter],
        *,
        max_idle: int,
        idle_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        unload: Callable[[Adapter], object] = lambda adapter: None,
        beside: bool = True,
    ) -> None:
        """`load` is called in another thread; everything else here belongs to the thread that calls it.

        `unload` is told of what leaves memory, in either. Not `beside`: `load` is called where a version is acquired,
        and none is foreseen, since what it is loaded onto may be another's at any other time.
        """
        self._load = load
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._clock = clock
        self._unload = unload
        self._released: dict[str, float] = {}
        self._uses: dict[str, int] = {}
        self._foreseen: set[str] = set()
        """Those that nobody has asked for yet."""
        self._resident: OrderedDict[str, Future[Adapter]] = OrderedDict()
        self._beside = beside
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="versions") if beside else _Here()

    def acquire(self, directory: str) -> Future[Adapter]:
        """Return the adapter in `directory`, loaded or to be, and keep it until `release`.

        What it may raise is:
            NotFound: the directory is gone.
            OperationFailed: it is there and can't be loaded.
        """
        future = self._resident.get(directory)
        if future is None or _failed(future):
            future = self._resident[directory] = self._loader.submit(loaded, self._load, directory)
        self._resident.move_to_end(directory)
        self._foreseen.discard(directory)
        self._released.pop(directory, None)
        self._uses[directory] = self._uses.get(directory, 0) + 1
        self._evict()
        return future

    def foresee(self, directory: str) -> None:
        """Load a new version before it is asked for, if an earlier one of its run was, and is here.

        Not while others are loading, which somebody waits for. What goes wrong with it is told to whoever asks.
        """
        family = directory.rpartition("/")[0]
        asked_for = [one for one in self._resident if one not in self._foreseen]
        busy = not self._beside or any(not future.done() for future in self._resident.values())
        if directory in self._resident or busy or all(one.rpartition("/")[0] != family for one in asked_for):
            return
        self.acquire(directory)
        self.release(directory)
        self._foreseen.add(directory)

    def release(self, directory: str) -> None:
        """Let go of what one `acquire` returned."""
        self._uses[directory] -= 1
        if not self._uses[directory]:
            del self._uses[directory]
            self._released[directory] = self._clock()
        self._evict()

    def tidy(self) -> None:
        """Let go of the versions that nobody has used for a while."""
        before = self._clock() - self._idle_s
        for directory in [name for name, at in self._released.items() if at <= before]:
            if directory not in self._uses:
                log.info("version %s leaves memory: not used for %.0f s", directory, self._idle_s)
                self._drop(directory)

    def adapters(self) -> list[Adapter]:
        """Return what is in memory. Any thread may ask."""
        return [one.result() for one in list(self._resident.values()) if one.done() and not one.exception()]

    @property
    def resident(self) -> tuple[str, ...]:
        """Return the directories in memory, least recently used first."""
        return tuple(self._resident)

    def _evict(self) -> None:
        idle = [directory for directory in self._resident if directory not in self._uses]
        surplus = idle[: max(0, len(idle) - self._max_idle)]
        for directory in [*surplus, *(one for one in idle[len(surplus) :] if _failed(self._resident[one]))]:
            self._drop(directory)

    def _drop(self, directory: str) -> None:
        future = self._resident.pop(directory)
        if not future.cancel():
            future.add_done_callback(self._unloaded)
        self._foreseen.discard(directory)
        self._released.pop(directory, None)

    def _unloaded(self, future: Future[Adapter]) -> None:
        if future.exception() is None:
            self._unload(future.result())


class _Here(Executor):
    """Calls at once, in the thread that asks."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as failure:
            future.set_exception(failure)
        return future


def loaded(load: Callable[[str], Adapter], directory: str) -> Adapter:
    """Load a version, and say so that a client understands it where that can't be done.

    Raises:
        NotFound: the directory is gone.
        OperationFailed: it is there and can't be loaded.
    """
    try:
        return load(directory)
    except NotFound:
        raise
    except Exception as failure:
        error_id = secrets.token_hex(6)
        log.exception("error %s: version %s can't be loaded", error_id, directory)
        what = layout.title(directory)
        if isinstance(failure, FileNotFoundError):
            raise NotFound(f"{what} is gone (error {error_id}); save it for sampling again") from failure
        raise OperationFailed(f"{what} can't be loaded (error {error_id}); save it again") from failure


def _failed(future: Future[Adapter]) -> bool:
    return future.done() and future.exception() is not None
