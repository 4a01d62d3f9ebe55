"""A full model's weights in memory, and which version they are.

Used on both sides: a publisher keeps what it published last, a sampler's process keeps what it serves. The tensors lie
on the CPU; where the model is on an accelerator, they are the host's copy, in the names and shapes of the checkpoint.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights.digests import block_digest, tensor_digest
from openrl.workers.weights.lanes import THREADS, in_order
from openrl.workers.weights.links import Ident
from openrl.workers.weights.specs import Spec, Words, blocks, check_all

_DTYPES: Mapping[torch.dtype, str] = {
    torch.bfloat16: "BF16", torch.bool: "BOOL", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.int8: "I8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
    torch.uint8: "U8",
}  # fmt: skip
_WORDS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


class Resident:
    """Tensors that are patched where they lie. `at` is None while nobody can vouch for them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        """Take tensors on the CPU, contiguous, none sharing memory with another.

        Raises:
            InvalidRequest: one can't be patched in place; it is named.
        """
        self.specs = specs(tensors)
        self.words = {name: words(name, tensor) for name, tensor in tensors.items()}
        _refuse_shared(self.words)
        self.tensors = dict(tensors)
        self.at: Ident | None = None
        self.digests: Mapping[str, str] = {}

    @classmethod
    def blank(cls, shapes: Mapping[str, Spec]) -> Self:
        """Make room for a model whose specs were checked; it is no version until one was loaded."""
        dtypes = {name: dtype for dtype, name in _DTYPES.items()}
        check_all(shapes)
        return cls({name: torch.zeros(spec.shape, dtype=dtypes[spec.dtype]) for name, spec in shapes.items()})

    def settle(self, at: Ident, digests: Mapping[str, str]) -> None:
        """Vouch for the weights: they are this version, with these digests."""
        self.at, self.digests = at, dict(digests)

    def disown(self) -> None:
        """Say that the weights are no version: they are about to be changed, or something went wrong."""
        self.at, self.digests = None, {}

    def verify(self, *, threads: int = THREADS) -> None:
        """Compare every tensor with its digest.

        Raises:
            InvalidRequest: one has changed since; the weights are disowned.
        """
        names = sorted(self.digests)
        found = in_order(lambda name: digest(self.specs[name], self.words[name]), names, threads=threads)
        for name, value in zip(names, found, strict=True):
            if value != self.digests[name]:
                self.disown()
                raise InvalidRequest(f"tensor {name} in memory isn't what was loaded; load the version again")


def specs(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """Type and shape of each tensor.

    Raises:
        InvalidRequest: a name or type that no version can have.
    """
    found = {name: spec(name, tensor) for name, tensor in tensors.items()}
    check_all(found)
    return found


def spec(name: str, tensor: Tensor) -> Spec:
    """Type and shape of a tensor.

    Raises:
        InvalidRequest: a type that no version can have.
    """
    if tensor.dtype not in _DTYPES:
        raise InvalidRequest(f"tensor {name} has type {tensor.dtype}; it must be one of {', '.join(map(str, _DTYPES))}")
    return Spec(_DTYPES[tensor.dtype], tuple(tensor.shape))


def words(name: str, tensor: Tensor) -> Words:
    """The bits of a tensor, sharing its memory.

    Raises:
        InvalidRequest: it isn't on the CPU, or not contiguous.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        raise InvalidRequest(f"tensor {name} is {layout} on {tensor.device}; it must be contiguous on the CPU")
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8).numpy().view(_WORDS[tensor.element_size()])
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().view(_WORDS[tensor.element_size()])


def digest(shape: Spec, bits: Words) -> str:
    """Digest one tensor."""
    return tensor_digest(shape, map(block_digest, blocks(bits)))


def _refuse_shared(all_words: Mapping[str, Words]) -> None:
    """Two names of one memory would be patched twice, which undoes the patch."""
    ends = sorted((found.ctypes.data, found.ctypes.data + found.nbytes, name) for found, name in _filled(all_words))
    for (_, end, name), (start, _, other) in pairwise(ends):
        if start < end:
            raise InvalidRequest(f"tensors {name} and {other} share memory; give tied weights under one name")


def _filled(all_words: Mapping[str, Words]) -> Iterable[tuple[Words, str]]:
    return ((found, name) for name, found in all_words.items() if found.nbytes)
