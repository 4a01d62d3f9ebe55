"""A run as it is resident in a trainer: weights, moments, gradient, position.

Holds what must stay true together: a gradient that is void is never stepped on, and the reason is told
exactly once. Knows nothing of the store, of files, or of how a gradient is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import OptimStep
from openrl.workers.model.lora import Adapter
from openrl.workers.trainer.optimizer import Moments, adamw_step

_SHOWN = 200
"""How much of a failure's text is told again."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Run:
    """One LoRA run. Its identity is the object itself: a run that is rebuilt is another object."""

    tenant: str
    run_id: str
    token: int
    """The fencing token of the claim under which this process serves it."""
    applied: int = -1
    """The last operation that took effect here."""
    adapter: Adapter | None = None
    """None before the run was created, and for ever if that failed."""
    failure: str = ""
    """Why the run could not be created."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int | None = None
    moments: Moments = field(default_factory=Moments)
    gradient: list[Tensor] | None = None
    """Sum since the last optim_step in the order of the parameters; None: nothing accumulated."""
    void: str = ""
    """Why the gradient since the last optim_step doesn't count; empty: it counts."""
    changed: bool = False
    """Whether it differs from its last recovery snapshot, or from its creation by seed."""
    snapshot_s: float = 0.0
    """How long its last recovery snapshot took, in seconds."""

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and run: unique in the service."""
        return self.tenant, self.run_id

    @property
    def size_bytes(self) -> int:
        """Memory of adapter, moments and gradient."""
        return sum(tensor.nbytes for group in self.tensors() for tensor in group)

    def tensors(self) -> list[list[Tensor]]:
        """Return parameters, both moments and gradient, in the order of the parameters; [] for what isn't there."""
        parameters = self.adapter.parameters() if self.adapter is not None else []
        return [parameters, self.moments.exp_avg, self.moments.exp_avg_sq, self.gradient or []]

    def lie_on(self, groups: Sequence[list[Tensor]]) -> None:
        """Take other tensors, of the same values, in place of those that `tensors` returns."""
        parameters, exp_avg, exp_avg_sq, gradient = groups
        if self.adapter is not None:
            factors = iter(parameters)
            for name in self.adapter.weights:
                self.adapter.weights[name] = (next(factors), next(factors))
        self.moments.exp_avg, self.moments.exp_avg_sq = exp_avg, exp_avg_sq
        self.gradient = gradient or None

    def copy(self) -> Run:
        """Return the run as it is now, on tensors of its own: what it does next doesn't show there."""
        adapter, moments, gradient = self.adapter, self.moments, self.gradient
        if adapter is not None:
            factors = {name: (_copied(a), _copied(b)) for name, (a, b) in adapter.weights.items()}
            adapter = replace(adapter, weights=factors)
        moments = Moments(
            exp_avg=[_copied(tensor) for tensor in moments.exp_avg],
            exp_avg_sq=[_copied(tensor) for tensor in moments.exp_avg_sq],
            step=moments.step,
        )
        gradient = gradient and [_copied(tensor) for tensor in gradient]
        return replace(self, adapter=adapter, moments=moments, gradient=gradient)

    def weights(self) -> Adapter:
        """Return the adapter.

        Raises:
            InvalidRequest: the run was never created.
        """
        if self.adapter is None:
            raise InvalidRequest(f"run {self.run_id!r} could not be created ({self.failure}); create another one")
        return self.adapter

    def accumulate(self, gradient: Sequence[Tensor]) -> None:
        """Add a finite gradient, in the order of the parameters. A void sum stays void."""
        self.changed = True
        if self.void:
            return
        if self.gradient is None:
            self.gradient = list(gradient)
        else:
            torch._foreach_add_(self.gradient, list(gradient))

    def make_void(self, seq_id: int, error: str) -> None:
        """Drop the gradient since the last optim_step; the next one fails and names the first culprit."""
        self.changed = True
        self.gradient = None
        self.void = self.void or f"operation {seq_id} failed ({error[:_SHOWN]})"

    def drop_gradient(self) -> None:
        """Start to accumulate anew."""
        self.changed = True
        self.gradient = None
        self.void = ""

    def step(self, hyper: OptimStep) -> dict[str, float]:
        """Apply and clear the gradient; return the step's metrics. Whatever happens, the gradient is gone.

        Raises:
            InvalidRequest: nothing was accumulated, the gradient is void or not finite; no weight changed.
        """
        adapter, gradient, void = self.weights(), self.gradient, self.void
        self.drop_gradient()
        if void:
            raise InvalidRequest(
                f"no step was taken: {void}, so the gradient since the last optim_step is void; "
                "send its forward_backward calls again"
            )
        if gradient is None:
            raise InvalidRequest("no step was taken: nothing was accumulated; send a forward_backward first")
        return adamw_step(adapter.parameters(), gradient, self.moments, hyper)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()
