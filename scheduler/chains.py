"""Which directories a full run's versions need beside their own: those from which their deltas lead, back to an anchor.

Reads the versions' manifests, no weights. What can't be read may need anything that lies beside it; only a directory
that is proved absent needs nothing. Knows neither rows nor what becomes of a directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights import layout, links

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16
"""Versions whose parents are known without reading; a version never changes."""


@dataclass(slots=True)
class Chains:
    """What some versions need: directories relative to the data directory.

    `homes` are those of which a version's way isn't known now: whatever lies directly in one may be needed.
    """

    needed: set[str] = field(default_factory=set)
    homes: set[str] = field(default_factory=set)

    def need(self, directory: str) -> bool:
        """Tell whether a directory is needed, or may be."""
        return directory in self.needed or str(PurePosixPath(directory).parent) in self.homes


def ancestors(data_dir: Path, directories: Iterable[str]) -> Chains:
    """Return what these versions can't be read without."""
    found = Chains()
    for directory in directories:
        try:
            _follow(data_dir, directory, found.needed)
        except (InvalidRequest, NotFound, OSError) as trouble:
            log.warning("what %s leads on from isn't known, so nothing beside it is deleted: %s", directory, trouble)
            found.homes.add(str(PurePosixPath(directory).parent))
    return found


def _follow(data_dir: Path, directory: str, needed: set[str]) -> None:
    parent = _parent(data_dir, directory)
    while parent and parent not in needed:
        needed.add(parent)
        parent = _parent(data_dir, parent)


def _parent(data_dir: Path, directory: str) -> str:
    try:
        return _known_parent(data_dir, directory)
    except (InvalidRequest, NotFound, OSError):
        if _is_absent(layout.resolve(data_dir, directory)):
            return ""
        raise


def _is_absent(path: Path) -> bool:
    """Tell whether there is surely no such directory. `Path.is_dir` also says no where it couldn't look."""
    try:
        path.stat()
    except FileNotFoundError:
        return True
    return False


@lru_cache(maxsize=REMEMBERED)
def _known_parent(data_dir: Path, directory: str) -> str:
    """Return the directory that a version's delta leads on from, "" for an anchor, which can be read alone."""
    path = layout.existing(data_dir, directory)
    link = links.read(path.parent, path.name)
    if link.anchor is not None or link.parent is None:
        return ""
    return str(PurePosixPath(directory).with_name(link.parent.name))
