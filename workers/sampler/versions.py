"""Which versions of the weights are resident: by directory, each immutable, the recent ones kept.

A directory names one version for ever, so what was loaded under a name can never be stale. Knows neither
torch nor the adapter format: it is given a function that loads.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from openrl.tasks.errors import NotFound, OperationFailed

log = logging.getLogger(__name__)

Adapter = TypeVar("Adapter")


class Versions(Generic[Adapter]):
    """Loads versions on demand; those in use stay, and of the others the `max_idle` most recently used."""

    def __init__(self, load: Callable[[str], Adapter], *, max_idle: int) -> None:
        self._load = load
        self._max_idle = max_idle
        self._uses: dict[str, int] = {}
        self._resident: OrderedDict[str, Adapter] = OrderedDict()

    def acquire(self, directory: str) -> Adapter | None:
        """Return the adapter in `directory` and keep it until `release`; None for the base model ('').

        Raises:
            NotFound: the directory is gone.
            OperationFailed: it is there and can't be loaded.
        """
        if not directory:
            return None
        if directory not in self._resident:
            self._resident[directory] = self._loaded(directory)
        self._resident.move_to_end(directory)
        self._uses[directory] = self._uses.get(directory, 0) + 1
        self._evict()
        return self._resident[directory]

    def release(self, directory: str) -> None:
        """Let go of what one `acquire` returned."""
        if not directory:
            return
        self._uses[directory] -= 1
        if not self._uses[directory]:
            del self._uses[directory]
        self._evict()

    @property
    def resident(self) -> tuple[str, ...]:
        """Return the directories in memory, least recently used first."""
        return tuple(self._resident)

    def _loaded(self, directory: str) -> Adapter:
        try:
            return self._load(directory)
        except NotFound:
            raise
        except FileNotFoundError as failure:
            raise NotFound(f"weights {directory!r} are gone ({failure}); save them for sampling again") from failure
        except Exception as failure:
            log.exception("version %s can't be loaded", directory)
            raise OperationFailed(f"weights {directory!r} can't be loaded: {failure}; save them again") from failure

    def _evict(self) -> None:
        idle = [directory for directory in self._resident if directory not in self._uses]
        for directory in idle[: max(0, len(idle) - self._max_idle)]:
            del self._resident[directory]
