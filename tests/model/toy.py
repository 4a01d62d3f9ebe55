"""A model whose whole state is a chain of digests: what took effect, in which order, is in its last link.

Says twice the same thing that the trainer says with tensors: what an operation does to a run, and what one that
failed, was refused, or never arrived does to it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from openrl.tasks.messages import (
    CreateModel,
    Datum,
    Forward,
    ForwardBackward,
    LoadWeights,
    Message,
    OptimStep,
    Sample,
    SaveWeights,
    SaveWeightsForSampler,
)

BASE = "tiny/base"
BROKEN = "broken"
"""The loss of a forward_backward that fails, whoever carries it out."""


@dataclass(frozen=True, slots=True)
class State:
    """A run after some operation. `seen` is all that ever happened to the weights; `gradient` what waits for a step."""

    weights: str = ""
    gradient: tuple[str, ...] = ()
    void: bool = False

    @property
    def mark(self) -> bytes:
        """Tell this state from every other."""
        return _mark(self.weights, *self.gradient, str(self.void)).encode()


def _mark(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def carried_out(state: State, seq: int, message: Message, disk: dict[str, State]) -> tuple[State, bytes | None]:
    """Return the state after an operation and its result; None as a result is a failure."""
    if isinstance(message, CreateModel):
        state = State(weights=_mark("new", str(message.seed)))
    elif isinstance(message, Forward):
        pass
    elif isinstance(message, ForwardBackward):
        if message.loss_fn == BROKEN:
            return failed(state, message.kind), None
        if not state.void:
            state = replace(state, gradient=(*state.gradient, _mark(str(seq), str(len(message.data[0].tokens)))))
    elif isinstance(message, OptimStep):
        if state.void or not state.gradient:
            return failed(state, message.kind), None
        state = State(weights=_mark(state.weights, *state.gradient, str(seq), str(message.learning_rate)))
    elif isinstance(message, LoadWeights):
        if message.checkpoint_dir not in disk:
            return state, None
        state = State(weights=_mark(disk[message.checkpoint_dir].weights, str(seq)))
    return state, state.mark + (b"." * 600 if isinstance(message, SaveWeights) else b"")


def failed(state: State, kind: str) -> State:
    """Return the state after an operation that failed while it was carried out."""
    if kind == ForwardBackward.kind:
        return State(weights=state.weights, void=True)
    if kind == OptimStep.kind:
        return State(weights=state.weights)
    return state


def withdrawn(state: State, *, voids: bool) -> State:
    """Return the state after an operation that was refused, cancelled, or never arrived."""
    return State(weights=state.weights, void=True) if voids else state


def operation(kind: int, seq: int, *, sampler_id: str, directory: str, other: int = 0) -> Message:
    """Return an operation by number; `other` makes a different one of it."""
    data = (Datum(tokens=np.zeros(1 + kind + other, np.int32), inputs={}),)
    if kind < 3:
        return ForwardBackward(data=data, loss_fn="cross_entropy")
    if kind == 3:
        return ForwardBackward(data=data, loss_fn=BROKEN)
    if kind == 4:
        return Forward(data=data, loss_fn="cross_entropy")
    if kind < 7:
        return OptimStep(learning_rate=0.5 + other)
    if kind == 7:  # too large for the store, as its result is
        return SaveWeights(name=f"n{seq}", user_metadata={"x": "y" * (900 + other)})
    if kind == 8:
        return SaveWeightsForSampler(sampler_id=sampler_id, ttl_seconds=60 + other)
    return LoadWeights(checkpoint_path=f"tinker://{seq + other}", checkpoint_dir=directory, with_optimizer=False)


def prompt(number: int, *, other: int = 0) -> Sample:
    """Return a request by number; each third is too large for the store."""
    return Sample(
        adapter_dir="", prompt=(number + other,) * (900 if number % 3 == 2 else 1), num_samples=1, seed=number
    )


def drawn(message: Sample) -> bytes:
    """Return what is drawn for a request, whoever draws it."""
    return _mark("drawn", str(message.seed), str(message.prompt[0])).encode()
