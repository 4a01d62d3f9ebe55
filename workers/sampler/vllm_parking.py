"""vLLM's memory off the accelerator and back, by its sleep level 1: weights to host memory, its cache forgotten.

Level 2 would forget the weights too, and the places of adapters with them: whoever leaves takes that. What was being
drawn is ended by vLLM; the engine lets it go on from what it had heard, to the same tokens. vLLM frees what its own
allocator has; what is left beside that (contexts, graphs, workspaces) is counted, and above a residue the park has
failed. Needs a GPU: the CPU build takes a call to sleep and does nothing. Not run on a GPU yet:
`benchmarks/gpu_sampler.py` checks it.
docs.vllm.ai/en/latest/features/sleep_mode has the levels.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Protocol

log = logging.getLogger(__name__)

LEVEL, LEVEL_OF_LEAVING = 1, 2
RESIDUE_BYTES = 1 << 30
"""What vLLM may have left in each process: workspaces and graphs, no weights and no cache."""
TIMEOUT_S = 120.0
"""The first sleep locks host pages: 11 s for 8B parameters (vLLM's issue 48337)."""


class ParkingError(Exception):
    """vLLM may have something on the accelerator, or not all that it needs: its processes must end."""


class TookTooLong(ParkingError):
    """The same, and another time it may be through in time."""


class Sleeper(Protocol):
    """What of vLLM's `AsyncLLM` is used."""

    def sleep(self, level: int = 1, mode: Any = "abort") -> Coroutine[Any, Any, None]:
        """End what runs, and put the memory aside."""

    def wake_up(self, tags: list[str] | None = None) -> Coroutine[Any, Any, bool]:
        """Bring the memory back; tells whether all of it is there."""

    def collective_rpc(self, method: str, timeout: float | None = None) -> Coroutine[Any, Any, list[Any]]:
        """Call a method of `vllm_worker.Extension` in each worker."""


class Client(Protocol):
    """What of `vllm_client.Client` is used."""

    @property
    def vllm(self) -> Sleeper:
        """The engine itself."""

    def do(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run one of its calls."""


class VllmParking:
    """All of one vLLM; satisfies `openrl.timeslice.park.Parkable`. Not for two threads at once."""

    def __init__(self, client: Client, *, stopped: Callable[[], None], timeout_s: float = TIMEOUT_S) -> None:
        """`stopped` is told, from any thread, that nothing of what ran goes on by itself.

        Raises:
            ParkingError: vLLM has no memory that it could put aside.
            TookTooLong: nobody knows.
        """
        self._client, self._stopped, self._timeout_s = client, stopped, timeout_s
        self._resident_bytes = 0
        self._count()

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights, cache and graphs on all devices of it, as last counted; 0 once parked."""
        return self._resident_bytes

    def park(self) -> None:
        """End what runs, put weights aside, and count what is left.

        Raises:
            ParkingError: it failed, took too long, or more than a residue is left.
        """
        if self._resident_bytes:
            self._stopped()
            self._sleep(LEVEL)

    def discard(self) -> None:
        """Forget everything, weights too, without a copy: nobody will need it again.

        Raises:
            ParkingError: as `park` does.
        """
        if self._resident_bytes:
            self._sleep(LEVEL_OF_LEAVING)

    def restore(self) -> None:
        """Bring everything back; what is asked from now on is drawn.

        Raises:
            ParkingError: it failed or took too long, or a part of it is still asleep.
        """
        if self._resident_bytes:
            return
        if not self._do(self._client.vllm.wake_up(), "wake up"):
            raise ParkingError("vLLM woke up, and a part of its memory is still asleep")
        self._count()

    def _sleep(self, level: int) -> None:
        self._do(self._client.vllm.sleep(level=level, mode="abort"), "fall asleep")
        awake, beside = self._memory()
        if awake or beside > RESIDUE_BYTES:
            raise ParkingError(f"vLLM sleeps, and {awake} bytes of its own and {beside} others are on the accelerator")
        log.info("vLLM sleeps; %d bytes beside its own memory are left", beside)
        self._resident_bytes = 0

    def _count(self) -> None:
        awake, _ = self._memory()
        if not awake:
            raise ParkingError("vLLM has no memory that it can put aside: it needs a GPU and its sleep mode")
        self._resident_bytes = awake

    def _memory(self) -> tuple[int, int]:
        """Return the bytes that can be put aside and aren't, of all workers, and the most that one has beside them."""
        found = self._do(self._client.vllm.collective_rpc("openrl_memory"), "count its memory")
        return sum(awake for awake, _ in found), max(beside for _, beside in found)

    def _do(self, call: Coroutine[Any, Any, Any], what: str) -> Any:
        try:
            return self._client.do(call).result(self._timeout_s)
        except TimeoutError as failure:
            raise TookTooLong(f"vLLM did not {what} within {self._timeout_s:g} s") from failure
        except Exception as failure:
            raise ParkingError(f"vLLM could not {what}: {failure}") from failure
