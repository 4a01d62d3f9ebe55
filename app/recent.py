"""Answers that may be a moment old: what thousands of polls ask alike is found out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

MOST = 4096
"""Answers that are remembered; beyond it all are forgotten."""


class Recent(Generic[T]):
    """Remembers each answer for `keep_s` seconds."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._known: dict[Hashable, tuple[float, T]] = {}

    def get(self, key: Hashable, find: Callable[[], T]) -> T:
        """Return the answer for `key`: the remembered one, else what `find` returns."""
        now = time.monotonic()
        known = self._known.get(key)
        if known is not None and now < known[0]:
            return known[1]
        remembered, answer = self._known, find()
        if len(remembered) >= MOST:
            remembered.clear()
        remembered[key] = now + self._keep_s, answer  # and not what was made anew meanwhile: it may have changed
        return answer

    def forget(self) -> None:
        """Find out everything anew, what is being found out just now included."""
        self._known = {}
