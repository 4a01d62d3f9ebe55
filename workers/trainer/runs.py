"""A run as it is resident in a trainer: weights, moments, gradient, position.

Holds what must stay true together: a gradient that is void is never stepped on, and the reason is told
exactly once. Knows nothing of the store, of files, or of how a gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import OptimStep
from openrl.workers.model.lora import Adapter
from openrl.workers.trainer import vectors
from openrl.workers.trainer.full import Masters
from openrl.workers.trainer.optimizer import HalfStepped, Moments, adamw_step, adamw_step_in_pieces

_SHOWN = 200
"""How much of a failure's text is told again."""


@dataclass(slots=True, kw_only=True, eq=False, weakref_slot=True)
class Run:
    """One run, LoRA or full. Its identity is the object itself: a run that is rebuilt is another object."""

    tenant: str
    run_id: str
    token: int
    """The fencing token of the claim under which this process serves it."""
    applied: int = -1
    """The last operation that took effect here."""
    trained: Adapter | Masters | None = None
    """None before the run was created, and for ever if that failed."""
    parts: vectors.Parts | None = None
    """The parameters of an adapter that was adopted, as they lie in one vector."""
    failure: str = ""
    """Why the run could not be created."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    seed: int | None = None
    moments: Moments = field(default_factory=Moments)
    gradient: Sequence[Tensor] | None = None
    """Sum since the last optim_step in the order of the parameters; None: nothing accumulated."""
    void: str = ""
    """Why the gradient since the last optim_step doesn't count; empty: it counts."""
    changed: bool = False
    """Whether it differs from its last recovery snapshot, or from its creation by seed."""
    snapshot_s: float = 0.0
    """How long its last recovery snapshot took, in seconds."""
    torn: bool = False
    """Whether a change broke while it was being written: what is here is no state, and has to be rebuilt."""

    @property
    def adapter(self) -> Adapter | None:
        """What a LoRA run trains; None for a full one, and before the run was created."""
        return None if isinstance(self.trained, Masters) else self.trained

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained, not an adapter."""
        return isinstance(self.trained, Masters)

    @property
    def key(self) -> tuple[str, str]:
        """Tenant and run: unique in the service."""
        return self.tenant, self.run_id

    @property
    def size_bytes(self) -> int:
        """Memory of parameters, moments and gradient."""
        return sum(map(vectors.size_bytes, self.tensors()))

    def tensors(self) -> list[Sequence[Tensor]]:
        """Return parameters, both moments and gradient, in the order of the parameters; [] for what isn't there."""
        return [self.parameters(), self.moments.exp_avg, self.moments.exp_avg_sq, self.gradient or []]

    def parameters(self) -> Sequence[Tensor]:
        """Return what is trained, in order; nothing before the run was created."""
        if self.parts is not None:
            return self.parts
        return self.trained.parameters() if self.trained is not None else []

    def lie_on(self, groups: Sequence[Sequence[Tensor]]) -> None:
        """Take other tensors, of the same values, in place of those that `tensors` returns."""
        parameters, exp_avg, exp_avg_sq, gradient = groups
        if isinstance(self.trained, Masters):
            self.trained = replace(self.trained, weights=dict(zip(self.trained.weights, parameters, strict=True)))
        elif self.trained is not None:
            self.parts = parameters if isinstance(parameters, vectors.Parts) else None
            factors = iter(parameters)
            for name in self.trained.weights:
                self.trained.weights[name] = (next(factors), next(factors))
        self.moments.exp_avg, self.moments.exp_avg_sq = exp_avg, exp_avg_sq
        self.gradient = gradient or None

    def copy(self, *, in_host: bool = False) -> Run:
        """Return the run as it is now, on tensors of its own: what it does next doesn't show there.

        `in_host`: they lie in host memory, whatever the device is.
        """

        def copied(tensor: Tensor) -> Tensor:
            return tensor.detach().to("cpu", copy=True) if in_host else tensor.detach().clone()

        trained, moments, gradient = self.trained, self.moments, self.gradient
        if isinstance(trained, Masters):
            trained = replace(trained, weights={name: copied(tensor) for name, tensor in trained.weights.items()})
        elif trained is not None:
            factors = {name: (copied(a), copied(b)) for name, (a, b) in trained.weights.items()}
            trained = replace(trained, weights=factors)
        moments = Moments(
            exp_avg=[copied(tensor) for tensor in moments.exp_avg],
            exp_avg_sq=[copied(tensor) for tensor in moments.exp_avg_sq],
            step=moments.step,
        )
        gradient = gradient and [copied(tensor) for tensor in gradient]
        return replace(self, trained=trained, parts=None, moments=moments, gradient=gradient)

    def adopt(self, trained: Adapter | Masters, moments: Moments | None = None) -> None:
        """Train these parameters from now on, with these moments or with none yet.

        Those of all weights are what the model in memory becomes. They are copied into the tensors of the run as it
        was, if it has any, so that the device never holds both.

        Raises:
            Exception: whatever broke; the run is `torn` then.
        """
        moments = moments or Moments()
        with self._writing():
            if not isinstance(trained, Masters):
                self.trained, self.moments = trained, moments
                self.lie_on([vectors.laid_out(trained.parameters()), *self.tensors()[1:]])
                return
            if isinstance(self.trained, Masters):
                self.trained.take(trained.weights)
            else:
                self.trained = trained.adopted()
            home = torch.device("cpu") if trained.tuning.offloads else trained.loaded.device
            for name in ("exp_avg", "exp_avg_sq"):
                setattr(self.moments, name, _placed(getattr(moments, name), getattr(self.moments, name), home))
            self.moments.step = moments.step

    def weights(self) -> Adapter | Masters:
        """Return what is trained.

        Raises:
            InvalidRequest: the run was never created.
        """
        if self.trained is None:
            raise InvalidRequest(f"run {self.run_id!r} could not be created ({self.failure}); create another one")
        return self.trained

    def leaves(self) -> list[Tensor]:
        """Return the tensors that the gradients of a forward are asked of."""
        trained = self.weights()
        return trained.leaves() if isinstance(trained, Masters) else trained.parameters()

    def room(self) -> vectors.Parts:
        """Return zeros for an adapter's gradient to be gathered in, one behind another."""
        return vectors.zeros_like(self.parameters())

    def gradients(self, of_leaves: Sequence[Tensor | None], gathered: vectors.Parts | None = None) -> Sequence[Tensor]:
        """Return gradients of the leaves as float32 ones of the parameters, in their order; None counts as 0.

        Those of an adapter lie one behind another, in `gathered` with what is there already.
        """
        trained = self.weights()
        if isinstance(trained, Masters):
            return trained.gradients(of_leaves)
        if gathered is not None:
            for number, grad in enumerate(of_leaves):
                if grad is not None:
                    gathered.add(number, grad)
            return gathered
        parameters = trained.parameters()
        gradients = zip(parameters, of_leaves, strict=True)
        return vectors.laid_out([torch.zeros_like(one) if grad is None else grad for one, grad in gradients])

    def accumulate(self, gradient: Sequence[Tensor]) -> None:
        """Add a finite gradient, in the order of the parameters. A void sum stays void."""
        self.changed = True
        if self.void:
            return
        if self.gradient is None:
            self.gradient = gradient
        else:
            vectors.add(self.gradient, gradient)

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
            Exception: whatever broke; the run is `torn` if that was after its first change.
        """
        trained, gradient, void = self.weights(), self.gradient, self.void
        self.drop_gradient()
        if void:
            raise InvalidRequest(
                f"no step was taken: {void}, so the gradient since the last optim_step is void; "
                "send its forward_backward calls again"
            )
        if gradient is None:
            raise InvalidRequest("no step was taken: nothing was accumulated; send a forward_backward first")
        if not isinstance(trained, Masters):
            return adamw_step(self.parameters(), gradient, self.moments, hyper)
        offloads = trained.tuning.offloads
        try:
            metrics = adamw_step_in_pieces(trained.parameters(), gradient, self.moments, hyper, offloads=offloads)
        except HalfStepped:
            self.torn = True
            raise
        with self._writing():
            trained.install()
        return metrics

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Change what the run is in the body of the `with`; an error there leaves it torn."""
        try:
            yield
        except BaseException:
            self.torn = True
            raise


def _placed(tensors: Sequence[Tensor], old: Sequence[Tensor], home: torch.device) -> list[Tensor]:
    """Return tensors at their home, in the memory of old ones of the same shapes where there are any."""
    if len(old) != len(tensors):
        return [tensor.to(home) for tensor in tensors]
    for to, tensor in zip(old, tensors, strict=True):
        to.copy_(tensor)
    return list(old)
