"""Answers as server-sent events, token by token as the sampler draws them.

Tokens that went unheard come with the sample's result, which has the last word: a stream that told otherwise (its
sampler died, and another drew anew on other hardware) ends with an error. Nothing here needs the request any more.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openrl.app.greenlets import off_loop
from openrl.app.openai import answers
from openrl.app.openai.answers import LARGE_TOKENS, Form
from openrl.app.openai.errors import SampleFailed, described
from openrl.app.openai.order import Order
from openrl.app.openai.plan import Plan
from openrl.app.openai.written import Drawn
from openrl.tasks.drafts import Draft

KEEP_ALIVE_S = 10.0
"""After so long without a token a comment is sent, so that no proxy on the way takes the connection for dead."""

KEEP_ALIVE = b": keep-alive\n\n"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class Stream:
    """The body of one streamed answer. Closing it, as the server does when the client has gone, cancels the rest."""

    def __init__(
        self, plan: Plan, form: Form, order: Order, number: str, *, keep_alive_s: float = KEEP_ALIVE_S
    ) -> None:
        self._plan, self._form, self._order, self._number = plan, form, order, number
        self._keep_alive_s = keep_alive_s
        self._head = answers.head(plan.asked, form.prefix, form.chunk, number) | answers.fingerprint(plan)
        self._echoes = off_loop(_echoes, plan, large=sum(len(prompt.ids) for prompt in plan.prompts) > LARGE_TOKENS)
        self._written = [
            [answers.writer(plan, prompt, len(text)) for _ in range(plan.asked.n)]
            for prompt, text in zip(plan.prompts, self._echoes, strict=True)
        ]

    def __iter__(self) -> Iterator[bytes]:
        """Yield events until the end, or an error, which is an event too."""
        try:
            yield KEEP_ALIVE  # at once, so that the client knows its stream open
            for choice in self._opening():
                yield self._event(choice)
            yield from self._growing()
            if self._plan.asked.include_usage:
                yield _data({**self._head, "choices": [], "usage": answers.usage(self._plan, self._order.results)})
            yield b"data: [DONE]\n\n"
        except Exception as error:  # the status has left already
            yield _data(described(error, self._number)[1])
        finally:
            self.close()

    def close(self) -> None:
        """Give up what isn't finished."""
        self._order.close()

    def _opening(self) -> Iterator[dict[str, Any]]:
        for place, text in enumerate(self._echoes):
            for number in range(self._plan.asked.n):
                yield from self._form.opening(place * self._plan.asked.n + number, text)

    def _growing(self) -> Iterator[bytes]:
        told: set[int] = set()
        said_at = time.monotonic()
        for drafts in self._order:
            ended = self._order.results.keys() - told
            told |= ended
            choices = [*self._heard(drafts), *(choice for place in sorted(ended) for choice in self._result(place))]
            for choice in choices:
                yield self._event(choice)
            if choices:
                said_at = time.monotonic()
            elif time.monotonic() - said_at >= self._keep_alive_s:
                said_at = time.monotonic()
                yield KEEP_ALIVE

    def _heard(self, drafts: Sequence[tuple[int, Draft]]) -> Iterator[dict[str, Any]]:
        """Yield what tokens add that come next; later ones wait for the result."""
        for place, draft in drafts:
            written = self._written[place][draft.sequence]
            if draft.position == len(written.tokens) and self._plan.asked.max_tokens != 0:
                yield from self._push(place, draft.sequence, Drawn(draft.token, draft.logprob, draft.top), draft.ended)

    def _result(self, place: int) -> Iterator[dict[str, Any]]:
        """Yield what a prompt's result has beyond what was heard."""
        for number, sequence in enumerate(self._order.results[place]["sequences"]):
            written = self._written[place][number]
            if self._plan.asked.max_tokens == 0:
                yield from self._form.delta(self._index(place, number), "", None, "length")
                continue
            if sequence["tokens"][: len(written.tokens)] != written.tokens:
                raise SampleFailed("the sampler ended, and another drew other tokens: send the request again")
            for token, ended in answers.drawn(sequence, len(written.tokens)):
                yield from self._push(place, number, token, ended)

    def _push(self, place: int, number: int, token: Drawn, ended: str) -> Iterator[dict[str, Any]]:
        written = self._written[place][number]
        if written.finish:
            return
        shown = written.push(token, ended)
        tokens = None if self._plan.asked.logprobs is None else shown
        yield from self._form.delta(
            self._index(place, number), "".join(each.text for each in shown), tokens, written.finish
        )

    def _index(self, place: int, number: int) -> int:
        return place * self._plan.asked.n + number

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        usage = {"usage": None} if self._plan.asked.include_usage else {}
        return _data({**self._head, "choices": [choice], **usage})


def _echoes(plan: Plan) -> list[str]:
    """Return the texts of the prompts, where they are to be told."""
    return [answers.echo(plan, prompt, None)[0] if plan.asked.echo else "" for prompt in plan.prompts]


def _data(value: Mapping[str, Any]) -> bytes:
    return b"data: %s\n\n" % json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
