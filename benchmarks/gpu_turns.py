"""What parking and restoring costs on an accelerator: state in the shapes of models, against the link.

`python benchmarks/gpu_turns.py` on a machine with a GPU; no network, no store. For each shape it allocates a full
fine-tuning run's state (weights in bfloat16; float32 masters, gradients and both moments) as far as the device has
room, and a LoRA trainer's (weights, which don't change, with adapters of rank 32), parks and restores it as workers do
between turns, and compares every byte. Prints one JSON line a figure: seconds, GB/s, and the share of what one copy of
a pinned gigabyte reaches on the same link. `--device cpu` tries the program itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from openrl.workers.model.arena import Arena
from openrl.workers.model.parking import Cuda, Device, Parking

GB = 1e9
LINK_BYTES = 1 << 30
ROOM = 0.9
"""How much of the device's free memory a state may take."""
LORA_RANK = 32
CYCLES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes, as Qwen3's of that size has them."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    tied: bool = False

    def matrices(self) -> list[tuple[int, int]]:
        """Return the (outputs, inputs) of every weight."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = [
            (query, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, query),
            (self.inner, self.hidden), (self.inner, self.hidden), (self.hidden, self.inner),
        ]  # fmt: skip
        return [(self.vocab, self.hidden)] * (1 if self.tied else 2) + layer * self.layers


SHAPES = {
    "0.6b": Shape(hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8, tied=True),
    "1.7b": Shape(hidden=2048, inner=6144, layers=28, heads=16, kv_heads=8, tied=True),
    "8b": Shape(hidden=4096, inner=12_288, layers=36, heads=32, kv_heads=8),
    "tiny": Shape(hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=512),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Tensors on the device; `changing` are those that training changes between two parks."""

    tensors: list[Tensor]
    changing: list[Tensor]


def full(shape: Shape, device: torch.device) -> State:
    """Return a full run's state: 18 bytes a parameter."""
    sizes = shape.matrices()
    weights = [torch.randn(size, device=device).bfloat16() for size in sizes]
    rest = [torch.randn(size, device=device) for _ in range(4) for size in sizes]
    return State(tensors=[*weights, *rest], changing=[*weights, *rest])


def lora(shape: Shape, device: torch.device) -> State:
    """Return a LoRA trainer's state: base weights, and adapters with moments and gradient on all of the layers."""
    sizes = shape.matrices()
    weights = [torch.randn(size, device=device).bfloat16() for size in sizes]
    pairs = [((LORA_RANK, inputs), (outputs, LORA_RANK)) for outputs, inputs in sizes[1 if shape.tied else 2 :]]
    adapters = [torch.randn(size, device=device) for _ in range(4) for pair in pairs for size in pair]
    return State(tensors=[*weights, *adapters], changing=adapters)


STATES: dict[str, Callable[[Shape, torch.device], State]] = {"full": full, "lora": lora}
BYTES_A_PARAMETER = {"full": 18, "lora": 4}


def digest(tensors: list[Tensor]) -> list[int]:
    """Return a sum of each tensor's bits that changes with any of them; computed where they lie."""
    sums = []
    for tensor in tensors:
        words = tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32).flatten()
        total = 0
        for part in words.split(1 << 26):
            weights = torch.arange(1, len(part) + 1, device=part.device, dtype=torch.int64)
            total = (total * 31 + int((part.long() * weights).sum())) % (1 << 61)
        sums.append(total)
    return sums


def link(device: torch.device, barrier: Callable[[], None]) -> dict[str, float]:
    """Return what one copy of a gigabyte of pinned memory reaches each way, in GB/s."""
    size = LINK_BYTES if device.type == "cuda" else LINK_BYTES >> 5
    there = torch.empty(size, dtype=torch.uint8, device=device)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    out = timed(lambda: host.copy_(there, non_blocking=True), barrier, 5)
    back = timed(lambda: there.copy_(host, non_blocking=True), barrier, 5)
    return {"out_gb_s": size / GB / median(out[1:]), "back_gb_s": size / GB / median(back[1:])}


def timed(call: Callable[[], object], barrier: Callable[[], None], times: int) -> list[float]:
    """Return how long each of some calls takes, in seconds."""
    took = []
    for _ in range(times):
        barrier()
        began = time.perf_counter()
        call()
        barrier()
        took.append(time.perf_counter() - began)
    return took


def measure(name: str, kind: str, device: torch.device, place: Device, reached: dict[str, float]) -> None:
    """Park and restore one state some times; print what it took. Fails where a bit is another afterwards."""
    state = STATES[kind](SHAPES[name], device)
    place.admit(state.tensors)
    parking = Parking(lambda: state.tensors, place)
    size = parking.resident_bytes
    for cycle in range(CYCLES):
        before = digest(state.tensors)
        [park_s] = timed(parking.park, place.barrier, 1)
        place.leave()
        parked = parking.copied_bytes
        [restore_s] = timed(parking.restore, place.barrier, 1)
        if digest(state.tensors) != before:
            sys.exit(f"gpu_turns: {kind} state of {name} came back with other bits")
        line = {
            "figure": "switch", "shape": name, "state": kind, "cycle": cycle, "state_bytes": size,
            "parked_bytes": parked, "park_s": round(park_s, 4), "restore_s": round(restore_s, 4),
            "park_gb_s": round(parked / GB / park_s, 2), "restore_gb_s": round(size / GB / restore_s, 2),
            "park_share_of_link": round(parked / GB / park_s / reached["out_gb_s"], 3),
            "restore_share_of_link": round(size / GB / restore_s / reached["back_gb_s"], 3),
        }  # fmt: skip
        print(json.dumps(line), flush=True)
        for tensor in state.changing:
            tensor.add_(1)
    parking.discard()
    place.leave()


def main() -> None:
    """Measure every shape that fits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=["0.6b", "1.7b", "8b"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --shape tiny --device cpu")
    with tempfile.TemporaryDirectory() as folder:
        place = Cuda(device) if device.type == "cuda" else Arena(Path(folder) / "book", size_bytes=8 << 30)
        reached = link(device, place.barrier)
        print(json.dumps({"figure": "link", "device": str(device), **{k: round(v, 2) for k, v in reached.items()}}))
        for name in args.shape:
            parameters = sum(outputs * inputs for outputs, inputs in SHAPES[name].matrices())
            for kind, each in BYTES_A_PARAMETER.items():
                free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 8 << 30
                if each * parameters > ROOM * free:
                    print(json.dumps({"figure": "switch", "shape": name, "state": kind, "left_out": "no room"}))
                    continue
                measure(name, kind, device, place, reached)


if __name__ == "__main__":
    main()
