"""What a tensor of a full model is apart from its bits: its name, its type, its shape, and how it falls into blocks.

Bits are handled as unsigned integers of the type's own width, in one dimension: no rounding, NaN and -0.0 included.
A block is what one thread works on, so that memory is bounded however large a tensor is. Without torch.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from openrl.tasks.errors import InvalidRequest, shown

Words = NDArray[np.unsignedinteger]
"""The bits of a tensor or of a block of it: uint8, uint16, uint32 or uint64 [num_elements]."""

WIDTHS: Mapping[str, int] = {
    "BF16": 2, "BOOL": 1, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
    "I16": 2, "I32": 4, "I64": 8, "I8": 1, "U16": 2, "U32": 4, "U64": 8, "U8": 1,
}  # fmt: skip
"""Bytes an element, by the type's name in safetensors."""

BLOCK = 1 << 22
"""Elements in a block: part of the format, since digests are taken block by block."""

MAX_TENSORS = 1 << 16
MAX_BYTES = 1 << 42
"""Of a whole model: 4 TiB."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,255}")
_MAX_AXES = 8


@dataclass(frozen=True, slots=True)
class Spec:
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """1 for a scalar."""
        return math.prod(self.shape)

    @property
    def width(self) -> int:
        """Bytes an element."""
        return WIDTHS[self.dtype]

    @property
    def size_bytes(self) -> int:
        """All elements together."""
        return self.num_elements * self.width

    @property
    def block_sizes(self) -> list[int]:
        """Elements in each block; none for an empty tensor."""
        return [min(BLOCK, self.num_elements - start) for start in range(0, self.num_elements, BLOCK)]


def check(name: object, spec: Spec) -> None:
    """Refuse a name or a spec that no tensor of a model has.

    Raises:
        InvalidRequest: it names what is wrong.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(f"{shown(name)} is no tensor's name; it must be 1 to 256 of letters, digits and _ . -")
    if spec.dtype not in WIDTHS:
        raise InvalidRequest(f"tensor {name} has type {shown(spec.dtype)}; it must be one of {', '.join(WIDTHS)}")
    axes = spec.shape
    if len(axes) > _MAX_AXES or any(type(axis) is not int or not 0 <= axis <= MAX_BYTES for axis in axes):
        raise InvalidRequest(f"tensor {name} has shape {shown(axes)}; it must be up to {_MAX_AXES} sizes from 0 on")
    if spec.size_bytes > MAX_BYTES:
        raise InvalidRequest(f"tensor {name} has {spec.size_bytes} bytes; a model may have {MAX_BYTES}")


def check_all(specs: Mapping[str, Spec]) -> None:
    """Refuse a set of tensors that is no model.

    Raises:
        InvalidRequest: it names what is wrong.
    """
    if not 1 <= len(specs) <= MAX_TENSORS:
        raise InvalidRequest(f"a model has 1 to {MAX_TENSORS} tensors, and these are {len(specs)}")
    for name, spec in specs.items():
        check(name, spec)
    total = sum(spec.size_bytes for spec in specs.values())
    if total > MAX_BYTES:
        raise InvalidRequest(f"these tensors have {total} bytes; a model may have {MAX_BYTES}")


def differences(found: Mapping[str, Spec], expected: Mapping[str, Spec]) -> str:
    """Say in a few words how two sets of tensors differ; empty where they don't."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            return f"tensor {name} is missing"
        if name not in expected:
            return f"tensor {name} isn't expected"
        if found[name] != expected[name]:
            return (
                f"tensor {name} is {found[name].dtype} {list(found[name].shape)}, "
                f"not {expected[name].dtype} {list(expected[name].shape)}"
            )
    return ""


def blocks(words: Words) -> list[Words]:
    """Cut a tensor's words into its blocks, which share its memory."""
    return [words[start : start + BLOCK] for start in range(0, len(words), BLOCK)]


@dataclass(frozen=True, slots=True)
class Part:
    """One block of a tensor, and where it lies in its segment."""

    name: str
    number: int
    start: int
    size: int

    def of(self, words: Mapping[str, Words]) -> Words:
        """Its bits, of those of all tensors."""
        return words[self.name][self.number * BLOCK : self.number * BLOCK + self.size]


@dataclass(frozen=True, slots=True)
class Segment:
    """Blocks of one width that are worked on and encoded together, as if they lay one after another."""

    width: int
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Elements of all parts together, up to `BLOCK`."""
        return self.parts[-1].start + self.parts[-1].size

    @property
    def dtype(self) -> np.dtype:
        """Of its words."""
        return np.dtype(f"<u{self.width}")


def segments(specs: Mapping[str, Spec]) -> tuple[Segment, ...]:
    """Join the blocks of all tensors, in the order of widths, names and blocks: each segment takes as many as fit."""
    found: list[tuple[int, list[Part]]] = []
    for name in sorted(specs, key=lambda name: (specs[name].width, name)):
        width = specs[name].width
        for number, size in enumerate(specs[name].block_sizes):
            start = found[-1][1][-1].start + found[-1][1][-1].size if found and found[-1][0] == width else BLOCK
            if start + size > BLOCK:
                found.append((width, []))
                start = 0
            found[-1][1].append(Part(name, number, start, size))
    return tuple(Segment(width, tuple(parts)) for width, parts in found)
