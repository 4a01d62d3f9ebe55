"""Messages into what an engine runs, and what it drew into outcomes.

The API has checked every field already; what would harm the engine is checked again here, so that a
wrong entry fails alone. Knows the journal's values and the codec, not torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np

from openrl.tasks.drafts import Draft
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.journal import Outcome, SampleJob
from openrl.tasks.messages import Sample
from openrl.tasks.operations import PROTOBUF, Usage
from openrl.tasks.wire import codec
from openrl.workers.sampler.sampling import Rule
from openrl.workers.weights import layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the base model can take, and how many positions of the sampler's cache one sequence can have."""

    vocab_size: int
    max_context: int
    cache_tokens: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Targets:
    """Ids to score in a prompt: `cells` as they were sent, and of those that name one the place, row and id.

    A cell of row `i` is scored at the prompt's token `i + 1`; `rows` grow.
    """

    cells: codec.Cells
    places: np.ndarray
    rows: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, cells: codec.Cells) -> Self:
        """Leave out the cells of -1."""
        places = np.flatnonzero(cells.values >= 0)
        return cls(cells=cells, places=places, rows=cells.rows[places], ids=cells.values[places])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and how to continue it.

    `max_new` is at least 1 and fits the context; `stop_tokens` holds the model's own end tokens, unless the
    caller's stop was an empty list. `scored_from` is the first prompt token with log-probabilities, at least 1;
    `alternatives` are drawn in place of each.
    """

    job: SampleJob
    prompt: tuple[int, ...]
    num_samples: int
    max_new: int
    seed: int
    rule: Rule
    stop_tokens: frozenset[int]
    stop_strings: tuple[str, ...]
    adapter_dir: str
    weights_digest: str = ""
    """What a full version is known by; "" where `adapter_dir` holds an adapter, or is empty."""
    weights_id: str = ""
    """What the answer says of who drew it; "" for the base model."""
    prompt_logprobs: bool = False
    topk_prompt: int = 0
    topk_sample: int = 0
    scored_from: int = 1
    targets: Targets | None = None
    alternatives: int = 0
    heard: Callable[[Draft], None] | None = None
    """Called with each token as it is drawn, where somebody waits for it; None where nobody does."""

    @property
    def looked_at_from(self) -> int:
        """The first position of the prompt whose logits say something that is asked for."""
        if self.alternatives:
            return 0
        first = len(self.prompt)
        if self.prompt_logprobs or self.topk_prompt:
            first = self.scored_from - 1
        if self.targets is not None and len(self.targets.rows):
            first = min(first, int(self.targets.rows[0]))
        return first

    @property
    def cache_tokens(self) -> int:
        """How many positions one sequence may occupy in the cache; the last token drawn is never fed back."""
        return len(self.prompt) + self.max_new - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """All that was drawn for one request, in the order of its sequences."""

    sequences: Sequence[codec.SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: codec.Candidates | None = None
    target_logprobs: codec.Cells | None = None
    alternatives: codec.Alternatives | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request that left the engine: with a result, or with an error and whose fault it is."""

    request: Request
    result: Result | None = None
    error: str = ""
    category: Literal["user", "server"] = "server"


def read(job: SampleJob, limits: Limits) -> Request:
    """Return the request of a journaled sample.

    Raises:
        InvalidRequest: the prompt is empty, too long or has tokens outside the vocabulary.
    """
    message: Sample = job.message
    _check(message, limits)
    room = max(1, limits.max_context - len(message.prompt))
    cached = limits.cache_tokens - len(message.prompt) + 1
    own_stops = limits.eos_token_ids if message.stop_at_eos else ()
    return Request(
        job=job,
        prompt=tuple(message.prompt),
        num_samples=message.num_samples,
        max_new=min(room, cached) if message.max_tokens is None else min(message.max_tokens, room),
        seed=message.seed or 0,
        rule=Rule(message.temperature, message.top_k, message.top_p),
        stop_tokens=frozenset((*message.stop_tokens, *own_stops)),
        stop_strings=tuple(stop for stop in message.stop_strings if stop),
        adapter_dir=message.adapter_dir,
        weights_digest=message.weights_digest,
        weights_id=layout.version_id(message.adapter_dir, message.weights_digest) if message.adapter_dir else "",
        prompt_logprobs=message.prompt_logprobs,
        topk_prompt=message.topk_prompt_logprobs,
        topk_sample=message.topk_sample_logprobs,
        scored_from=max(1, len(message.prompt) - (message.prompt_logprobs_last_n or len(message.prompt))),
        targets=_targets(message),
        alternatives=message.prompt_alt_tokens_k,
    )


def write(result: Result, *, num_prompt_tokens: int = 0, seconds: float = 0.0, weights_id: str = "") -> Outcome:
    """Return what is committed for a request that was served, with what it used and which weights drew it."""
    body = codec.encode_sample_response(
        result.sequences,
        result.prompt_logprobs,
        result.topk_prompt_logprobs,
        result.target_logprobs,
        result.alternatives,
        weights=weights_id,
    )
    used = Usage(
        prompt_tokens=num_prompt_tokens,
        sampled_tokens=sum(len(sequence.tokens) for sequence in result.sequences),
        seconds=seconds,
    )
    return Outcome(result=body, content_type=PROTOBUF, usage=used)


def _targets(message: Sample) -> Targets | None:
    if not message.target_shape:
        return None
    num_rows, width = message.target_shape
    sparse = bool(message.target_crow)
    cells = codec.Cells(
        values=np.array(message.target_ids, np.int64),
        shape=(num_rows, width),
        crow=np.array(message.target_crow, np.int64) if sparse else None,
        columns=np.array(message.target_columns, np.int64) if sparse else None,
    )
    return Targets.of(cells)


def _check(message: Sample, limits: Limits) -> None:
    num_tokens = len(message.prompt)
    needed = min(num_tokens + (message.max_tokens or 1) - 1, limits.max_context)
    if needed > limits.cache_tokens:
        raise InvalidRequest(
            f"prompt and max_tokens need {needed} positions of the cache; this sampler has {limits.cache_tokens} "
            "(OPENRL_SAMPLER_KV_TOKENS)"
        )
    if not 1 <= num_tokens <= limits.max_context:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; send at least one and at most {limits.max_context}, the context"
        )
    if min(message.prompt) < 0 or max(message.prompt) >= limits.vocab_size:
        raise InvalidRequest(
            f"the prompt has token ids outside the vocabulary; send ids from 0 to {limits.vocab_size - 1}"
        )
    if message.target_shape and (
        message.target_shape[0] != num_tokens - 1 or max(message.target_ids, default=-1) >= limits.vocab_size
    ):
        raise InvalidRequest("target_prompt_logprobs must be ids of the vocabulary, a row for each token but the first")
    if message.num_samples < 1 or (message.max_tokens is not None and message.max_tokens < 1):
        raise InvalidRequest("num_samples and max_tokens must be at least 1")
    if not message.temperature >= 0 or not 0 <= message.top_p <= 1:
        raise InvalidRequest("temperature must be 0 or more and top_p between 0 and 1")
