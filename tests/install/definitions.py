"""Our custom resource definitions, and what an API server with strict field validation says to an object of theirs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.kube.schema import check, prune

CRDS = Path(__file__).parents[2] / "k8s" / "crds"


class Definition:
    """One CustomResourceDefinition with its one version."""

    def __init__(self, path: Path) -> None:
        self.manifest: dict[str, Any] = yaml.safe_load(path.read_text())
        self.names = self.manifest["spec"]["names"]
        [self.version] = self.manifest["spec"]["versions"]
        self.schema: dict[str, Any] = self.version["schema"]["openAPIV3Schema"]

    def errors(self, new: dict[str, Any], old: dict[str, Any] | None = None) -> list[str]:
        """Return what is wrong with an object; `old` is what it replaces."""
        pruned, before = copy.deepcopy(new), copy.deepcopy(old)
        prune(self.version, pruned)
        if before is not None:
            prune(self.version, before)
        return [*_lost(new, pruned, ""), *check(self.version, pruned, before)]


def definitions() -> dict[str, Definition]:
    """Return our definitions by kind."""
    found = [Definition(path) for path in sorted(CRDS.glob("[!k]*.yaml"))]
    return {definition.names["kind"]: definition for definition in found}


def _lost(new: Any, pruned: Any, where: str) -> Iterator[str]:
    if isinstance(new, dict):
        for name, value in new.items():
            below = f"{where}.{name}" if where else name
            if name in pruned:
                yield from _lost(value, pruned[name], below)
            else:
                yield f"{below}: unknown field"
    if isinstance(new, list):
        for index, (item, kept) in enumerate(zip(new, pruned, strict=True)):
            yield from _lost(item, kept, f"{where}[{index}]")
