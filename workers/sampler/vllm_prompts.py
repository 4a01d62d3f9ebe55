"""What prompts are worth, computed as vLLM reads them, by the law of `openrl.workers.sampler.scoring`.

Runs inside vLLM's processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from openrl.tasks.wire import codec
from openrl.workers.sampler.prompts import Scores
from openrl.workers.sampler.requests import Targets
from openrl.workers.sampler.sampling import Rule
from openrl.workers.sampler.scoring import LOGITS_BYTES, score
from openrl.workers.sampler.vllm_rows import KEY


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What is asked of one prompt, as `openrl.workers.sampler.scoring` wants it."""

    prompt: Sequence[int]
    prompt_logprobs: bool
    scored_from: int
    topk_prompt: int
    targets: Targets | None
    alternatives: int
    seed: int
    rule: Rule


class Prompts:
    """Scores prompts as they are read, each request alone and with its own adapter on the head.

    vLLM's own reading takes the head's adapters from the rows that are drawn, whichever prompts they belong to.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._read = runner._get_prompt_logprobs_dict
        self._vocab_size = int(runner.model_config.get_vocab_size())
        self._parts: dict[int, list[Scores]] = {}

    def read(self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """Score what this step has read of the prompts that are to be scored."""
        waiting: dict[str, int] = self._runner.num_prompt_logprobs
        found: dict[str, Any] = {}
        for name in [name for name in waiting if name in num_scheduled_tokens]:
            self._runner.num_prompt_logprobs = one = {name: waiting[name]}
            try:
                with self._scoring(name):
                    found |= self._read(hidden_states, num_scheduled_tokens)
            finally:
                self._runner.num_prompt_logprobs = waiting
            if not one:
                del waiting[name]
        return found

    def pop(self, key: int) -> list[Scores]:
        """Return a prompt's parts."""
        return self._parts.pop(key, [])

    @contextmanager
    def _scoring(self, name: str) -> Iterator[None]:
        """Let vLLM's reading ask us, and not the model, for the logits of this request's prompt."""
        runner = self._runner
        request = runner.requests[name]
        asked, start = request.sampling_params.extra_args[KEY], request.num_computed_tokens
        if start == 0:
            # A prompt that gave way is read anew from its beginning.
            self._parts[asked["key"]] = []
        parts, wanted = self._parts[asked["key"]], _prompt(request.prompt_token_ids, asked)
        logits_of = runner.model.compute_logits

        def score_instead(hidden_CH: Tensor) -> Tensor:
            for rows, logits_RV in slices(hidden_CH, self._logits(logits_of, request.lora_request), self._vocab_size):
                parts.append(score(logits_RV, wanted, start + rows))
            return hidden_CH[:, :1]

        runner.model.compute_logits, runner.sampler.scoring = score_instead, True
        try:
            yield
        finally:
            del runner.model.compute_logits
            runner.sampler.scoring = False

    def _logits(self, logits_of: Callable[[Tensor], Tensor], adapter: Any) -> Callable[[Tensor], Tensor]:
        """Return what computes logits with one adapter, or none, in every row."""

        def compute(hidden_RH: Tensor) -> Tensor:
            if self._runner.lora_config is not None:
                mapping = (adapter.lora_int_id if adapter else 0,) * len(hidden_RH)
                self._runner._set_active_loras(mapping, mapping, {adapter} if adapter else set())
            return logits_of(hidden_RH)

        return compute


def slices(hidden_CH: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> Iterator[tuple[int, Tensor]]:
    """Yield logits [R, V] in float32 of some rows at a time, LOGITS_BYTES at most, and which row is their first."""
    size = max(1, LOGITS_BYTES // (4 * vocab_size))
    for first in range(0, len(hidden_CH), size):
        yield first, logits_of(hidden_CH[first : first + size]).float()


def _prompt(tokens: Sequence[int], asked: Mapping[str, Any]) -> Prompt:
    named = asked["targets"]
    targets = None
    if named is not None:
        rows, ids = (np.array(part, np.int64) for part in named)
        targets = Targets(cells=codec.Cells(values=ids, shape=(len(ids), 1)), places=rows, rows=rows, ids=ids)
    return Prompt(
        prompt=tokens,
        prompt_logprobs=asked["prompt_logprobs"],
        scored_from=asked["scored_from"],
        topk_prompt=asked["topk_prompt"],
        targets=targets,
        alternatives=asked["alternatives"],
        seed=asked["seed"],
        rule=Rule(*asked["rule"]),
    )
