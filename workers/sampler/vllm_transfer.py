"""How a full run's weights get into vLLM's processes: from memory that the sampler's process shares with them.

A way of transfer for vLLM's own weight-update calls. Tensors are in the checkpoint's names and shapes; how they lie in
vLLM's fused parameters is left to its `load_weights`, which copies them there in place. For models of plain linear
layers on a GPU: the CPU build packs weights anew where it loads them, and would draw from the old ones.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from openrl.workers.sampler.vllm_worker import Extension

log = logging.getLogger(__name__)

NAME = "openrl_host"
Place = tuple[str, str, list[int], int]
"""A tensor's name, type as torch calls it, shape, and the byte where it begins."""


@dataclass
class Shared(WeightTransferInitInfo):
    """The shared memory, as a file, and what lies where in it."""

    path: str
    size_bytes: int
    places: list[Place]


@dataclass
class Touched(WeightTransferUpdateInfo):
    """The tensors that are others now."""

    names: list[str]


class HostTransfer(WeightTransferEngine[Shared, Touched]):
    """Copies tensors from shared memory to where the model has them."""

    init_info_cls = Shared
    update_info_cls = Touched
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Shared) -> None:
        """Map the memory; its file may be removed after that. Pinned, so that copies need not pass another buffer."""
        self._memory = mapped(init_info.path, init_info.size_bytes)
        self._tensors = views(self._memory, init_info.places)
        if self.device.type == "cuda":
            status = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), init_info.size_bytes, 0))
            if status:
                log.warning("the shared memory can't be pinned (CUDA error %d): updates take longer", status)

    def start_weight_update(self) -> None:
        """Refuse what would be reported as done and be wrong."""
        if self.device.type != "cuda":
            raise RuntimeError("vLLM's weights can only be changed on a GPU")

    def receive_weights(self, update_info: Touched) -> None:
        """Copy the touched tensors; if they are all there are, nothing in the model may be left as it was."""
        loaded = set(self.model.load_weights(self._moved(update_info.names)) or ())
        if update_info.names and not loaded:
            raise RuntimeError(f"vLLM's model took none of {len(update_info.names)} tensors")
        if self._tensors.keys() <= set(update_info.names):
            missed = sorted(name for name, _ in self.model.named_parameters() if name not in loaded)
            if missed:
                raise RuntimeError(f"vLLM's model has {len(missed)} parameters that no tensor is for, as {missed[0]}")

    def finish_weight_update(self) -> None:
        """Wait until everything is where it belongs."""
        torch.accelerator.synchronize()

    def shutdown(self) -> None:
        """Give the memory back."""
        self._tensors = {}

    def _moved(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name in names:
            yield name, self._tensors[name].to(self.device, non_blocking=True)


class FullExtension(Extension):
    """What the workers of a full run get. Importing this module lets vLLM know the way of transfer."""


def mapped(path: str, size_bytes: int) -> Tensor:
    """Return a file as bytes in memory that every process which maps it shares."""
    return torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8)


def views(memory: Tensor, places: Sequence[Place]) -> dict[str, Tensor]:
    """Return the tensors that lie in shared memory."""
    found = {}
    for name, kind, shape, start in places:
        dtype: torch.dtype = getattr(torch, kind)
        count = torch.Size(shape).numel()
        found[name] = memory[start : start + count * dtype.itemsize].view(dtype).view(list(shape))
    return found


WeightTransferEngineFactory.register_engine(NAME, __name__, HostTransfer.__name__)
