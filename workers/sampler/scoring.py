"""From the logits of a part of a prompt to what was asked of it: the worth of its own tokens, of the likeliest, of
ids that the caller names, and draws in their place.

Row `i` of the logits speaks of the part's token `i + 1`. All log-probabilities are untempered, as the trainer's are;
only the draws know a temperature.

Axes: C positions of a part, V vocabulary, K candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from openrl.tasks.wire import codec
from openrl.workers.sampler.prompts import Scores
from openrl.workers.sampler.requests import Targets
from openrl.workers.sampler.sampling import Rule, draw_several, top_logprobs, uniforms

LOGITS_BYTES = 64 << 20
"""The logits in float32 that are looked at together: what scoring a long prompt takes of memory, times a few."""
APART = 1 << 32
"""Added to the number of a draw within the prompt: no continuation has such a number, so their draws are unrelated."""


class Asked(Protocol):
    """What is asked of a prompt; `openrl.workers.sampler.requests.Request` says it."""

    @property
    def prompt(self) -> Sequence[int]: ...

    @property
    def prompt_logprobs(self) -> bool: ...

    @property
    def scored_from(self) -> int: ...

    @property
    def topk_prompt(self) -> int: ...

    @property
    def targets(self) -> Targets | None: ...

    @property
    def alternatives(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def rule(self) -> Rule: ...


def score(logits_CV: Tensor, request: Asked, start: int) -> Scores:
    """Score a part of a prompt from the logits (float32) at its positions from `start` on."""
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    asked = slice(max(0, request.scored_from - 1 - start), None)
    own = np.empty(0, np.float32)
    if request.prompt_logprobs:
        next_C = torch.tensor(request.prompt[start + 1 : start + 1 + len(logits_CV)], device=logits_CV.device)
        own = _logprobs(logits_CV, lse_C1, next_C[:, None])[asked, 0]
    return Scores(
        logprobs=own,
        topk=top_logprobs(logits_CV[asked] - lse_C1[asked], request.topk_prompt) if request.topk_prompt else None,
        targets=_named(logits_CV, lse_C1, request, start),
        alternatives=_alternatives(logits_CV, lse_C1, request, start),
    )


def _named(logits_CV: Tensor, lse_C1: Tensor, request: Asked, start: int) -> np.ndarray:
    """Return the log-probabilities of the ids that the caller names in these rows."""
    if request.targets is None:
        return np.empty(0, np.float32)
    rows, ids = request.targets.rows, request.targets.ids
    first, last = np.searchsorted(rows, [start, start + len(logits_CV)])
    row_of = torch.from_numpy(rows[first:last] - start).to(logits_CV.device)
    id_of = torch.from_numpy(ids[first:last]).to(logits_CV.device)
    named: np.ndarray = (logits_CV[row_of, id_of] - lse_C1[row_of, 0]).cpu().numpy()
    return named


def _alternatives(logits_CV: Tensor, lse_C1: Tensor, request: Asked, start: int) -> codec.Alternatives:
    """Draw tokens in place of each, at the request's temperature and from the whole vocabulary."""
    rows, k = len(logits_CV), request.alternatives
    if not k:
        return codec.Alternatives(np.empty((rows, 0), np.int64), np.empty((rows, 0), np.float32))
    numbers = uniforms(
        [request.seed] * (rows * k),
        list(range(APART, APART + k)) * rows,
        np.arange(start, start + rows).repeat(k).tolist(),
    )
    ids_CK = draw_several(logits_CV, request.rule.temperature, numbers.reshape(rows, k))
    return codec.Alternatives(ids_CK.cpu().numpy(), _logprobs(logits_CV, lse_C1, ids_CK))


def _logprobs(logits_CV: Tensor, lse_C1: Tensor, ids_CK: Tensor) -> np.ndarray:
    logprobs: np.ndarray = (logits_CV.gather(1, ids_CK) - lse_C1).cpu().numpy()
    return logprobs
