"""From the data of several operations to packed tensors, cut by a token budget. Pure.

All sequences of a micro-batch lie one behind another on one axis `T`, nothing is padded. Sequences of one
owner stay together, so that an adapter has few segments; within an operation they lie by length. Knows
neither adapters nor losses: an owner is any hashable value, an operation is its place in the list.

Axes: `T` tokens of a micro-batch, `K` targets of a position.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from openrl.tasks.messages import Datum

TARGETS = "target_tokens"
OPTIONAL = "weights"
"""The one loss input that may be absent; it then is one for each target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One operation's data and whose it is."""

    owner: Hashable
    data: tuple[Datum, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in its micro-batch: datum number `datum` of its operation, at [start, stop)."""

    datum: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one micro-batch holds of one operation: neighbouring spans whose targets have one width."""

    load: int
    spans: tuple[Span, ...]
    targets: Tensor
    """int64 [n] or [n, K]."""
    inputs: dict[str, Tensor]
    """The loss's other inputs, shaped as the targets."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [span.stop - span.start for span in self.spans]

    @property
    def counts(self) -> Tensor:
        """Which positions [n] a loss looks at: those with an advantage, or with a weight, that isn't 0."""
        values = self.inputs.get("advantages", self.inputs.get(OPTIONAL))
        wanted = torch.ones_like(self.targets, dtype=torch.bool) if values is None else values != 0
        return wanted if wanted.ndim == 1 else wanted.any(1)

    @property
    def start(self) -> int:
        """First token on the packed axis."""
        return self.spans[0].start

    @property
    def stop(self) -> int:
        """One past the last token on the packed axis."""
        return self.spans[-1].stop

    def locate(self, row: int) -> tuple[int, int]:
        """Return (datum, position) of the piece's token number `row`."""
        at = self.start + row
        span = next(span for span in self.spans if at < span.stop)
        return span.datum, at - span.start


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Sequences that go through the model together."""

    tokens: Tensor
    """int64 [T]."""
    lengths: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Packing:
    """How well passes were packed."""

    tokens: int = 0
    """Those of the data."""
    positions: int = 0
    """Those that the model computed."""
    micro_batches: int = 0

    def add(self, batch: MicroBatch) -> None:
        """Count one micro-batch."""
        self.tokens += sum(batch.lengths)
        self.positions += len(batch.tokens)
        self.micro_batches += 1

    @property
    def waste(self) -> float:
        """Share of the positions that were nobody's: 0 as long as nothing is padded."""
        return 1.0 - self.tokens / self.positions if self.positions else 0.0

    def __str__(self) -> str:
        return f"{self.tokens} tokens in {self.micro_batches} micro-batches, waste {100 * self.waste:.1f} %"


def num_tokens(data: Sequence[Datum]) -> int:
    """Return how many tokens the sequences have together."""
    return sum(len(datum.tokens) for datum in data)


def micro_batches(
    loads: Sequence[Load], *, token_budget: int, device: torch.device, side_by_side: int = 1
) -> Iterator[MicroBatch]:
    """Pack the loads into micro-batches, of which `side_by_side` have at most `token_budget` tokens together.

    They are about equally large, and as many as make whole rounds of `side_by_side`; one longer sequence is one by
    itself. A load's own cut depends on nothing but itself when it is alone in the list.
    """
    most = max(1, token_budget // side_by_side)
    total = sum(num_tokens(load.data) for load in loads)
    share = total / (side_by_side * -(-total // (most * side_by_side))) if side_by_side > 1 else total
    batch: list[_Item] = []
    filled = taken = 0
    due = share
    for item in _in_order(loads):
        if batch and (filled + item.length > most or taken + item.length / 2 > due):
            yield _pack(batch, device)
            batch, filled, due = [], 0, due + share
        batch.append(item)
        filled, taken = filled + item.length, taken + item.length
    if batch:
        yield _pack(batch, device)


@dataclass(frozen=True, slots=True)
class _Item:
    load: int
    number: int
    datum: Datum

    @property
    def length(self) -> int:
        return len(self.datum.tokens)

    @property
    def width(self) -> tuple[int, ...]:
        shape: tuple[int, ...] = self.datum.inputs[TARGETS].shape[1:]
        return shape


def _in_order(loads: Sequence[Load]) -> list[_Item]:
    """Owners by first appearance, their operations in order, sequences by width, then longest first."""
    owners = {load.owner: None for load in loads}
    places = {owner: place for place, owner in enumerate(owners)}
    items = [_Item(index, number, datum) for index, load in enumerate(loads) for number, datum in enumerate(load.data)]
    return sorted(items, key=lambda item: (places[loads[item.load].owner], item.load, item.width, -item.length))


def _pack(items: list[_Item], device: torch.device) -> MicroBatch:
    tokens = torch.from_numpy(np.concatenate([item.datum.tokens for item in items]).astype(np.int64))
    pieces, position = [], 0
    for (load, _), group in groupby(items, key=lambda item: (item.load, item.width)):
        members = list(group)
        spans = []
        for item in members:
            spans.append(Span(item.number, position, position + item.length))
            position += item.length
        pieces.append(_piece(load, tuple(spans), [item.datum for item in members], device))
    return MicroBatch(tokens=tokens.to(device), lengths=tuple(item.length for item in items), pieces=tuple(pieces))


def _piece(load: int, spans: tuple[Span, ...], data: list[Datum], device: torch.device) -> Piece:
    names = {name for datum in data for name in datum.inputs} - {TARGETS}
    return Piece(
        load=load,
        spans=spans,
        targets=_joined([datum.inputs[TARGETS] for datum in data], device),
        inputs={name: _joined([_input(datum, name) for datum in data], device) for name in sorted(names)},
    )


def _input(datum: Datum, name: str) -> np.ndarray:
    if name == OPTIONAL and name not in datum.inputs:
        return np.ones(datum.inputs[TARGETS].shape, np.float32)
    return datum.inputs[name]


def _joined(arrays: list[np.ndarray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)
