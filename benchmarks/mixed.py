"""Eight runs of different ranks that train at once on one base model.

Against the same tokens as one batch of a plain loop, and, where the work is small, against the same eight steps one
after another. A run's data is its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from data import batch_of, datums
from figures import Figure, compared, mean, note, timed
from plain import fastest
from service import Steps, step, steps

if TYPE_CHECKING:
    from bench import Bench

RANKS = (1, 2, 4, 8, 8, 16, 32, 64)
DATUMS, LENGTH = 4, 64
SHORT = 32


def tok_s(bench: Bench, name: str, *, times: int) -> Figure:
    """Four sequences a run and a step each, all sent before any is awaited; the plain loop has them as one batch."""
    length = min(LENGTH, bench.size.longest)
    batches = [batch_of([length] * DATUMS, seed=seed) for seed in range(len(RANKS))]
    work = _work(bench, batches)
    merged = [one for batch in batches for one in batch]
    tokens = length * len(merged)
    ways = fastest(bench.plain, merged, times)
    note(f"{name}: {tokens} tokens, the plain loop is fastest {ways[0]}, then {ways[1]}")
    steps(work)
    plain, served = [], []
    for _ in range(bench.size.runs):
        plain.append(min(mean(timed(partial(bench.plain.step, merged, way), times)) for way in ways[:2]))
        served.append(mean(timed(partial(steps, work), times)))
    return compared(name, [tokens / s for s in served], "tok/s", [tokens / s for s in plain])


def small(bench: Bench, name: str) -> Figure:
    """One short sequence a run and a step each, at once; `baseline` is the service too, one run after another."""
    length, rounds = min(SHORT, bench.size.longest), bench.size.steps
    work = _work(bench, [batch_of([length], seed=seed) for seed in range(len(RANKS))])
    tokens = length * len(work)

    def one_by_one() -> None:
        for run, data in work:
            step(run, data)

    alone, together = bench.both(one_by_one, partial(steps, work), times=rounds)
    return compared(name, [tokens / s for s in together], "tok/s", [tokens / s for s in alone])


def _work(bench: Bench, batches: Sequence[list]) -> Steps:
    client = bench.running.client
    runs = [client.create_lora_training_client(bench.name, rank=rank).result() for rank in RANKS]
    return [(run, datums(batch)) for run, batch in zip(runs, batches, strict=True)]
