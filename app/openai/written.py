"""From drawn tokens to text that may be shown, token by token: no half characters, and nothing of a stop string.

A whole answer is made by the same steps as a stream, so both hold the same text. Pure: knows a decoding function, not
a tokenizer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

CONTEXT_TOKENS = 6
"""Tokens before a new one that are decoded with it: alone it might lose its leading space, or be half a character."""

UNFINISHED_TOKENS = 8
"""So many tokens without a whole character are no character at all."""

REPLACEMENT = "\ufffd"

Decode = Callable[[Sequence[int]], str]


class Drawn(NamedTuple):
    """A token and its log-probability (None: it has none), and the likeliest in its place, best first."""

    token: int
    logprob: float | None
    top: Sequence[tuple[int, float]]


class Shown(NamedTuple):
    """A token that may be shown: what it reads as, the text that it adds, and where in the answer that begins."""

    drawn: Drawn
    name: str
    text: str
    offset: int
    before: int | None
    """The token before it."""


class Pieces:
    """Tells what each token adds to a growing text. Those inside a character add nothing, its last one all of it."""

    def __init__(self, decode: Decode, before: Sequence[int]) -> None:
        self._decode = decode
        self._window = list(before[-CONTEXT_TOKENS:])
        self._read = len(self._window)
        # A character that begins before the text belongs to it as soon as it is whole.
        self._context = decode(self._window).rstrip(REPLACEMENT)

    def push(self, token: int) -> str:
        """Return what the next token adds."""
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._read < UNFINISHED_TOKENS:
            return ""
        piece = text[len(self._context) :]
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._context = self._decode(self._window)
        return piece


class Written:
    """One continuation as far as it may be shown. `finish` is empty until it ends."""

    def __init__(
        self,
        decode: Decode,
        *,
        before: Sequence[int],
        hidden: frozenset[int],
        stops: Sequence[str],
        offset: int,
    ) -> None:
        """`decode` keeps special tokens, which `hidden` names: stops are looked for in them, nobody is shown them."""
        self.finish: Literal["", "stop", "length"] = ""
        self.tokens: list[int] = []
        self._pieces = Pieces(decode, before)
        self._last = before[-1] if before else None
        self._hidden = hidden
        self._stops = stops
        self._offset = offset
        self._buffer = ""
        self._held: deque[tuple[Drawn, str, bool, int | None]] = deque()

    def push(self, drawn: Drawn, ended: str = "") -> list[Shown]:
        """Take the next token, `ended` being "stop" or "length" with the last; return what may be shown now.

        Nothing counts any more once a stop string is complete.
        """
        if self.finish:
            return []
        piece = self._pieces.push(drawn.token)
        self.tokens.append(drawn.token)
        self._held.append((drawn, piece, drawn.token not in self._hidden, self._last))
        self._last = drawn.token
        self._buffer += piece
        found = [place for stop in self._stops if (place := self._buffer.find(stop)) >= 0]
        if found:
            self.finish = "stop"
            return self._release(min(found), all_of_it=True)
        if ended == "stop":
            return self._end_of_sequence()
        if ended:
            self.finish = "length"
            return self._release(len(self._buffer), all_of_it=True)
        return self._release(len(self._buffer) - _beginnings(self._buffer, self._stops))

    def _end_of_sequence(self) -> list[Shown]:
        """End at the model's own token: it isn't text."""
        self.finish = "stop"
        drawn, piece, _, before = self._held.pop()
        self._held.append((drawn, piece, False, before))
        return self._release(len(self._buffer), all_of_it=True)

    def _release(self, upto: int, *, all_of_it: bool = False) -> list[Shown]:
        """Return the tokens whose text lies before `upto` in the buffer; or all, with the text before it."""
        released: list[Shown] = []
        while self._held and (all_of_it or len(self._held[0][1]) <= upto):
            drawn, piece, visible, before = self._held.popleft()
            text = piece[: max(0, upto)] if visible else ""
            released.append(Shown(drawn, piece, text, self._offset, before))
            self._offset += len(text)
            self._buffer = self._buffer[len(piece) :]
            upto -= len(piece)
        return released


def _beginnings(text: str, stops: Sequence[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop."""
    longest = min(len(text), max((len(stop) - 1 for stop in stops), default=0))
    return next((size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in stops)), 0)
