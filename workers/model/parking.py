"""Tensors off the accelerator and back: copied to host buffers, their storages released, and restored in place.

Knows storages, not what they mean: parameters keep their identity, views stay views of one storage. Host buffers are
made once a size and used again from park to park, pinned for CUDA; all copies of one direction are queued and waited
for together. What hasn't changed since it was restored isn't copied out again. After the trainers' side of "sleep" in
other servers; the protocol is `openrl.timeslice.park`.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

RESIDUE_BYTES = 64 << 20
"""What a process may have left in torch's allocator after it has left a GPU: no state, only what libraries keep."""


class ParkingError(Exception):
    """Tensors could not be parked or restored: whoever holds them must leave the accelerator by ending."""


class Device(Protocol):
    """Where storages lie while they are resident."""

    @property
    def pins(self) -> bool:
        """Whether host buffers are to be pinned."""

    def take(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Give empty storages so many bytes each on the device; raises MemoryError, or torch's own, without room."""

    def admit(self, tensors: Iterable[Tensor]) -> None:
        """Count what was allocated here before it was put under a parking; raises as `take` does."""

    def give_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Release the bytes of storages, so that other processes can have them."""

    def leave(self) -> None:
        """Hear that nothing of this process is there any more; raises ParkingError where that isn't so."""

    def barrier(self) -> None:
        """Wait for all copies."""


class Cuda:
    """A CUDA device of this process."""

    pins = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def take(self, storages: Sequence[tuple[torch.UntypedStorage, int]]) -> None:
        """Allocate in place."""
        for storage, size_bytes in storages:
            storage.resize_(size_bytes)

    def admit(self, tensors: Iterable[Tensor]) -> None:
        """Do nothing: the driver counts."""

    def give_back(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free in place."""
        for storage in storages:
            storage.resize_(0)

    def leave(self) -> None:
        """Let go of what torch's allocator keeps.

        Raises:
            ParkingError: more is left than a residue, which nobody has named: the next holder would find it there.
        """
        torch._C._cuda_clearCublasWorkspaces()  # tens of MB for each thread that has multiplied
        with torch.cuda.device(self._device):
            torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated(self._device)
        if left > RESIDUE_BYTES:
            raise ParkingError(f"{left} bytes are left on {self._device} that were not parked")

    def barrier(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)


@dataclass(slots=True)
class _Parked:
    """One storage's place in host memory. `versions` are those of its tensors when both were last equal."""

    tensors: list[weakref.ref[Tensor]]
    versions: list[int]
    buffer: Tensor
    size_bytes: int


class Parking:
    """The tensors that `tensors` names when they are parked, as one thing that can leave the accelerator.

    `tensors` is asked anew at each park: gradients come and go, an optimizer may replace its moments. Whatever shares a
    storage with one of them must not be touched while parked: that ends the process. A tensor must be changed through
    itself or its views: what is written through `.data` or numpy isn't seen to have changed, and on a CPU memory that
    numpy has seen can't be released.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], device: Device) -> None:
        self._tensors = tensors
        self._device = device
        self._parked: list[tuple[torch.UntypedStorage, _Parked]] = []
        """What is in host memory now, and nowhere else."""
        self._known: dict[int, _Parked] = {}
        """First tensor's id -> where its storage's bytes are in host memory too."""
        self._free: defaultdict[int, list[Tensor]] = defaultdict(list)
        self.copied_bytes = 0
        """How much the last park or restore copied."""

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device."""
        return sum(storage.nbytes() for storage, _ in _storages(self._tensors()))

    @property
    def host_bytes(self) -> int:
        """Bytes of all host buffers, used or not."""
        free = sum(size * len(buffers) for size, buffers in self._free.items())
        return free + sum(known.size_bytes for known in self._known.values())

    def park(self) -> None:
        """Copy what changed to host memory, then release every storage.

        Raises:
            ParkingError: a storage can't be released, or there is no host memory; all tensors are as they were.
        """
        if self._parked:
            return
        found = _storages(self._tensors())
        for storage, tensors in found:
            if not storage.resizable():
                raise ParkingError(f"a tensor of shape {tuple(tensors[0].shape)} has memory that can't be released")
        self._forget()
        self.copied_bytes = 0
        self._device.barrier()  # work on other streams may still be writing
        try:
            parked = [(storage, self._copy_out(storage, tensors)) for storage, tensors in found]
            self._device.barrier()
        except (RuntimeError, MemoryError) as failure:
            self._known.clear()
            raise ParkingError(f"the tensors could not be copied to host memory: {failure}") from failure
        self._parked = parked
        self._free.clear()  # sizes come and go: what wasn't needed now would be kept for ever
        self._device.give_back(storage for storage, _ in found)

    def restore(self) -> None:
        """Bring every storage back in place, bit by bit as it was.

        Raises:
            ParkingError: the device has no room; what is there now may be a part, and the process must leave.
        """
        self.copied_bytes = 0
        try:
            self._device.take([(storage, parked.size_bytes) for storage, parked in self._parked])
            for storage, parked in self._parked:
                _bytes(storage).copy_(parked.buffer, non_blocking=True)
                self.copied_bytes += parked.size_bytes
            self._device.barrier()
        except (RuntimeError, MemoryError) as failure:
            raise ParkingError(f"the tensors could not be brought back: {failure}") from failure
        self._parked = []

    def discard(self) -> None:
        """Release everything without a copy: nobody will need it again."""
        self._parked = []
        self._device.give_back(storage for storage, _ in _storages(self._tensors()))

    def _copy_out(self, storage: torch.UntypedStorage, tensors: list[Tensor]) -> _Parked:
        """Queue the copy of one storage, unless host memory has the same bytes."""
        versions = [_version(tensor) for tensor in tensors]
        known = self._known.get(id(tensors[0]))
        if known is not None and known.size_bytes == storage.nbytes() and _same(known, tensors, versions):
            return known
        size = storage.nbytes()
        buffer = known.buffer if known is not None and known.size_bytes == size else self._buffer(size)
        buffer.copy_(_bytes(storage), non_blocking=True)
        self.copied_bytes += size
        parked = _Parked([weakref.ref(tensor) for tensor in tensors], versions, buffer, size)
        self._known[id(tensors[0])] = parked
        return parked

    def _buffer(self, size: int) -> Tensor:
        if free := self._free[size]:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._device.pins)

    def _forget(self) -> None:
        """Take back the buffers of tensors that are no more."""
        for key, known in list(self._known.items()):
            if known.tensors[0]() is None:
                del self._known[key]
                self._free[known.size_bytes].append(known.buffer)


def owned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors, after giving memory of its own to each whose memory can't be released.

    What safetensors has read is a file mapped into memory. Tensors and parameters keep their identity; views that
    aren't among `tensors` stay with the old memory, so call it before there are any.
    """
    found = list(tensors)
    for storage, sharing in _storages(found):
        if not storage.resizable():
            own = storage.clone()
            for tensor in sharing:
                place = (own, tensor.storage_offset(), tensor.size(), tensor.stride())
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(*place)
    return found


def _storages(tensors: Iterable[Tensor]) -> list[tuple[torch.UntypedStorage, list[Tensor]]]:
    """Return each storage once, with all the tensors that lie in it."""
    found: dict[int, tuple[torch.UntypedStorage, list[Tensor]]] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Return a storage as one tensor of its bytes, without a copy."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _version(tensor: Tensor) -> int:
    """Return the counter of changes in place; -1 for a tensor that keeps none, which counts as changed always."""
    return -1 if tensor.is_inference() else tensor._version


def _same(known: _Parked, tensors: list[Tensor], versions: list[int]) -> bool:
    if -1 in versions or versions != known.versions or len(tensors) != len(known.tensors):
        return False
    return all(reference() is tensor for reference, tensor in zip(known.tensors, tensors, strict=True))
