"""What adapters have in one layer: their factors, what was computed between the two, and their gradients.

By one table for all layers (`narrow.Sheet`) or, where that doesn't serve, by each module's own factors (`lora`). Knows
a layer's modules by number alone.

Axes: `T` packed tokens, `I` inputs, `O` outputs.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from openrl.workers.model import lora
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.narrow import Sheet
from openrl.workers.model.segments import Segment


class LayerAdapters(Protocol):
    """The adapters' part in one layer: their factors, what was computed between the two, and their gradients."""

    is_first: bool
    """Whether nothing before this layer wants a gradient."""

    def has(self, *which: int) -> bool:
        """Tell whether one of these modules has an adapter; without any named, whether some module has."""

    def leaves(self) -> list[Tensor]:
        """Return the factors whose gradients go through autograd."""

    def gradients(self) -> list[Tensor | None]:
        """Return those of the leaves."""

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        """Add to `y_TO` what the adapters of a module give."""

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        """Take the gradients of a module's factors, and add to `dx_TI` what comes through them."""

    def forget(self) -> None:
        """Let go of what the forward left: it will be computed again."""


class OnSheet:
    """By the sheet of all layers; gradients are gathered, none goes through autograd."""

    def __init__(self, sheet: Sheet, first: int, num_modules: int) -> None:
        """`first` is the number of the layer's first module."""
        self._sheet, self._first, self._num_modules = sheet, first, num_modules
        self._inner: dict[int, Tensor] = {}
        self.is_first = False

    def has(self, *which: int) -> bool:
        return any(self._sheet.has(self._first + one) for one in which or range(self._num_modules))

    def leaves(self) -> list[Tensor]:
        return []

    def gradients(self) -> list[Tensor | None]:
        return []

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        if self._sheet.has(self._first + which):
            self._inner[which] = self._sheet.add(self._first + which, x_TI, y_TO)

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        if which in self._inner:
            self._sheet.back(self._first + which, dy_TO, x_TI, self._inner[which], dx_TI)

    def forget(self) -> None:
        self._inner = {}


class OfTensors:
    """By each module's own factors."""

    def __init__(self, names: Sequence[str], route: Sequence[Segment], gathering: Gathering[Any] | None) -> None:
        """`names` are the layer's modules; without a `gathering` gradients go through autograd."""
        self._shares = [lora.shares(name, route) for name in names]
        self._into: list[list[Tensor]] | None = None
        if gathering is not None:
            rooms = [gathering.pairs(segment.adapter) for segment in route if segment.adapter is not None]
            self._into = [[one for pairs in rooms for one in pairs.get(name, ())] for name in names]
        self._inner: list[Sequence[Tensor]] = [[] for _ in self._shares]
        self._gradients: list[Sequence[Tensor | None]] = [[None] * len(factors) for _, factors in self._shares]
        self.is_first = False

    def has(self, *which: int) -> bool:
        return any(self._shares[one][0] for one in which or range(len(self._shares)))

    def leaves(self) -> list[Tensor]:
        return [] if self._into is not None else [factor for _, factors in self._shares for factor in factors]

    def gradients(self) -> list[Tensor | None]:
        return [] if self._into is not None else [one for mine in self._gradients for one in mine]

    def add(self, which: int, x_TI: Tensor, y_TO: Tensor) -> None:
        spans, factors = self._shares[which]
        if spans:
            self._inner[which] = lora.add_shares(y_TO, x_TI, spans, factors)

    def back(self, which: int, dy_TO: Tensor, x_TI: Tensor, dx_TI: Tensor | None) -> None:
        spans, factors = self._shares[which]
        if spans:
            into = self._into[which] if self._into is not None else ()
            self._gradients[which] = lora.share_gradients(dy_TO, x_TI, spans, factors, self._inner[which], dx_TI, into)

    def forget(self) -> None:
        self._inner = [[] for _ in self._shares]
