"""What a forward_backward request holds, and the rules that protobuf and JSON bodies share.

Whether the values suit a loss and a model is checked in `openrl.app.checks`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from openrl.tasks.errors import InvalidRequest, TooLarge, shown
from openrl.tasks.losses import FLOAT_INPUTS
from openrl.tasks.wire.tensors import FLOAT32, INT32, INT64, sealed

MAX_DATUMS = 8192
"""Datums of one request; the SDK sends at most 1024 at once."""

_EXACT_IN_FLOAT32 = 1 << 24
"""Whole numbers up to this are exact in float32."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One training sequence, its arrays read-only (copy them before torch sees them).

    `tokens`: int32 [N]. `inputs`: loss inputs by name, int64 or float32, [N] or [N, K], dense.
    """

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Datum) or self.inputs.keys() != other.inputs.keys():
            return False
        pairs = [(self.tokens, other.tokens), *((array, other.inputs[name]) for name, array in self.inputs.items())]
        return all(mine.dtype == its.dtype and np.array_equal(mine, its) for mine, its in pairs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """A tensor [N, K] in the layout it was sent in: all cells row by row, or those listed in compressed sparse rows.

    `crow` (row pointers) and `columns` are None where it is dense.
    """

    values: np.ndarray
    shape: tuple[int, int]
    crow: np.ndarray | None = None
    columns: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """The row of each cell, growing."""
        num_rows, width = self.shape
        return np.repeat(np.arange(num_rows), width if self.crow is None else np.diff(self.crow))


class LossCall(Protocol):
    """What a forward_backward computes; the request and the queued message both are one."""

    @property
    def data(self) -> tuple[Datum, ...]: ...

    @property
    def loss_fn(self) -> str: ...

    @property
    def loss_fn_config(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackwardRequest:
    """A decoded request; `model_id` is empty and `seq_id` 0 where the body had none."""

    model_id: str
    seq_id: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)
    forward_only: bool = False


def refuse_crowd(number: int, limit: int, what: str) -> None:
    """Refuse more parts than any SDK sends, before looking into them: each costs far more than its bytes."""
    if number > limit:
        raise TooLarge(f"the request has {number} {what}; at most {limit} are allowed: send fewer datums at once")


def joined(chunks: Sequence[np.ndarray]) -> np.ndarray:
    """Return the tokens of all chunks of a datum or prompt, in order."""
    if len(chunks) == 1:
        return chunks[0]
    return sealed(np.concatenate([np.empty(0, INT32), *chunks]))


def by_key(name: str, array: np.ndarray) -> np.ndarray:
    """Read whole numbers as float32 where the name asks for reals and none of them changes.

    numpy users send integer weights; what float32 would round stays int64 and is refused by the checks.
    """
    if name not in FLOAT_INPUTS or array.dtype != INT64:
        return array
    if array.max(initial=0) > _EXACT_IN_FLOAT32 or array.min(initial=0) < -_EXACT_IN_FLOAT32:
        return array
    return sealed(array.astype(FLOAT32))


def setting(name: str, value: object) -> float:
    """Return one number of `loss_fn_config`; no loss served takes a text."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"loss_fn_config[{shown(name)}] must be a number, not {shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(f"loss_fn_config[{shown(name)}] is too large a number") from error


def unsupported_chunk(kind: object, where: str) -> InvalidRequest:
    """Return the refusal of an image or another chunk that isn't text."""
    named = shown(kind) if kind else "no kind"
    return InvalidRequest(f"{where} is a chunk of {named}; only 'encoded_text' is supported")
