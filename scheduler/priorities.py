"""Which workers come first, as an operator says: by tenant, and by base model. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

MOST = 1000
"""The highest priority; the lowest is its negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priorities:
    """Numbers by tenant and by model, the higher the earlier; 0 where neither is named."""

    tenants: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, int] = field(default_factory=dict)

    def of(self, owner: str, model: str) -> int:
        """Return the number of a worker: its tenant's, who has it to himself ("" nobody), else that of its model."""
        by_model = self.models.get(model, 0)
        return self.tenants.get(owner, by_model) if owner else by_model

    def unserved(self, served: Iterable[str]) -> list[str]:
        """Say of each model with a number that it isn't among those served."""
        return [
            f"OPENRL_MODEL_PRIORITY: {name!r} is no base model that is served; its number has no effect"
            for name in sorted(self.models.keys() - set(served))
        ]

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Priorities:
        """Read OPENRL_TENANT_PRIORITY and OPENRL_MODEL_PRIORITY. Raises ValueError naming the one that is wrong."""
        return cls(
            tenants=_read(environ, "OPENRL_TENANT_PRIORITY", "alice=10"),
            models=_read(environ, "OPENRL_MODEL_PRIORITY", "Qwen/Qwen3-8B=10"),
        )


def _read(environ: Mapping[str, str], name: str, example: str) -> dict[str, int]:
    given: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in environ.get(name, "").split(","))):
        who, _, text = part.rpartition("=")
        if not (who and re.fullmatch(r"-?[0-9]{1,4}", text) and abs(int(text)) <= MOST):
            raise ValueError(f"{name}: {part!r} must be a name and a whole number from -{MOST} to {MOST}, as {example}")
        if who in given:
            raise ValueError(f"{name}: {who!r} is there twice")
        given[who] = int(text)
    return given
