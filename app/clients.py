"""Which client asks, where it matters: an old SDK refuses a whole answer over one value that it doesn't know."""

from __future__ import annotations

import re

from flask import request

SDK_HEADER = "X-Stainless-Package-Version"

EXTERNAL_SINCE = (0, 28)
"""The first SDK that knows checkpoints of the type `external`."""


def unknown_kinds() -> frozenset[str]:
    """Return the types of checkpoints that the client can't read: none, where it doesn't say that it is an old SDK."""
    version = re.match(r"(\d{1,4})\.(\d{1,4})\.", request.headers.get(SDK_HEADER, ""))
    if version and (int(version[1]), int(version[2])) < EXTERNAL_SINCE:
        return frozenset({"external"})
    return frozenset()
