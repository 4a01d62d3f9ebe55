"""What one forward of a pass comes to, piece by piece: its loss, its metrics, its log-probabilities, or its error.

Pieces are computed beside others and taken in one after another. Knows neither the model nor gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import ForwardBackward
from openrl.tasks.operations import PROTOBUF
from openrl.tasks.wire import codec
from openrl.workers.trainer.batch import Piece, num_tokens
from openrl.workers.trainer.losses import compute, merge
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work, failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one piece of a micro-batch came to: an error, or all the rest."""

    error: str = ""
    category: str = "user"
    """Whose fault the error is."""
    loss: Tensor | None = None
    """The token sum, float64, differentiable."""
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: np.ndarray | None = None
    """float32, of every target of the piece [n] or [n, K], in nats."""


@dataclass(slots=True, eq=False)
class Share:
    """What one forward of a pass has come to so far."""

    work: Work
    error: str = ""
    category: str = "user"
    """Whose fault the error is."""
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: list[np.ndarray | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logprobs = [None] * len(self.message.data)
        try:
            self.run.weights()
        except InvalidRequest as error:
            self.error = str(error)

    @property
    def run(self) -> Run:
        """Return whose it is."""
        return self.work.run

    @property
    def message(self) -> ForwardBackward:
        """Return what is asked for."""
        return cast(ForwardBackward, self.work.message)

    @property
    def trains(self) -> bool:
        """Tell whether a backward follows."""
        return self.work.kind == ForwardBackward.kind

    def part(self, piece: Piece, logprobs: Tensor, entropies: Tensor | None = None) -> Part:
        """Return what one piece comes to; changes nothing, as others compute beside it.

        `logprobs` (float32, nats) are shaped like the piece's targets, `entropies` [n] are told if asked for.
        """
        message = self.message
        try:
            loss = compute(message.loss_fn, logprobs, piece.inputs, message.loss_fn_config, piece.lengths)
        except Exception as error:  # its own: the others' pass goes on
            outcome = failed(self.work, error)
            return Part(error=outcome.error or "", category=outcome.category or "server")
        values = logprobs.detach()
        bad = _not_finite("log-probability", values, piece, values) or _not_finite(
            "loss", loss.per_token.detach(), piece, values
        )
        if bad:
            return Part(error=bad)
        metrics = loss.numbers()
        if entropies is not None:
            metrics["entropy:sum"] = float(entropies[piece.counts].sum(dtype=torch.float64))
        return Part(loss=loss.total, metrics=metrics, logprobs=values.cpu().numpy())

    def take(self, piece: Piece, part: Part) -> None:
        """Take in what a piece came to; after an error nothing more."""
        if self.error:
            return
        self.error, self.category = part.error, part.category
        if part.logprobs is None:
            return
        merge(self.metrics, part.metrics)
        for span in piece.spans:
            self.logprobs[span.datum] = part.logprobs[span.start - piece.start : span.stop - piece.start]

    def outcome(self, costs: Mapping[str, float]) -> Outcome:
        """Return what the operation came to, once all its pieces were taken in, and what it cost (see `costs`)."""
        if self.error:
            return Outcome(error=self.error, category=self.category)
        arrays = [cast(np.ndarray, array) for array in self.logprobs]
        metrics = {**self.metrics, **costs}
        return Outcome(result=codec.encode_forward_backward_output(arrays, metrics), content_type=PROTOBUF)


def costs(shares: Sequence[Share], seconds: float) -> dict[Share, dict[str, float]]:
    """Return, as metrics, what each share cost that was computed in a pass of `seconds`.

    Seconds are shared by tokens. A tenant is told how many tokens the pass had of its own runs, and not how many it
    had of others': that would say how much others train.
    """
    sizes = {share: num_tokens(share.message.data) for share in shares}
    of_tenant: dict[str, int] = defaultdict(int)
    for share, size in sizes.items():
        of_tenant[share.run.tenant] += size
    total = max(1, sum(sizes.values()))
    return {
        share: {"seconds:sum": seconds * size / total, "pass_tokens:max": float(of_tenant[share.run.tenant])}
        for share, size in sizes.items()
    }


def _not_finite(what: str, values: Tensor, piece: Piece, logprobs: Tensor) -> str:
    """Say which value isn't finite, with what it was computed from; empty when all are."""
    if bool(values.isfinite().all()):
        return ""
    at = tuple(int(index) for index in (~values.isfinite()).nonzero()[0])
    datum, position = piece.locate(at[0])
    column = f", target {at[1]}" if len(at) > 1 else ""
    inputs = "".join(f", {name} {float(tensor[at])!r}" for name, tensor in piece.inputs.items())
    return (
        f"the {what} is not finite ({float(values[at])}) at data[{datum}], position {position}{column} "
        f"(log-probability {float(logprobs[at])!r}{inputs}); nothing was accumulated"
    )
