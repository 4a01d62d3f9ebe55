"""Which tokens of a pass use which adapter. Knows no tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

from openrl.workers.weights.adapter import Adapter


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [start, stop) of the packed axis use `adapter`; None is the base alone."""

    start: int
    stop: int
    adapter: Adapter | None


def joined(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """Join neighbours of one adapter and leave out those of the base alone.

    Raises:
        ValueError: the segments overlap, or aren't in order.
    """
    merged: list[Segment] = []
    position = 0
    for segment in segments:
        if segment.start < position or segment.stop < segment.start:
            raise ValueError(f"segment [{segment.start}, {segment.stop}) overlaps the one before, or is reversed")
        position = segment.stop
        if segment.adapter is None or segment.stop == segment.start:
            continue
        if merged and merged[-1].adapter is segment.adapter and merged[-1].stop == segment.start:
            merged[-1] = Segment(merged[-1].start, segment.stop, segment.adapter)
        else:
            merged.append(segment)
    return tuple(merged)


def require_within(route: Sequence[Segment], total: int) -> None:
    """Check that a route ends with the tokens at the latest.

    Raises:
        ValueError: it is longer.
    """
    if route and route[-1].stop > total:
        raise ValueError(f"segments end at {route[-1].stop}, there are {total} tokens")


def segments_over(route: Sequence[Segment], total: int) -> list[Segment]:
    """All `total` tokens: the segments of `route`, and those of the base alone between and behind them.

    Raises:
        ValueError: the route is longer.
    """
    require_within(route, total)
    whole, position = [], 0
    for segment in (*route, Segment(total, total, None)):
        if segment.start > position:
            whole.append(Segment(position, segment.start, None))
        if segment.stop > segment.start:
            whole.append(segment)
        position = segment.stop
    return whole
