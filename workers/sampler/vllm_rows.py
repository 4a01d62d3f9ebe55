"""Which request stands in which row of vLLM's batch, and how its next token is drawn.

vLLM hands a processor of logits the parameters of each row, and the moves of its batch; this one leaves the logits
alone. Runs inside vLLM's processes, `asked_of` in the sampler's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from openrl.workers.sampler.requests import Request
from openrl.workers.sampler.sampling import MASK_64, Rule

KEY = "openrl"
"""Under it the parameters of a row travel in vLLM's `extra_args`."""


class Row(NamedTuple):
    """How the next token of one row is drawn."""

    rule: Rule
    seed: int
    sequence: int
    start: int
    """The number of its first token; `drawn` are counted on from there."""
    drawn: Sequence[int]
    """vLLM's own list, which grows; what is in it need not be true yet, its length is."""

    @classmethod
    def of(cls, asked: Mapping[str, Any], drawn: Sequence[int]) -> Self:
        """Read what `asked_of` wrote."""
        return cls(Rule(*asked["rule"]), asked["seed"], asked["sequence"], asked["start"], drawn)


def asked_of(request: Request, sequence: int, *, start: int = 0, key: int | None = None) -> dict[str, Any]:
    """Return the `extra_args` of one sequence from its token `start` on; with a key its prompt is scored too."""
    asked: dict[str, Any] = {
        "rule": list(request.rule),
        # What travels holds no negative number that has 64 bits, and the law takes it modulo 2 ** 64.
        "seed": request.seed & MASK_64,
        "sequence": sequence,
        "start": start,
    }
    if key is not None:
        targets = request.targets
        asked |= {
            "key": key,
            "prompt_logprobs": request.prompt_logprobs,
            "scored_from": request.scored_from,
            "topk_prompt": request.topk_prompt,
            "targets": None if targets is None else [targets.rows.tolist(), targets.ids.tolist()],
            "alternatives": request.alternatives,
        }
    return {KEY: asked}


class Rows(LogitsProcessor):
    """Knows which request stands in which row of vLLM's batch."""

    def __init__(self, vllm_config: object, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, Row] = {}

    def is_argmax_invariant(self) -> bool:
        """Tell that no logit is changed."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """Change nothing."""
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow requests that come, go and change places: in this order, as vLLM says."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, drawn in batch_update.added:
            self._put(index, Row.of(params.extra_args[KEY], drawn) if KEY in (params.extra_args or {}) else None)
        for first, second, direction in batch_update.moved:
            row = self._rows.pop(first, None)
            if direction == MoveDirectionality.SWAP:
                self._put(first, self._rows.pop(second, None))
            self._put(second, row)

    def first(self, count: int) -> list[Row] | None:
        """Return the rows 0 to `count`; None if not all are ours."""
        rows = [self._rows.get(index) for index in range(count)]
        return None if None in rows else [row for row in rows if row is not None]

    def _put(self, index: int, row: Row | None) -> None:
        if row is None:
            self._rows.pop(index, None)
        else:
            self._rows[index] = row
