"""Names of accelerators, owners and what the store keeps of them; `accelerator.lua` says what lies where."""

from __future__ import annotations

import re

ACCELERATORS = "openrl:accelerators"
"""set: every accelerator that was ever asked for"""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,199}")


def accelerator(name: str) -> str:
    """hash: the present turn and the totals of an accelerator; also the channel of its changes."""
    return f"openrl:accelerator:{check('accelerator', name)}"


def line(name: str) -> str:
    """zset: owner that waits -> since when, in microseconds."""
    return accelerator(name) + ":line"


def switches(name: str) -> str:
    """list: the last turns that ended, newest first, JSON."""
    return accelerator(name) + ":switches"


def owner(name: str, who: str) -> str:
    """hash with a TTL: what one owner had of an accelerator."""
    return f"{accelerator(name)}:owner:{who}"


def owners(name: str) -> str:
    """Return the pattern of all owners' keys."""
    return accelerator(name) + ":owner:*"


def check(what: str, name: str) -> str:
    """Return `name` if an accelerator or an owner may be called so.

    Raises:
        ValueError: it may not; the text says what may.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} is {name[:80]!r}; use 1 to 200 of A-Z a-z 0-9 . _ : / -, beginning with a letter or digit"
        )
    return name
