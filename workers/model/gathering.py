"""Where the gradients of adapters go that layers compute themselves, beside autograd.

Through autograd each factor would be an end of the graph, its gradient a tensor of its own, and all of them would be
copied once more to lie together. Here a layer adds what it has to the memory where it will stay. One for each
micro-batch, in the thread that computes it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from openrl.workers.weights.adapter import Adapter


class Room(Protocol):
    """The gradients of an adapter's parameters, in their order, each float32 and as the parameter lies."""

    def __iter__(self) -> Iterator[Tensor]: ...

    def places(self) -> Sequence[int]:
        """Return their addresses."""


AnyRoom = TypeVar("AnyRoom", bound=Room)

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Gradients of A and B, by module."""


class Gathering(Generic[AnyRoom]):
    """The gradients of the adapters in one forward and its backward."""

    def __init__(self, rooms: Mapping[Adapter | None, Callable[[], AnyRoom]]) -> None:
        """`rooms` make zeros in the shapes of an adapter's parameters, in order, for each that may have tokens."""
        self._makers = rooms
        self._pairs: dict[Adapter, Pairs] = {}
        self.rooms: dict[Adapter, AnyRoom] = {}
        """What was gathered in, of each adapter that had tokens."""
        self.end: Tensor | None = None
        """Where the backward has to reach for all of it to be there; None: no layer had an adapter."""

    def room(self, adapter: Adapter) -> AnyRoom:
        """Return where the gradients of an adapter are added."""
        if adapter not in self.rooms:
            self.rooms[adapter] = self._makers[adapter]()
        return self.rooms[adapter]

    def pairs(self, adapter: Adapter) -> Pairs:
        """Return the same by module."""
        if adapter not in self._pairs:
            tensors = iter(self.room(adapter))
            self._pairs[adapter] = {name: (next(tensors), next(tensors)) for name in adapter.weights}
        return self._pairs[adapter]
