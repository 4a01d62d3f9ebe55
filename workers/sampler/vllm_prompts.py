"""What prompts are worth, computed as vLLM reads them, by the law of `openrl.workers.sampler.scoring`.

Runs inside vLLM's processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from openrl.tasks.wire import codec
from openrl.workers.sampler.prompts import Scores
from openrl.workers.sampler.requests import Targets
from openrl.workers.sampler.sampling import Rule
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
        self._parts: dict[int, list[Scores]] = {}

    def read(self, hidden_states: Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        """Score what this step has read of the prompts that are to be scored."""
        waiting: dict[str, int] = self._runner.num_prompt_logprobs
        found: dict[str, Any] = {}
        for name in [name for name in waiting if name in num_scheduled_tokens]:
            self._runner.num_prompt_logprobs = one = {name: waiting[name]}
            try:
                with self._scoring(name, num_scheduled_tokens[name]):
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
    def _scoring(self, name: str, num_tokens: int) -> Iterator[None]:
        request = self._runner.requests[name]
        asked, start = request.sampling_params.extra_args[KEY], request.num_computed_tokens
        rows = min(num_tokens, len(request.prompt_token_ids) - 1 - start)
        if rows > 0 and self._runner.lora_config is not None:
            adapter = request.lora_request
            mapping = (adapter.lora_int_id if adapter else 0,) * rows
            self._runner._set_active_loras(mapping, mapping, {adapter} if adapter else set())
        if start == 0:
            # A prompt that gave way is read anew from its beginning.
            self._parts[asked["key"]] = []
        parts = self._parts[asked["key"]]
        self._runner.sampler.scoring = _prompt(request.prompt_token_ids, asked), start, parts
        try:
            yield
        finally:
            self._runner.sampler.scoring = None


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
