"""Settings in the environment that nothing reads: most often a name with a letter missing.

Knows no setting by itself; it sees which ones the parts of a service ask for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches

OURS, OF_TESTS = "OPENRL_", "OPENRL_TEST_"
OF_OPTIONS = frozenset(
    f"OPENRL_{name}" for name in ("MODELS", "RESTART_MAX_S", "SAMPLER", "SAMPLER_PYTHON", "VERBOSE", "PARENT_PID")
)
"""What options of `openrl up` are read from, and no part of the service; the last is what a process tells another."""


class Watched(Mapping[str, str]):
    """An environment that remembers what was asked for, whether or not it was there."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self._environ[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._environ)

    def __len__(self) -> int:
        return len(self._environ)


def unread(environ: Collection[str], asked: Collection[str]) -> list[str]:
    """Say of each name of ours in `environ` that neither a part asks for nor an option, and what may be meant."""
    read = OF_OPTIONS.union(asked)
    ours = sorted(name for name in environ if name.startswith(OURS) and not name.startswith(OF_TESTS))
    return [_said(name, get_close_matches(name, read, 1, 0.85)) for name in ours if name not in read]


def _said(name: str, near: list[str]) -> str:
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is set, and no part of this service reads it{meant}"
