"""How far each request is: its prompt being read, then its sequences growing.

A sequence may lose its place in the cache at any time: it keeps what it has drawn, and reads it again where it goes
on. A prompt is read once, for all sequences, as long as one of them holds it. Pure bookkeeping: no torch, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from openrl.tasks.drafts import Draft
from openrl.tasks.errors import OperationFailed
from openrl.tasks.wire import codec
from openrl.workers.sampler import prompts
from openrl.workers.sampler.places import Place
from openrl.workers.sampler.prompts import Scores
from openrl.workers.sampler.requests import Request, Result
from openrl.workers.sampler.stops import Decode, StopText


class Token(NamedTuple):
    """One drawn token, its log-probability, and the likeliest tokens in its place [1, k] where they were asked for."""

    token: int
    logprob: float
    top: codec.Candidates | None = None


class Continuation:
    """One continuation of a group. `place` is None while it has none; `stop_reason` is empty until it ends."""

    __slots__ = (
        "_text", "age", "group", "index", "logprobs", "num_held", "num_known", "passed_at", "place", "stop_reason",
        "tokens", "top",
    )  # fmt: skip

    def __init__(self, group: Group, index: int, decode: Decode) -> None:
        self.group = group
        self.index = index
        self.age = (group.arrival, index)
        """Smaller is older."""
        self.place: Place | None = None
        self.num_known = len(group.request.prompt)
        """How many tokens it has, the prompt's included: all must be in its place before the next is drawn."""
        self.num_held = 0
        """How many of its known tokens are in its place."""
        self.passed_at: int | None = None
        """Since which step others have gone on where it could not."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[codec.Candidates] = []
        self.stop_reason: Literal["", "stop", "length"] = ""
        stops = group.request.stop_strings
        self._text = StopText(decode, stops, prompt=group.request.prompt) if stops else None

    @property
    def outgrown(self) -> bool:
        """Tell whether it can only go on in a longer place."""
        return self.place is not None and self.num_known > self.place.length

    def known(self, start: int, stop: int) -> Sequence[int]:
        """Return some of its known tokens."""
        prompt = self.group.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return [*prompt[start:], *self.tokens[max(0, start - len(prompt)) : stop - len(prompt)]]

    def push(self, drawn: Token) -> None:
        """Append a token; what ends the sequence is kept in it."""
        if not math.isfinite(drawn.logprob):
            raise OperationFailed("the model gave logits that are not finite; look at the training run's weights")
        request = self.group.request
        self.tokens.append(drawn.token)
        self.num_known += 1
        self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            self.top.append(drawn.top)
        complete = self._text is not None and self._text.push(drawn.token)
        if complete or drawn.token in request.stop_tokens:
            self.stop_reason = "stop"
        elif len(self.tokens) >= request.max_new:
            self.stop_reason = "length"
        if request.heard is not None:
            request.heard(self._draft(drawn))

    def _draft(self, drawn: Token) -> Draft:
        """Return a token for those who can't wait for the result."""
        rows = () if drawn.top is None else (cells[0].tolist() for cells in drawn.top)
        top = tuple(zip(*rows, strict=True))
        return Draft(self.index, len(self.tokens) - 1, drawn.token, drawn.logprob, top, self.stop_reason)

    def result(self) -> codec.SampledSequence:
        """Return the ended sequence as the wire wants it."""
        assert self.stop_reason, "the sequence hasn't ended"
        return codec.SampledSequence(
            tokens=self.tokens,
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            topk=codec.Candidates.joined(self.top) if self.top else None,
        )


class Group:
    """A request in the engine: its first sequence reads the prompt, then all begin.

    `running` are the sequences with a place, `waiting` those without, the next one first. `spare` is the place of one
    that has ended, while nobody else holds the prompt in it.
    """

    def __init__(self, request: Request, *, arrival: int, decode: Decode) -> None:
        self.request = request
        self.arrival = arrival
        self.adapter: Any = None
        self.ready = False
        """Whether `adapter` is what the request asks for."""
        self.begun = False
        self.running: list[Continuation] = []
        self.spare: Place | None = None
        self._all = [Continuation(self, index, decode) for index in range(request.num_samples)]
        self.waiting = deque(self._all)
        self._scores: list[Scores] = []

    @property
    def tenant(self) -> str:
        return self.request.job.tenant

    @property
    def next(self) -> Continuation | None:
        """Return the sequence that wants a place first; before all have begun only the first one does."""
        return self.waiting[0] if self.waiting and (self.begun or not self.running) else None

    @property
    def prompt_holder(self) -> Continuation | None:
        """Return a sequence that has all of the prompt in its place."""
        length = len(self.request.prompt)
        return next((one for one in self.running if one.num_held >= length), None)

    @property
    def num_drawn(self) -> int:
        """Return how many tokens its sequences have."""
        return sum(len(sequence.tokens) for sequence in self._all)

    @property
    def done(self) -> bool:
        """Tell whether every sequence has ended."""
        return not self.running and not self.waiting

    def enter(self, place: Place, *, num_held: int) -> Continuation:
        """Let the next sequence go on in `place`, which holds `num_held` tokens of the prompt."""
        sequence = self.waiting.popleft()
        sequence.place, sequence.num_held, sequence.passed_at = place, num_held, None
        self.running.append(sequence)
        return sequence

    def leave(self, sequence: Continuation) -> Place:
        """Take the place of a sequence that has ended, or is to go on later; return it."""
        place = sequence.place
        assert place is not None
        sequence.place, sequence.num_held = None, 0
        self.running.remove(sequence)
        if not sequence.stop_reason:
            self.waiting.appendleft(sequence)
            if not self.begun:
                self._scores.clear()
        return place

    def read_prompt(self, scores: Sequence[Scores]) -> None:
        """Note what the next part of the prompt was worth."""
        if not all(part.finite for part in scores):
            raise OperationFailed("the prompt's log-probabilities are not finite; look at the training run's weights")
        self._scores.extend(scores)

    def begin(self, first: Sequence[Token]) -> None:
        """Give every sequence its first token; those that it ends wait for nothing."""
        self.begun = True
        for sequence, drawn in zip(self._all, first, strict=True):
            sequence.push(drawn)
        self.waiting = deque(one for one in self.waiting if not one.stop_reason)

    def result(self) -> Result:
        """Return all that was drawn."""
        request = self.request
        return Result(
            sequences=[sequence.result() for sequence in self._all],
            prompt_logprobs=prompts.own_logprobs(self._scores, request),
            topk_prompt_logprobs=prompts.topk(self._scores, request),
            target_logprobs=prompts.targets(self._scores, request),
            alternatives=prompts.alternatives(self._scores, request),
        )
