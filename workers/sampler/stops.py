"""Where a sequence ends: stop tokens, and stop strings found across token boundaries.

Text is decoded a few tokens at a time, in the context of the tokens before, because a token alone may be
part of a character or lose its leading space. Knows a decoding function, not a tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

CONTEXT_TOKENS = 6
UNFINISHED_TOKENS = 8
REPLACEMENT = "\ufffd"


class StopText:
    """Watches the text of one growing sequence for any of `stops`."""

    def __init__(self, decode: Decode, stops: Sequence[str], *, prompt: Sequence[int]) -> None:
        """Watch for `stops` (none empty) in what comes after `prompt`, never in the prompt itself."""
        self._decode = decode
        self._stops = stops
        self._longest = max(len(stop) for stop in stops)
        self._window = list(prompt[-CONTEXT_TOKENS:])
        self._read = len(self._window)
        self._context = decode(self._window)
        self._tail = ""

    def push(self, token: int) -> bool:
        """Take the next token; tell whether a stop string is now complete, be it in the middle of the token."""
        self._window.append(token)
        text = self._decode(self._window)
        seen = self._tail + text[len(self._context) :]
        # A text that ends inside a character is looked at, and read again with the tokens that end it.
        if not text.endswith(REPLACEMENT) or len(self._window) - self._read >= UNFINISHED_TOKENS:
            self._tail = seen[len(seen) - min(len(seen), self._longest - 1) :]
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._context = self._decode(self._window)
        return any(stop in seen for stop in self._stops)
