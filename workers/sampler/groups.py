"""How far each request is: its prompt being read, then its continuations growing.

A group keeps a slot of the cache as long as one of its continuations needs one: the prompt in it is what
later continuations start from. Pure bookkeeping: no torch, no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from openrl.tasks.errors import OperationFailed
from openrl.tasks.wire import codec
from openrl.workers.sampler.requests import Request, Result, TopRow
from openrl.workers.sampler.stops import Decode, StopText


class Slot(NamedTuple):
    """A place in the cache: the `number`-th of those in a pool of places of one length."""

    pool: int
    number: int


class Token(NamedTuple):
    """One drawn token, its log-probability, and the likeliest tokens in its place where they were asked for."""

    token: int
    logprob: float
    top: TopRow | None = None


class Continuation:
    """One sequence of a group. `slot` is None until it has one; `stop_reason` is empty until it ends."""

    __slots__ = ("_request", "_text", "index", "logprobs", "slot", "stop_reason", "tokens", "top")

    def __init__(self, request: Request, index: int, decode: Decode) -> None:
        self.index = index
        self.slot: Slot | None = None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[TopRow] = []
        self.stop_reason: Literal["", "stop", "length"] = ""
        self._request = request
        self._text = StopText(decode, request.stop_strings, prompt=request.prompt) if request.stop_strings else None

    def push(self, drawn: Token) -> None:
        """Append a token; what ends the sequence is kept in it."""
        if not math.isfinite(drawn.logprob):
            raise OperationFailed("the model gave logits that are not finite; look at the training run's weights")
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if drawn.top is not None:
            self.top.append(drawn.top)
        complete = self._text is not None and self._text.push(drawn.token)
        if complete or drawn.token in self._request.stop_tokens:
            self.stop_reason = "stop"
        elif len(self.tokens) >= self._request.max_new:
            self.stop_reason = "length"

    @property
    def position(self) -> int:
        """Where in the cache the last token goes."""
        return len(self._request.prompt) + len(self.tokens) - 1

    def result(self) -> codec.SampledSequence:
        """Return the ended sequence as the wire wants it."""
        assert self.stop_reason, "the sequence hasn't ended"
        return codec.SampledSequence(
            tokens=self.tokens,
            logprobs=self.logprobs,
            stop_reason=self.stop_reason,
            topk=self.top if self._request.topk_sample else None,
        )


class Group:
    """A request in the engine. `slot` holds its prompt while this is read; `waiting` lack a slot to go on in."""

    def __init__(self, request: Request, *, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.adapter: Any = None
        self.acquired = False
        self.slot: Slot | None = None
        self.num_read = 0
        self.running: list[Continuation] = []
        self.waiting: deque[Continuation] = deque()
        self._all: list[Continuation] = []
        self._prompt_logprobs: list[float | None] = [None]
        self._topk_prompt: list[TopRow | None] = [None]

    @property
    def tenant(self) -> str:
        return self.request.job.tenant

    @property
    def num_unread(self) -> int:
        """How many prompt tokens the model hasn't seen yet."""
        return len(self.request.prompt) - self.num_read

    @property
    def slots(self) -> list[Slot]:
        """Return the slots that the group holds."""
        held = [continuation.slot for continuation in self.running]
        return [slot for slot in (self.slot, *held) if slot is not None]

    @property
    def wants_slot(self) -> bool:
        """Tell whether another slot would let it go on faster, or begin."""
        return bool(self.waiting) or (self.slot is None and self.num_unread > 0)

    @property
    def done(self) -> bool:
        """Tell whether every continuation has ended."""
        return self.num_unread == 0 and not self.running and not self.waiting

    def read_prompt(self, num_tokens: int, logprobs: Sequence[float], topk: Sequence[TopRow]) -> None:
        """Note the next part of the prompt as read, with what it had to say of the tokens after it."""
        if not all(map(math.isfinite, logprobs)):
            raise OperationFailed("the prompt's log-probabilities are not finite; look at the training run's weights")
        self.num_read += num_tokens
        self._prompt_logprobs.extend(logprobs)
        self._topk_prompt.extend(topk)

    def begin(self, first: Sequence[Token], decode: Decode) -> None:
        """Start every continuation with its first token; the first that goes on takes the prompt's slot."""
        for index, drawn in enumerate(first):
            continuation = Continuation(self.request, index, decode)
            continuation.push(drawn)
            self._all.append(continuation)
            if not continuation.stop_reason:
                self.waiting.append(continuation)
        if self.waiting:
            assert self.slot is not None
            self.run_next(self.slot)
            self.slot = None

    def run_next(self, slot: Slot) -> None:
        """Let the next waiting continuation go on in `slot`, which holds the prompt."""
        continuation = self.waiting.popleft()
        continuation.slot = slot
        self.running.append(continuation)

    def end(self, continuation: Continuation) -> Slot | None:
        """Take out an ended continuation and return its slot, unless it is the last that holds the prompt."""
        slot = continuation.slot
        assert slot is not None
        continuation.slot = None
        self.running.remove(continuation)
        if self.waiting and not self.running:
            self.run_next(slot)
            return None
        return slot

    def result(self) -> Result:
        """Return all that was drawn."""
        request = self.request
        return Result(
            sequences=[continuation.result() for continuation in self._all],
            prompt_logprobs=self._prompt_logprobs if request.prompt_logprobs else None,
            topk_prompt_logprobs=self._topk_prompt if request.topk_prompt else None,
        )
