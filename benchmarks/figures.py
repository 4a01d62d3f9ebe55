"""One line of output: a figure's name, the service, the plain loop, and how far the runs lie apart."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One line of output. `spread` is the largest minus the smallest of the runs behind `value`."""

    name: str
    value: float
    unit: str
    baseline: float
    ratio: float | None
    runs: int
    spread: float


def figure(name: str, values: list[float], unit: str, baseline: list[float], *, ratio: float | None = None) -> Figure:
    """Return the line for a figure's runs."""
    return Figure(
        name=name,
        value=round(median(values), 3),
        unit=unit,
        baseline=round(median(baseline), 3),
        ratio=None if ratio is None else round(ratio, 3),
        runs=len(values),
        spread=round(max(values) - min(values), 3),
    )


def compared(name: str, values: list[float], unit: str, baseline: list[float]) -> Figure:
    """Return the line for a figure whose target is a ratio to the baseline."""
    return figure(name, values, unit, baseline, ratio=median(values) / median(baseline))


def show(line: Figure) -> None:
    """Print a figure: one line of JSON on standard output."""
    print(json.dumps(asdict(line)), flush=True)


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Return the seconds that each call took."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


def mean(values: list[float]) -> float:
    """Return the mean."""
    return sum(values) / len(values)


def check(holds: bool, otherwise: str) -> None:
    """Stop when the service didn't do what was measured."""
    if not holds:
        sys.exit(f"bench: {otherwise}")


def note(text: str) -> None:
    """Tell whoever watches; standard output is for the figures."""
    print(f"bench: {text} (load {os.getloadavg()[0]:.1f})", file=sys.stderr, flush=True)
