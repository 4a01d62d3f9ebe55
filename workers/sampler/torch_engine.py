"""Continuous batching in plain torch: one forward a step over whatever runs, joined and left at any token.

A step reads parts of new prompts and grows every running sequence by one token, all adapters together. It
first computes (`_run`, which changes nothing but cache positions that it would write again) and then takes
the outcome over, so that after a failure the same rows can be tried request by request and only the one
at fault is lost. One thread only.

Axes: T tokens of the step, B rows with a next token, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest, NotFound, OpenRLError
from openrl.workers.model import attention
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.logprobs import head_logits, target_logprobs
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.sampler.groups import Continuation, Group, Slot, Token
from openrl.workers.sampler.requests import Finished, Request, TopRow
from openrl.workers.sampler.sampling import draw, tempered_logprobs, top_logprobs, uniforms
from openrl.workers.sampler.slots import SMALLEST, Slots, next_group, prefill_shares
from openrl.workers.sampler.stops import Decode
from openrl.workers.sampler.versions import Versions

log = logging.getLogger(__name__)

DRAW_ROWS = 64
TOPK_BYTES = 64 << 20


class Row(NamedTuple):
    """New tokens of one slot: a part of a prompt (`continuation` None) or one drawn token."""

    group: Group
    continuation: Continuation | None
    slot: Slot
    start: int
    tokens: Sequence[int]

    @property
    def ends_prompt(self) -> bool:
        return self.continuation is None and len(self.tokens) == self.group.num_unread


@dataclass(slots=True)
class Outcome:
    """What a row gave: the tokens drawn after it, and the log-probabilities of the prompt within it."""

    tokens: list[Token] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[TopRow] = field(default_factory=list)


class Wish(NamedTuple):
    """A token to draw: from which row of the logits, for which place of which request."""

    source: int
    request: Request
    sequence: int
    position: int


class TorchEngine:
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
    ) -> None:
        """Run at most `num_slots` sequences on a cache of `kv_tokens` positions, a power of two."""
        self._loaded = loaded
        self._versions = versions
        self._decode = decode
        self._num_slots = num_slots
        self._prefill_tokens = prefill_tokens
        self._slots = Slots(num_slots, kv_tokens=kv_tokens)
        self._pools = attention.KVCache.pools(loaded, tokens=kv_tokens, smallest=SMALLEST)
        self._groups: list[Group] = []
        self._arrivals = 0

    @property
    def room(self) -> int:
        """How many more requests to take: each needs at least one slot."""
        return max(0, self._num_slots - len(self._groups))

    @property
    def requests(self) -> list[Request]:
        """Return what is in the engine, oldest first."""
        return [group.request for group in self._groups]

    def add(self, request: Request) -> None:
        """Let a request join at the next step."""
        self._groups.append(Group(request, arrival=self._arrivals))
        self._arrivals += 1

    def drop_all(self) -> None:
        """Forget everything that runs, half-drawn sequences included."""
        for group in list(self._groups):
            self._leave(group)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Advance everything that runs by one token, and prompts by their share; return what has ended."""
        finished = self._admit()
        rows = self._plan()
        if rows:
            finished += self._advance(rows)
        return finished

    def _admit(self) -> list[Finished]:
        """Hand out free slots; a request whose weights can't be loaded leaves at once."""
        failed = []
        while (group := next_group(self._groups)) is not None:
            slot = self._slots.take(group.request.cache_tokens)
            if slot is None:
                break
            if group.num_unread == 0:
                self._pools[slot.pool].copy(group.slots[0].number, slot.number, len(group.request.prompt))
                group.run_next(slot)
                continue
            group.slot = slot
            try:
                group.adapter = self._versions.acquire(group.request.adapter_dir)
                group.acquired = True
            except OpenRLError as failure:
                failed.append(self._fail(group, failure))
        return failed

    def _plan(self) -> list[Row]:
        """Choose the step's rows: single tokens together, then parts of prompts, each by adapter."""
        reading = [group for group in self._groups if group.slot is not None and group.num_unread]
        shares = prefill_shares([group.num_unread for group in reading], self._prefill_tokens)
        rows = [
            Row(group, None, group.slot, group.num_read, group.request.prompt[group.num_read : group.num_read + share])
            for group, share in zip(reading, shares, strict=True)
            if share and group.slot is not None
        ]
        for group in self._groups:
            for one in group.running:
                assert one.slot is not None
                rows.append(Row(group, one, one.slot, one.position, one.tokens[-1:]))
        return sorted(rows, key=lambda row: (row.continuation is None, row.group.request.adapter_dir, row.slot))

    def _advance(self, rows: list[Row]) -> list[Finished]:
        """Run the rows and take over what they gave; after a failure each request alone."""
        try:
            outcomes = self._run(rows)
        except Exception as failure:
            by_group = [list(part) for _, part in groupby(sorted(rows, key=_arrival), key=_arrival)]
            if len(by_group) == 1:
                return [self._fail(rows[0].group, failure)]
            log.warning("a step of %d requests failed (%s); trying them one by one", len(by_group), failure)
            return [ended for part in by_group for ended in self._advance(part)]
        finished = []
        pairs = sorted(zip(rows, outcomes, strict=True), key=lambda pair: _arrival(pair[0]))
        for _, part in groupby(pairs, key=lambda pair: _arrival(pair[0])):
            finished += self._take_over(list(part))
        return finished

    def _take_over(self, pairs: list[tuple[Row, Outcome]]) -> list[Finished]:
        """Note what some rows of one group gave."""
        group = pairs[0][0].group
        try:
            for row, outcome in pairs:
                self._note(row, outcome)
        except Exception as failure:
            return [self._fail(group, failure)]
        if not group.done:
            return []
        self._leave(group)
        return [Finished(request=group.request, result=group.result())]

    def _note(self, row: Row, outcome: Outcome) -> None:
        group, continuation = row.group, row.continuation
        if continuation is None:
            group.read_prompt(len(row.tokens), outcome.logprobs, outcome.topk)
            if outcome.tokens:
                group.begin(outcome.tokens, self._decode)
            return
        continuation.push(outcome.tokens[0])
        if continuation.stop_reason:
            slot = group.end(continuation)
            if slot is not None:
                self._release(slot)

    def _leave(self, group: Group) -> None:
        """Take a group out and give back all it holds."""
        for slot in group.slots:
            self._release(slot)
        if group.acquired:
            self._versions.release(group.request.adapter_dir)
        self._groups.remove(group)

    def _release(self, slot: Slot) -> None:
        """Give an empty slot back: what lies there next may be cut differently."""
        self._pools[slot.pool].clear(slot.number)
        self._slots.give(slot)

    def _fail(self, group: Group, failure: Exception) -> Finished:
        """End one request with an error; what wasn't raised on purpose is logged under an id."""
        self._leave(group)
        if isinstance(failure, OpenRLError):
            users = isinstance(failure, InvalidRequest | NotFound)
            return Finished(request=group.request, error=str(failure), category="user" if users else "server")
        error_id = secrets.token_hex(4)
        log.error("request %s failed, error %s", group.request.job.request_id, error_id, exc_info=failure)
        error = f"the sampler failed on this request; its log tells why (error {error_id})"
        return Finished(request=group.request, error=error)

    def _run(self, rows: list[Row]) -> list[Outcome]:
        """Compute a step: no state but the cache's positions of these rows changes."""
        hidden_TD = self._forward(rows)
        outcomes = [Outcome() for _ in rows]
        ends = list(accumulate(len(row.tokens) for row in rows))
        for row, outcome, end in zip(rows, outcomes, ends, strict=True):
            if row.continuation is None:
                self._look_at_prompt(row, outcome, hidden_TD[end - len(row.tokens) : end])
        drawing = [i for i, row in enumerate(rows) if row.continuation is not None or row.ends_prompt]
        if not drawing:
            return outcomes
        last_BD = hidden_TD[torch.tensor([ends[i] - 1 for i in drawing], device=hidden_TD.device)]
        logits_BV = head_logits(self._loaded, last_BD, _segments([(rows[i].group.adapter, 1) for i in drawing]))
        wishes = [wish for source, i in enumerate(drawing) for wish in _wishes(rows[i], source)]
        for wish, token in zip(wishes, _drawn(logits_BV, wishes), strict=True):
            outcomes[drawing[wish.source]].tokens.append(token)
        return outcomes

    def _forward(self, rows: list[Row]) -> Tensor:
        """Return the final hidden states [T, D] of the rows' tokens, cached on the way."""
        caches = [self._pools[row.slot.pool] for row in rows]
        cache_rows = [attention.Row(row.slot.number, row.start, len(row.tokens)) for row in rows]
        for cache, row in zip(caches, cache_rows, strict=True):
            # Whatever an earlier continuation, or a try that failed, left behind.
            cache.truncate(row.slot, row.start)
        device = self._loaded.device
        tokens_T = torch.tensor([token for row in rows for token in row.tokens], device=device)
        positions_T = attention.row_positions(cache_rows, device)
        with (
            routing(_segments([(row.group.adapter, len(row.tokens)) for row in rows])),
            attention.cached(caches, cache_rows),
        ):
            return attention.hidden_states(self._loaded, tokens_T, positions_T)

    def _look_at_prompt(self, row: Row, outcome: Outcome, hidden_TD: Tensor) -> None:
        """Fill in what the prompt's tokens after those of `row` were worth, if the request asks for it."""
        request = row.group.request
        first = row.start + 1
        targets = request.prompt[first : first + len(row.tokens)]
        hidden_TD = hidden_TD[: len(targets)]
        if not targets:
            return
        if request.prompt_logprobs:
            outcome.logprobs = target_logprobs(
                hidden_TD,
                self._loaded.head,
                torch.tensor(targets, device=hidden_TD.device),
                lora=row.group.adapter.factors(self._loaded.head_name) if row.group.adapter else None,
            ).tolist()
        if request.topk_prompt:
            rows = max(1, TOPK_BYTES // (4 * self._loaded.vocab_size))
            for part_CD in hidden_TD.split(rows):
                logits_CV = head_logits(self._loaded, part_CD, _segments([(row.group.adapter, len(part_CD))]))
                outcome.topk += top_logprobs(tempered_logprobs(logits_CV, [1.0] * len(part_CD)), request.topk_prompt)


def _arrival(row: Row) -> int:
    return row.group.arrival


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
    if row.continuation is not None:
        yield Wish(source, request, row.continuation.index, len(row.continuation.tokens))
    else:
        yield from (Wish(source, request, index, 0) for index in range(request.num_samples))


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


def _top(logprobs_BV: Tensor, widths: Sequence[int]) -> list[TopRow | None]:
    """Return the likeliest tokens of the rows that ask for some."""
    asking = [row for row, width in enumerate(widths) if width]
    found: list[TopRow | None] = [None] * len(widths)
    if asking:
        index_R = torch.tensor(asking, device=logprobs_BV.device)
        for row, best in zip(asking, top_logprobs(logprobs_BV[index_R], max(widths)), strict=True):
            found[row] = best[: widths[row]]
    return found
