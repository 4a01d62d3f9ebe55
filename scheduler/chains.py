"""Which directories a full run's versions need beside their own: those from which their deltas lead, back to an anchor.

Reads the versions' manifests, no weights. Knows neither rows nor what becomes of a directory.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path, PurePosixPath

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights import layout, links

log = logging.getLogger(__name__)

REMEMBERED = 1 << 16
"""Versions whose parents are known without reading; a version never changes."""


def ancestors(data_dir: Path, directories: Iterable[str]) -> set[str]:
    """Return the directories (relative to the data directory) without which these versions can't be read.

    A version that can't be read itself needs none.
    """
    needed: set[str] = set()
    for directory in directories:
        parent = _parent(data_dir, directory)
        while parent and parent not in needed:
            needed.add(parent)
            parent = _parent(data_dir, parent)
    return needed


def _parent(data_dir: Path, directory: str) -> str:
    try:
        return _known_parent(data_dir, directory)
    except (InvalidRequest, NotFound) as trouble:
        log.warning("what %s leads on from isn't known: %s", directory, trouble)
        return ""


@lru_cache(maxsize=REMEMBERED)
def _known_parent(data_dir: Path, directory: str) -> str:
    """Return the directory that a version's delta leads on from, "" for an anchor, which can be read alone."""
    path = layout.existing(data_dir, directory)
    link = links.read(path.parent, path.name)
    if link.anchor is not None or link.parent is None:
        return ""
    return str(PurePosixPath(directory).with_name(link.parent.name))
