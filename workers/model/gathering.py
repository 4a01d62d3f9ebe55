"""Where the gradients of adapters go that layers compute themselves, beside autograd.

Through autograd each factor would be an end of the graph, its gradient a tensor of its own, and all of them would be
copied once more to lie together. Here a layer adds what it has to the memory where it will stay. One for each
micro-batch, in the thread that computes it.
"""

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from openrl.workers.weights.adapter import Adapter

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Gradients of A and B, by module."""


class Gathering:
    """The gradients of the adapters in one forward and its backward."""

    def __init__(self, rooms: Mapping[Adapter | None, Callable[[], Sequence[Tensor]]]) -> None:
        """`rooms` make zeros in the shapes of an adapter's parameters, in order, for each that may have tokens."""
        self._makers = rooms
        self._pairs: dict[Adapter, Pairs] = {}
        self.rooms: dict[Adapter, Sequence[Tensor]] = {}
        """What was gathered in, of each adapter that had tokens."""
        self.end: Tensor | None = None
        """Where the backward has to reach for all of it to be there; None: no layer had an adapter."""

    def of(self, adapter: Adapter) -> Pairs:
        """Return where the gradients of an adapter are added."""
        if adapter not in self._pairs:
            room = self.rooms[adapter] = self._makers[adapter]()
            tensors = iter(room)
            self._pairs[adapter] = {name: (next(tensors), next(tensors)) for name in adapter.weights}
        return self._pairs[adapter]
