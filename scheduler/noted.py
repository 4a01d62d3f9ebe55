"""An environment that notes what is asked of it. Knows no setting by itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class Noted(Mapping[str, str]):
    """An environment that remembers which names were asked for, whether or not they were there."""

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

    @property
    def answered(self) -> dict[str, str]:
        """Return what was asked for and is set."""
        return {name: self._environ[name] for name in sorted(self.asked) if name in self._environ}
