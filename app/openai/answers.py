"""How answers look: a completion's and a chat's, whole or in chunks, with log-probabilities as each has them.

A log-probability is the service's: of a drawn token the tempered one before the cut of top_p (at temperature 0 the
untempered one), of a prompt's token the untempered one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from openrl.app.openai.asked import Asked
from openrl.app.openai.plan import Plan, Prompt
from openrl.app.openai.tokenizer import Tokenizer
from openrl.app.openai.written import REPLACEMENT, Drawn, Pieces, Shown, Written
from openrl.workers.weights import layout

LEAST = -9999.0
"""Stands for a probability of 0: JSON has no infinity."""

LARGE_TOKENS = 2048
"""An answer with more tokens is put together off the event loop."""


class Form(Protocol):
    """One of the two kinds of answers. `tokens` None means that no log-probabilities were asked for."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> dict[str, Any]:
        """Return one whole answer."""

    def opening(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield what a stream begins with; `text` is the echoed prompt."""

    def delta(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> Iterator[dict[str, Any]]:
        """Yield what a stream goes on with; `finish` is empty until its end."""


class Completion:
    """Answers of /v1/completions."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._name = _namer(tokenizer)

    def choice(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> dict[str, Any]:
        """Return one whole answer."""
        logprobs = None if tokens is None else self._logprobs(tokens)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish or None}

    def opening(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield the echoed prompt."""
        if text:
            yield self.choice(index, text, None, "")

    def delta(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> Iterator[dict[str, Any]]:
        """Yield the next text."""
        if text or tokens or finish:
            yield self.choice(index, text, tokens, finish)

    def _logprobs(self, tokens: Sequence[Shown]) -> dict[str, Any]:
        return {
            "tokens": [token.name for token in tokens],
            "token_logprobs": [_finite(token.drawn.logprob) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _top(self, token: Shown) -> dict[str, float | None] | None:
        """Return the likeliest tokens and the drawn one; of several that read alike the likeliest counts."""
        if token.drawn.logprob is None:
            return None
        top: dict[str, float | None] = {}
        for candidate, logprob in token.drawn.top:
            top.setdefault(self._name(token, candidate), _finite(logprob))
        top.setdefault(self._name(token, token.drawn.token), _finite(token.drawn.logprob))
        return top


class Chat:
    """Answers of /v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._name = _namer(tokenizer)

    def choice(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> dict[str, Any]:
        """Return one whole answer."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(tokens), "finish_reason": finish}

    def opening(self, index: int, text: str) -> Iterator[dict[str, Any]]:
        """Yield who speaks."""
        assert not text, "a chat isn't echoed"
        yield self._part(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, text: str, tokens: Sequence[Shown] | None, finish: str) -> Iterator[dict[str, Any]]:
        """Yield the next text, and by itself how it ended."""
        if text or tokens:
            yield self._part(index, {"content": text}, tokens)
        if finish:
            yield self._part(index, {}, finish=finish)

    def _part(
        self, index: int, delta: dict[str, Any], tokens: Sequence[Shown] | None = None, finish: str = ""
    ) -> dict[str, Any]:
        return {
            "index": index, "delta": delta, "logprobs": self._logprobs(tokens), "finish_reason": finish or None,
        }  # fmt: skip

    def _logprobs(self, tokens: Sequence[Shown] | None) -> dict[str, Any] | None:
        if tokens is None:
            return None
        content = [
            {
                **_entry(token.name, token.drawn.logprob),
                "top_logprobs": [_entry(self._name(token, each), logprob) for each, logprob in token.drawn.top],
            }
            for token in tokens
        ]
        return {"content": content, "refusal": None}


def writer(plan: Plan, prompt: Prompt, offset: int) -> Written:
    """Return what turns one continuation of a prompt into text."""
    tokenizer = plan.tokenizer
    return Written(
        lambda ids: tokenizer.decode(ids, special=True),
        before=prompt.ids,
        hidden=tokenizer.special_ids,
        stops=plan.asked.stops,
        offset=offset,
    )


def drawn(sequence: Mapping[str, Any], start: int = 0) -> Iterator[tuple[Drawn, str]]:
    """Yield the tokens of a result's continuation from `start` on; with the last one, how it ended."""
    tokens, tops = sequence["tokens"], sequence.get("topk_logprobs")
    for place in range(start, len(tokens)):
        ended = sequence["stop_reason"] if place == len(tokens) - 1 else ""
        yield Drawn(tokens[place], sequence["logprobs"][place], (tops and tops[place]) or ()), ended


def answer(plan: Plan, form: Form, results: Mapping[int, Mapping[str, Any]], number: str) -> dict[str, Any]:
    """Return the whole answer."""
    choices = [
        choice
        for place, prompt in enumerate(plan.prompts)
        for choice in _choices(plan, form, place * plan.asked.n, prompt, results[place])
    ]
    return {
        **head(plan.asked, form.prefix, form.whole, number), "choices": choices, "usage": usage(plan, results),
    } | fingerprint(plan)  # fmt: skip


def fingerprint(plan: Plan) -> dict[str, str]:
    """Return which weights answer, as the sampler's results say it; nothing for a base model's own."""
    asked = plan.samples[0]
    if not asked.adapter_dir:
        return {}
    return {"system_fingerprint": layout.version_id(asked.adapter_dir, asked.weights_digest)}


def _choices(plan: Plan, form: Form, first: int, prompt: Prompt, result: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    text, echoed = echo(plan, prompt, result) if plan.asked.echo else ("", [])
    for place, sequence in enumerate(result["sequences"]):
        shown, finish = list(echoed), "length"
        if plan.asked.max_tokens != 0:
            written = writer(plan, prompt, len(text))
            for token, ended in drawn(sequence):
                shown.extend(written.push(token, ended))
            finish = written.finish
        whole = text + "".join(token.text for token in shown[len(echoed) :])
        yield form.choice(first + place, whole, None if plan.asked.logprobs is None else shown, finish)


def head(asked: Asked, prefix: str, kind: str, number: str) -> dict[str, Any]:
    """Return what every answer and every chunk begins with; `number` is the request's own."""
    return {"id": f"{prefix}-{number}", "object": kind, "created": int(time.time()), "model": asked.model}


def usage(plan: Plan, results: Mapping[int, Mapping[str, Any]]) -> dict[str, int]:
    """Return how many tokens were read and drawn."""
    num_read = sum(len(prompt.ids) for prompt in plan.prompts)
    num_drawn = sum(len(sequence["tokens"]) for result in results.values() for sequence in result["sequences"])
    if plan.asked.max_tokens == 0:
        num_drawn = 0
    return {"prompt_tokens": num_read, "completion_tokens": num_drawn, "total_tokens": num_read + num_drawn}


def echo(plan: Plan, prompt: Prompt, result: Mapping[str, Any] | None) -> tuple[str, list[Shown]]:
    """Return a prompt's text and its tokens; their log-probabilities where a result has them."""
    tokenizer, pieces = plan.tokenizer, Pieces(lambda ids: plan.tokenizer.decode(ids, special=False), ())
    logprobs = (result or {}).get("prompt_logprobs") or [None] * len(prompt.ids)
    tops = (result or {}).get("topk_prompt_logprobs") or [None] * len(prompt.ids)
    tokens: list[Shown] = []
    before, end = None, 0
    for place, token in enumerate(prompt.ids):
        piece = pieces.push(token)
        name = tokenizer.decode([token], special=True) if token in tokenizer.special_ids else piece
        begin = max(end, prompt.starts[place]) if prompt.text is not None else end
        tokens.append(Shown(Drawn(token, logprobs[place], tops[place] or ()), name, piece, begin, before))
        before, end = token, begin if prompt.text is not None else begin + len(piece)
    return (prompt.text if prompt.text is not None else "".join(token.text for token in tokens)), tokens


def _namer(tokenizer: Tokenizer) -> Callable[[Shown, int], str]:
    """Return what says how a token would read in the place of another."""

    def name(place: Shown, token: int) -> str:
        if token == place.drawn.token and place.name:
            return place.name
        before = [] if place.before is None else [place.before]
        context = tokenizer.decode(before, special=True)
        if context.endswith(REPLACEMENT):
            before, context = [], ""
        text = tokenizer.decode([*before, token], special=True)[len(context) :]
        # Parts of characters read alike: only the tokenizer's own names tell them apart.
        return tokenizer.own_name(token) if REPLACEMENT in text or not text else text

    return name


def _entry(name: str, logprob: float | None) -> dict[str, Any]:
    return {"token": name, "logprob": _finite(logprob), "bytes": list(name.encode())}


def _finite(logprob: float | None) -> float | None:
    return logprob if logprob is None or math.isfinite(logprob) else LEAST
