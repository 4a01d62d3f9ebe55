"""The adapters' products of a whole pass in a few grouped ones, in place of two small ones a segment.

For an accelerator, where starting a kernel costs more than a small product; a CPU is faster one segment after another
(`lora`). The product is `torch.nn.functional.grouped_mm`: rows of one matrix, cut at offsets, each part times a matrix
of its own, or two matrices cut along the axis that is summed over. No part's numbers reach another's.

Ranks are padded with zeros to the largest one of the pass, and that to a multiple of 8: bfloat16 rows then begin at
16 bytes, as the kernel asks for. Tokens without an adapter are groups of zeros. The padded factors are copied together
for each forward and again for each backward, three kernels a segment: kept from one to the other, every module's would
be in memory at once. Where they would be much larger than the factors themselves, nothing is grouped.

Axes: `T` packed tokens, `G` groups, `R` the padded rank, `I` inputs, `O` outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

log = logging.getLogger(__name__)

Spans = tuple[tuple[int, int, float], ...]
"""Start, stop and scale of each segment, in order and without overlap."""

LEAST_PARTS = 2
"""A single adapter's products are plain ones."""
_ALIGNED = 8
"""Values of bfloat16 in 16 bytes."""
MOST_PADDED = 4
"""Times the factors' own size, each rank counted as a multiple of 8. Ranks 1, 2, 4 and so on to 64 come to 3.1."""


class _Choice:
    way = "auto"


def choose(way: str) -> None:
    """Say where products are grouped in this process: `auto` on an accelerator that can, `on` on a CPU too, `off`."""
    assert way in ("auto", "on", "off"), way
    _Choice.way = way


def serves(x_TI: Tensor, out_features: int, num_parts: int, ranks: Iterable[int] = ()) -> bool:
    """Tell whether the products of so many segments are grouped, of these ranks; without them, of about equal ones."""
    if _Choice.way == "off" or num_parts < LEAST_PARTS or (_Choice.way == "auto" and not x_TI.is_cuda):
        return False
    aligned = x_TI.shape[1] % _ALIGNED == out_features % _ALIGNED == 0
    if not aligned or (x_TI.is_cuda and x_TI.dtype != torch.bfloat16) or not _works(x_TI.device, x_TI.dtype):
        return False
    padded = [_padded(rank) for rank in ranks]
    return len(padded) * max(padded, default=0) <= MOST_PADDED * sum(padded)


class Groups:
    """The segments of one module's input with their factors, laid out for a forward's products, or a backward's."""

    def __init__(self, x_TI: Tensor, out_features: int, spans: Spans, factors: Sequence[Tensor]) -> None:
        """`factors` are A [rank, I] and B [O, rank] of each span, float32; they are rounded to the input's dtype."""
        self._spans, self._ranks = spans, [a_RI.shape[0] for a_RI in factors[::2]]
        self._places, ends = _places(spans, x_TI.shape[0])
        rank = _padded(max(self._ranks))
        self.ends_G = _ends(ends, x_TI.device)
        self.a_GRI = x_TI.new_zeros(len(ends), rank, x_TI.shape[1])
        self.b_GOR = x_TI.new_zeros(len(ends), out_features, rank)
        """With the scale."""
        for place, (*_, scale), own, a_RI, b_OR in zip(
            self._places, spans, self._ranks, factors[::2], factors[1::2], strict=True
        ):
            self.a_GRI[place, :own].copy_(a_RI)
            self.b_GOR[place, :, :own].copy_(b_OR * scale)

    def add(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Add every adapter's share to `y_TO`; return `x A^T` [T, R], which the gradients need."""
        h_TR = grouped_mm(x_TI, self.a_GRI.transpose(1, 2), offs=self.ends_G)
        y_TO += grouped_mm(h_TR, self.b_GOR.transpose(1, 2), offs=self.ends_G)
        return h_TR

    def gradients(self, dy_TO: Tensor, x_TI: Tensor, h_TR: Tensor, dx_TI: Tensor | None) -> list[Tensor]:
        """Return the gradients of A and B of each span, float32; add theirs to the input's, if that is asked for."""
        dh_TR = grouped_mm(dy_TO, self.b_GOR, offs=self.ends_G)
        if dx_TI is not None:
            dx_TI += grouped_mm(dh_TR, self.a_GRI, offs=self.ends_G)
        da_GRI = grouped_mm(dh_TR.t(), x_TI, offs=self.ends_G)
        db_GRO = grouped_mm(h_TR.t(), dy_TO, offs=self.ends_G)
        gradients: list[Tensor] = []
        for place, (*_, scale), own in zip(self._places, self._spans, self._ranks, strict=True):
            gradients += da_GRI[place, :own].float(), (scale * db_GRO[place, :own].float()).t().contiguous()
        return gradients


def _padded(rank: int) -> int:
    return -(-rank // _ALIGNED) * _ALIGNED


def _places(spans: Spans, total: int) -> tuple[list[int], tuple[int, ...]]:
    """Return which group each span is, and where every group ends: what lies between spans is a group as well."""
    places: list[int] = []
    ends: list[int] = []
    for start, stop, _ in spans:
        if start > (ends[-1] if ends else 0):
            ends.append(start)
        places.append(len(ends))
        ends.append(stop)
    if ends[-1] < total:
        ends.append(total)
    return places, tuple(ends)


@lru_cache(maxsize=64)
def _ends(ends: tuple[int, ...], device: torch.device) -> Tensor:
    """Return them on the device: every module of a pass asks for the same, and copying them there waits for it."""
    return torch.tensor(ends, dtype=torch.int32, device=device)


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Try the product once: whether it is there depends on the chip and on how torch was built."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return False
    x_TI = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        groups = Groups(x_TI, 16, ((0, 8, 1.0), (8, 16, 1.0)), [x_TI[:8], x_TI.t()[:, :8]] * 2)
        h_TR = groups.add(torch.zeros_like(x_TI), x_TI)
        groups.gradients(x_TI, x_TI, h_TR, torch.zeros_like(x_TI))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except (RuntimeError, NotImplementedError) as error:
        log.warning(
            "adapters are computed one by one, there are no grouped products on %s in %s: %s", device, dtype, error
        )
        return False
    return True
