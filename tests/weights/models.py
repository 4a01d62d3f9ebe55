"""Small models of every type, steps of them, and the reading of a version, for the tests beside this file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from openrl.workers.weights.publish import Publisher
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident

Model = dict[str, Tensor]
DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8, torch.bool, torch.int64,
    torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def model(seed: int = 0, shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None) -> Model:
    """Random bits, NaN and -0.0 among them."""
    draw = torch.Generator().manual_seed(seed)
    chosen = shapes or {
        "embed.weight": (torch.bfloat16, (64, 8)),
        "layers.0.weight": (torch.bfloat16, (16, 24)),
        "layers.0.scale": (torch.float32, ()),
        "norm.weight": (torch.float32, (8,)),
        "unused": (torch.bfloat16, (0, 4)),
    }
    return {name: _bits(dtype, shape, draw) for name, (dtype, shape) in chosen.items()}


def _bits(dtype: torch.dtype, shape: tuple[int, ...], draw: torch.Generator) -> Tensor:
    room = torch.empty(shape, dtype=dtype)
    size = room.numel() * room.element_size()
    limit = 2 if dtype == torch.bool else 256
    bits = torch.randint(limit, (size,), generator=draw, dtype=torch.uint8)
    return bits.view(dtype).reshape(shape) if size else room


def step(weights: Model, seed: int, density: float = 0.05) -> Model:
    """The same model with about so many elements replaced."""
    draw = torch.Generator().manual_seed(seed)
    after = {}
    for name, tensor in weights.items():
        other = _bits(tensor.dtype, tuple(tensor.shape), draw)
        chosen = torch.rand(tensor.shape, generator=draw) < density
        after[name] = _from(tensor, raw(tensor).where(~chosen.reshape(-1, 1), raw(other)))
    return after


def _from(like: Tensor, bits: Tensor) -> Tensor:
    return bits.reshape(-1).view(like.dtype).reshape(like.shape) if like.numel() else like.clone()


def raw(tensor: Tensor) -> Tensor:
    """Its bytes: uint8 [num_elements, bytes an element]."""
    if not tensor.numel():
        return torch.empty(0, tensor.element_size(), dtype=torch.uint8)
    return tensor.contiguous().reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1)


def same(one: Model, other: Model) -> bool:
    """Equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(raw(one[name]), raw(other[name])) for name in one)


def copied(weights: Model) -> Model:
    return {name: tensor.clone() for name, tensor in weights.items()}


def room(weights: Model) -> Resident:
    """Memory for such a model, which is no version yet."""
    return Resident({name: torch.zeros_like(tensor) for name, tensor in weights.items()})


def reader(home: Path, weights: Model) -> Reader:
    return Reader(home, room(weights), threads=1)


def go(reading: Reader, name: str) -> Model:
    """Bring a reader to a version; return the weights that it has then."""
    with reading.prepare(name) as switch:
        switch.apply(threads=1)
    return reading.resident.tensors


def publish(home: Path, *versions: Model, anchor_every: int = 20) -> Publisher:
    """Publish versions v0, v1 ..."""
    publisher = Publisher(home, anchor_every=anchor_every, threads=1)
    for number, weights in enumerate(versions):
        publisher.publish(f"v{number}", weights, step=number)
    return publisher


def steps(count: int, seed: int = 0, density: float = 0.05) -> list[Model]:
    """A model and what became of it."""
    found = [model(seed)]
    while len(found) < count:
        found.append(step(found[-1], seed=seed + len(found), density=density))
    return found
