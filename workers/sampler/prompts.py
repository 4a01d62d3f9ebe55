"""What a prompt's tokens were worth, gathered part by part as it is read, and put together for the answer.

Values and bookkeeping: no torch. `scoring` computes the parts.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from openrl.tasks.wire import codec
from openrl.workers.sampler.requests import Request


class Scores(NamedTuple):
    """What one part of a prompt was worth; what was not asked for is empty or None. Log-probabilities are float32."""

    logprobs: np.ndarray
    topk: codec.Candidates | None
    targets: np.ndarray
    alternatives: codec.Alternatives

    @property
    def finite(self) -> bool:
        """Tell whether all log-probabilities are."""
        arrays = (self.logprobs, self.targets, self.alternatives.logprobs)
        return all(bool(np.isfinite(array).all()) for array in arrays)


def packed(parts: Sequence[Scores]) -> bytes:
    """Return parts as the bytes of one `.npz` file: what travels between processes."""
    arrays: dict[str, Any] = {
        f"{index}.{name}": array for index, part in enumerate(parts) for name, array in _arrays(part)
    }
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def unpacked(data: bytes) -> list[Scores]:
    """Return what `packed` took."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        found = {name: file[name] for name in file.files}
    parts = []
    for index in sorted({int(name.partition(".")[0]) for name in found}):
        part = {name.partition(".")[2]: array for name, array in found.items() if name.startswith(f"{index}.")}
        topk = codec.Candidates(part["top_tokens"], part["top_logprobs"]) if "top_tokens" in part else None
        drawn = codec.Alternatives(part["alternatives"], part["alternative_logprobs"])
        parts.append(Scores(part["logprobs"], topk, part["targets"], drawn))
    return parts


def _arrays(part: Scores) -> Iterator[tuple[str, np.ndarray]]:
    yield "logprobs", part.logprobs
    yield "targets", part.targets
    yield "alternatives", part.alternatives.tokens
    yield "alternative_logprobs", part.alternatives.logprobs
    if part.topk is not None:
        yield "top_tokens", part.topk.tokens
        yield "top_logprobs", part.topk.logprobs


def own_logprobs(parts: Sequence[Scores], request: Request) -> list[float | None] | None:
    """Return a value for each token of the prompt, None where it has none; None when they weren't asked for."""
    if not request.prompt_logprobs:
        return None
    return [*[None] * request.scored_from, *chain.from_iterable(part.logprobs.tolist() for part in parts)]


def topk(parts: Sequence[Scores], request: Request) -> codec.Candidates | None:
    """Return the candidates for each token of the prompt, where it has some; None when they weren't asked for."""
    if not request.topk_prompt:
        return None
    found = [part.topk for part in parts if part.topk is not None]
    width = found[0].tokens.shape[1] if found else 0
    return codec.Candidates.joined([codec.Candidates.none(request.scored_from, width), *found])


def targets(parts: Sequence[Scores], request: Request) -> codec.Cells | None:
    """Return the ids' log-probabilities in the layout of the ids, 0 where none was named."""
    if request.targets is None:
        return None
    values = np.zeros(len(request.targets.cells.values), np.float32)
    values[request.targets.places] = np.concatenate([np.empty(0, np.float32), *(part.targets for part in parts)])
    return replace(request.targets.cells, values=values)


def alternatives(parts: Sequence[Scores], request: Request) -> codec.Alternatives | None:
    """Return all that was drawn in place of the prompt's tokens."""
    if not request.alternatives:
        return None
    none = np.empty((0, request.alternatives))
    return codec.Alternatives(
        np.concatenate([none.astype(np.int64), *(part.alternatives.tokens for part in parts)]),
        np.concatenate([none.astype(np.float32), *(part.alternatives.logprobs for part in parts)]),
    )
