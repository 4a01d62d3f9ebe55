"""Sizes in bytes as an operator reads them."""

from __future__ import annotations

import math

_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def in_words(size_bytes: float) -> str:
    """Return a size with three digits that count: `13.4 GiB`."""
    if math.isinf(size_bytes):
        return "unknown size"
    for unit, name in _UNITS:
        if abs(size_bytes) >= unit:
            value = size_bytes / unit
            return f"{value:.0f} {name}" if value >= 100 else f"{value:.3g} {name}"
    return f"{size_bytes:.0f} bytes"
