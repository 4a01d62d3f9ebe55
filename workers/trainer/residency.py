"""Which runs lie on the device; the others lie in host memory, the least recently used ones first.

A run that gives way is copied with its moments and its pending gradient into one host buffer, page-locked where the
device is a GPU, and what it had on the device is free from then on. It comes back the same way, with the same bits.
What doesn't compute (a save, a snapshot, a void gradient) treats a parked run as any other, where it lies. On a CPU
the device is the host, and the copies are made all the same.

Knows neither the store nor operations; which runs are in memory at all is `residents`. Not for two threads at once.

Axis: `N` values of some tensors, one behind another.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from openrl.workers.model.lora import Adapter
from openrl.workers.trainer.full import Masters
from openrl.workers.trainer.passes import BOUNDLESS, Room
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.vectors import parts, room_of, vector_of, with_vector

log = logging.getLogger(__name__)

SPARE_BUFFERS = 8
"""Host buffers kept for the next run that gives way; locking pages is slow."""
GPU_SHARE = 0.25
"""Of the memory that a GPU has left beside the base model, what runs may take up if no setting says otherwise."""
STATE = 4
"""A run in training takes this many times its parameters: two moments and a gradient beside them."""


class Residency:
    """The runs of one base model on one device. A run that nobody else holds any more leaves by itself."""

    def __init__(self, device: torch.device, *, most_runs: int = 0, most_bytes: int = 0) -> None:
        """Let so many runs lie on the device, and so many bytes of them. 0: as many as there are on a CPU.

        On a GPU `most_bytes` 0 is a share of what it has left now.
        """
        self._device = device
        self._pinned = device.type == "cuda"
        if self._pinned and not most_bytes:
            most_bytes = int(GPU_SHARE * torch.cuda.mem_get_info(device)[0])
        self.room = Room(runs=most_runs, state_bytes=most_bytes)
        """What lies on the device at most; passes are planned within it."""
        self._stream = torch.cuda.Stream(device) if self._pinned else None
        self._here: WeakKeyDictionary[Run, int] = WeakKeyDictionary()
        """Bytes of the runs on the device, the least recently used one first."""
        self._parked: WeakKeyDictionary[Run, Tensor] = WeakKeyDictionary()
        """The host buffers of the others."""
        self._spare: dict[int, list[Tensor]] = defaultdict(list)
        self._staged: list[Tensor] = []
        self.moves = 0
        """Runs that were copied so far, either way."""

    def __contains__(self, run: Run) -> bool:
        """Tell whether the run lies on the device."""
        return run in self._here

    def __len__(self) -> int:
        return len(self._here)

    def tensors(self, runs: Iterable[Run]) -> list[Tensor]:
        """Return those of the runs' tensors that lie on the device; moments may be kept off it."""
        here = [run for run in runs if run not in self._parked]
        tensors = (tensor for run in here for group in run.tensors() for tensor in with_vector(group))
        return [tensor for tensor in tensors if tensor.device.type == self._device.type]

    def lies_in_host(self, run: Run) -> bool:
        """Tell whether the run gave way, and can be read without the device."""
        return run in self._parked

    @property
    def parked(self) -> int:
        """Runs that lie in host memory."""
        return len(self._parked)

    def admit(self, runs: Iterable[Run]) -> None:
        """Bring these runs onto the device, and others off it while there are too many.

        The runs of one call are always let in, whatever the bounds say: a pass is planned within them.
        """
        if self.room == BOUNDLESS:
            return
        wanted = list(dict.fromkeys(runs))
        for run in wanted:
            self._here.pop(run, None)
            self._here[run] = state_bytes(run.trained)
        try:
            for run in self._surplus(set(wanted)):
                self._park(run)
            for run in wanted:
                if run in self._parked:
                    self._restore(run)
        finally:
            self._settle()

    def _surplus(self, wanted: set[Run]) -> list[Run]:
        """Return the runs to park, the least recently used ones, as few as suffice."""
        runs, size_bytes = len(self._here), sum(self._here.values())
        leaving = []
        for run, run_bytes in list(self._here.items()):
            if self.room.holds(runs, size_bytes):
                break
            if run not in wanted:
                leaving.append(run)
                runs, size_bytes = runs - 1, size_bytes - run_bytes
        return leaving

    def _park(self, run: Run) -> None:
        """Copy a run into host memory and let go of what it had on the device. Without memory it stays."""
        groups = run.tensors()
        rooms = [room_of(group) for group in groups]
        try:
            host_N = self._buffer(sum(rooms))
            for group, host_M in zip(groups, host_N.split(rooms), strict=True):
                self._copy(host_M, vector_of(group))
        except (MemoryError, RuntimeError) as error:
            log.error("run %s stays on the device, there is no memory to park it: %s", run.run_id, error)
            return
        run.lie_on([parts(host_M, group) for group, host_M in zip(groups, host_N.split(rooms), strict=True)])
        del self._here[run]
        self._parked[run] = host_N
        self.moves += 1

    def _restore(self, run: Run) -> None:
        """Copy a parked run back onto the device; its buffer is kept for the next one."""
        views = []
        for group in run.tensors():
            device_M = torch.empty(room_of(group), device=self._device)
            if group:
                self._copy(device_M, vector_of(group))
            views.append(parts(device_M, group))
        run.lie_on(views)
        self._give_back(self._parked.pop(run))
        self.moves += 1

    def _copy(self, to_N: Tensor, from_N: Tensor) -> None:
        """Copy between device and host, on a GPU beside its other work but after what is in hand now."""
        if self._stream is None:
            to_N.copy_(from_N)
            return
        self._staged += (to_N, from_N)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            to_N.copy_(from_N, non_blocking=True)

    def _settle(self) -> None:
        """Wait for the copies: host buffers are read and used again by whoever comes next."""
        if self._stream is not None and self._staged:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._stream.synchronize()
            self._staged.clear()

    def _buffer(self, num: int) -> Tensor:
        spare = self._spare.get(num)
        return spare.pop() if spare else torch.empty(num, pin_memory=self._pinned)

    def _give_back(self, host_N: Tensor) -> None:
        if sum(map(len, self._spare.values())) >= SPARE_BUFFERS:
            self._spare.clear()
        self._spare[host_N.numel()].append(host_N)


def state_bytes(trained: Adapter | Masters | None) -> int:
    """Return what a run takes up on the device while it trains this, in bytes."""
    return STATE * sum(tensor.nbytes for tensor in trained.parameters()) if trained is not None else 0
