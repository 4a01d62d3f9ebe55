"""Continuous batching in plain torch: one forward a step over whatever runs, joined and left at any token.

A step reads parts of new prompts and grows every running sequence by one token, all adapters together. It
first computes (`_run`, which changes nothing but cache positions that it would write again) and then takes
the outcome over, so that after a failure the same rows can be tried request by request and only the one
at fault is lost. One thread only.

Axes: T tokens of the step, B rows with a next token, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from openrl.tasks.wire import codec
from openrl.workers.model import decoder, kv_cache
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.logprobs import head_logits
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.model.threads import Threads
from openrl.workers.sampler.groups import Continuation, Group, Token
from openrl.workers.sampler.in_hand import InHand
from openrl.workers.sampler.places import Place
from openrl.workers.sampler.pools import Pools
from openrl.workers.sampler.prompts import Scores
from openrl.workers.sampler.requests import Finished, Request
from openrl.workers.sampler.sampling import draw, top_logprobs, uniforms
from openrl.workers.sampler.scoring import LOGITS_BYTES, score
from openrl.workers.sampler.slots import Slots, prefill_shares
from openrl.workers.sampler.stops import Decode
from openrl.workers.sampler.versions import Versions

log = logging.getLogger(__name__)

DRAW_ROWS = 64
LOAD_WAIT_S = 0.05
"""How long a step that has nothing to do but wait for weights waits, at most."""


class Row(NamedTuple):
    """New tokens of one sequence: a drawn one, or a part of what it has yet to read."""

    group: Group
    sequence: Continuation
    place: Place
    start: int
    tokens: Sequence[int]

    @property
    def reads_prompt(self) -> bool:
        return not self.group.begun

    @property
    def draws(self) -> bool:
        """Tell whether all that is known is in place after this row."""
        return self.start + len(self.tokens) == self.sequence.num_known


@dataclass(slots=True)
class Outcome:
    """What a row gave: the tokens drawn after it, and what the prompt in it was worth."""

    tokens: list[Token] = field(default_factory=list)
    scores: list[Scores] = field(default_factory=list)


class Wish(NamedTuple):
    """A token to draw: from which row of the logits, for which place of which request."""

    source: int
    request: Request
    sequence: int
    position: int


class TorchEngine(InHand[Adapter]):
    """Runs requests on a loaded model."""

    def __init__(
        self,
        loaded: LoadedModel,
        versions: Versions[Adapter],
        decode: Decode,
        *,
        num_slots: int,
        kv_tokens: int,
        prefill_tokens: int,
        copy_bytes: int = 0,
    ) -> None:
        """Run at most `num_slots` sequences on a cache of `kv_tokens` positions, a power of two.

        Copies of the model's weights may take `copy_bytes`.
        """
        super().__init__(versions, decode)
        self._loaded = loaded
        self._model = decoder.way_through(loaded, copy_bytes=copy_bytes)
        self._threads = Threads()
        self._flops_per_token = loaded.flops_per_token
        self._prefill_tokens = prefill_tokens
        self._pools = Pools(loaded, kv_tokens)
        self._slots = Slots(num_slots, kv_tokens=kv_tokens, memory=self._pools)
        self.most_of_tenant = num_slots

    @property
    def pools(self) -> Pools:
        """Return its cache."""
        return self._pools

    def adapters(self) -> list[Tensor]:
        """Return the tensors of the versions in memory, and of what was made of them. Any thread may ask."""
        versions = [tensor for adapter in self._versions.adapters() for tensor in adapter.parameters()]
        return versions + self._model.tensors()

    @property
    def loaded(self) -> LoadedModel:
        """Return the model that it draws from."""
        return self._loaded

    def weights_changed(self) -> None:
        """Hear that the model's own weights were changed in place: nothing computed from the old ones is left."""
        assert not self._groups, "requests are on the old weights"
        self._model.weights_changed()

    def wake(self) -> None:
        """Do nothing: no step waits for long."""

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Advance everything that runs by one token, and what is to be read by its share; return what has ended."""
        able = self._slots.arrange(self._groups)
        finished = self._load()
        rows = self._plan([one for one in able if one.group.ready])
        if rows:
            finished += self._advance(rows)
        elif self._loading:
            wait(self._loading.values(), timeout=LOAD_WAIT_S, return_when=FIRST_COMPLETED)
        return finished

    def _load(self) -> list[Finished]:
        """Ask for the weights of those that got their first place; one whose weights can't be loaded leaves."""
        for group in self._groups:
            if group.running and not group.ready and group not in self._loading:
                if directory := group.request.adapter_dir:
                    self._loading[group] = self._versions.acquire(directory)
                else:
                    group.ready = True
        failed = []
        for group, future in [pair for pair in self._loading.items() if pair[1].done()]:
            try:
                group.adapter, group.ready = future.result(), True
                del self._loading[group]
            except Exception as failure:
                failed.append(self._fail(group, failure))
        return failed

    def _plan(self, able: Sequence[Continuation]) -> list[Row]:
        """Choose the step's rows: single tokens together, then parts to be read, each by adapter."""
        drawing: list[Continuation] = []
        reading: list[Continuation] = []
        for one in able:
            (drawing if one.group.begun and one.num_held + 1 == one.num_known else reading).append(one)
        reading.sort(key=lambda one: one.age)
        shares = prefill_shares([one.num_known - one.num_held for one in reading], self._prefill_tokens)
        parts = [(one, share) for one, share in zip(reading, shares, strict=True) if share]
        rows = [_row(one, 1) for one in sorted(drawing, key=_order)]
        return rows + [_row(one, share) for one, share in sorted(parts, key=lambda part: _order(*part))]

    def _advance(self, rows: list[Row]) -> list[Finished]:
        """Run the rows and take over what they gave; after a failure each request alone."""
        try:
            outcomes = self._run(rows)
        except Exception as failure:
            by_group: dict[Group, list[Row]] = {}
            for row in rows:
                by_group.setdefault(row.group, []).append(row)
            if len(by_group) == 1:
                return [self._fail(rows[0].group, failure)]
            log.warning("a step of %d requests failed (%s); trying them one by one", len(by_group), failure)
            return [ended for part in by_group.values() for ended in self._advance(part)]
        given: dict[Group, list[tuple[Row, Outcome]]] = {}
        for row, outcome in zip(rows, outcomes, strict=True):
            given.setdefault(row.group, []).append((row, outcome))
        return [ended for group, pairs in given.items() for ended in self._take_over(group, pairs)]

    def _take_over(self, group: Group, pairs: list[tuple[Row, Outcome]]) -> list[Finished]:
        """Note what the rows of one group gave."""
        try:
            self._slots.charge(group.tenant, sum(len(row.tokens) for row, _ in pairs))
            for row, outcome in pairs:
                self._note(row, outcome)
        except Exception as failure:
            return [self._fail(group, failure)]
        if not group.done:
            return []
        self._leave(group)
        return [Finished(request=group.request, result=group.result())]

    def _note(self, row: Row, outcome: Outcome) -> None:
        group, one = row.group, row.sequence
        one.num_held += len(row.tokens)
        if row.reads_prompt:
            group.read_prompt(outcome.scores)
            if outcome.tokens:
                group.begin(outcome.tokens)
        elif outcome.tokens:
            one.push(outcome.tokens[0])
        if one.stop_reason:
            self._slots.end(one)

    def _free(self, group: Group) -> None:
        self._slots.drop(group)

    def _run(self, rows: list[Row]) -> list[Outcome]:
        """Compute a step: no state but the cache's positions of these rows changes."""
        self._threads.fit(self._flops_per_token * sum(len(row.tokens) for row in rows))
        hidden_TD = self._forward(rows)
        outcomes = [Outcome() for _ in rows]
        ends = list(accumulate(len(row.tokens) for row in rows))
        for row, outcome, end in zip(rows, outcomes, ends, strict=True):
            if row.reads_prompt:
                self._look_at_prompt(row, outcome, hidden_TD[end - len(row.tokens) : end])
        drawing = [i for i, row in enumerate(rows) if row.draws]
        if not drawing:
            return outcomes
        last_BD = hidden_TD
        if len(drawing) < ends[-1]:
            last_BD = hidden_TD[torch.tensor([ends[i] - 1 for i in drawing], device=hidden_TD.device)]
        logits_BV = head_logits(self._loaded, last_BD, _segments([(rows[i].group.adapter, 1) for i in drawing]))
        wishes = [wish for source, i in enumerate(drawing) for wish in _wishes(rows[i], source)]
        for wish, token in zip(wishes, _drawn(logits_BV, wishes), strict=True):
            outcomes[drawing[wish.source]].tokens.append(token)
        return outcomes

    def _forward(self, rows: list[Row]) -> Tensor:
        """Return the final hidden states [T, D] of the rows' tokens, cached on the way."""
        caches = [self._pools[row.place] for row in rows]
        cache_rows = [kv_cache.Row(row.place.number, row.start, len(row.tokens)) for row in rows]
        for cache, row in zip(caches, cache_rows, strict=True):
            # Whatever an earlier sequence, or a try that failed, left behind.
            cache.truncate(row.slot, row.start)
        device = self._loaded.device
        tokens_T = torch.tensor([token for row in rows for token in row.tokens], device=device)
        positions_T = kv_cache.row_positions(cache_rows, device)
        with (
            routing(_segments([(row.group.adapter, len(row.tokens)) for row in rows])),
            kv_cache.cached(caches, cache_rows) as appending,
        ):
            return self._model.hidden_states(tokens_T, positions_T, appending)

    def _look_at_prompt(self, row: Row, outcome: Outcome, hidden_TD: Tensor) -> None:
        """Fill in what the prompt's tokens after those of `row` were worth, as far as the request asks for it."""
        request = row.group.request
        start = max(row.start, request.looked_at_from)
        stop = min(row.start + len(row.tokens), len(request.prompt) - 1)
        size = max(1, LOGITS_BYTES // (4 * self._loaded.vocab_size))
        for first in range(start, stop, size):
            part_CD = hidden_TD[first - row.start : min(first + size, stop) - row.start]
            logits_CV = head_logits(self._loaded, part_CD, _segments([(row.group.adapter, len(part_CD))]))
            outcome.scores.append(score(logits_CV, request, first))


def _row(one: Continuation, num_tokens: int) -> Row:
    """Return the next tokens that a sequence has yet to read."""
    assert one.place is not None
    return Row(one.group, one, one.place, one.num_held, one.known(one.num_held, one.num_held + num_tokens))


def _order(one: Continuation, share: int = 1) -> tuple[str, int, int, int]:
    """Sort by adapter, then by pool, number of tokens and place: neighbours are read together."""
    assert one.place is not None
    return one.group.request.adapter_dir, one.place.pool, share, one.place.number


def _segments(parts: Sequence[tuple[Adapter | None, int]]) -> list[Segment]:
    """Return the packed axis by adapter, neighbours with the same one joined."""
    segments: list[Segment] = []
    stop = 0
    for adapter, run in groupby(parts, key=lambda part: part[0]):
        start, stop = stop, stop + sum(length for _, length in run)
        segments.append(Segment(start, stop, adapter))
    return segments


def _wishes(row: Row, source: int) -> Iterator[Wish]:
    request = row.group.request
    if row.reads_prompt:
        yield from (Wish(source, request, index, 0) for index in range(request.num_samples))
    else:
        yield Wish(source, request, row.sequence.index, len(row.sequence.tokens))


def _drawn(logits_BV: Tensor, wishes: Sequence[Wish]) -> Iterator[Token]:
    """Draw the wished tokens in order, so many rows at a time that the batch stays in bounds."""
    for start in range(0, len(wishes), DRAW_ROWS):
        part = wishes[start : start + DRAW_ROWS]
        sources = [wish.source for wish in part]
        whole = sources == list(range(len(logits_BV)))
        part_BV = logits_BV if whole else logits_BV[torch.tensor(sources, device=logits_BV.device)]
        numbers = uniforms(
            [wish.request.seed for wish in part], [wish.sequence for wish in part], [wish.position for wish in part]
        )
        tokens_B, logprobs_B, logprobs_BV = draw(part_BV, [wish.request.rule for wish in part], numbers)
        top = _top(logprobs_BV, [wish.request.topk_sample for wish in part])
        yield from map(Token, tokens_B.tolist(), logprobs_B.tolist(), top)


def _top(logprobs_BV: Tensor, widths: Sequence[int]) -> list[codec.Candidates | None]:
    """Return the likeliest tokens of the rows that ask for some."""
    asking = [row for row, width in enumerate(widths) if width]
    found: list[codec.Candidates | None] = [None] * len(widths)
    if asking:
        best = top_logprobs(logprobs_BV[torch.tensor(asking, device=logprobs_BV.device)], max(widths))
        for index, row in enumerate(asking):
            # Copied: the whole would stay in memory as long as the narrowest part of it.
            cells = (array[index : index + 1, : widths[row]].copy() for array in best)
            found[row] = codec.Candidates(*cells)
    return found
