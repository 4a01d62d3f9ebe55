"""How long a decision takes on a cluster of a given size: figures of `make simulate`.

A steady cluster: most workers run, some are idle, some wait for a place, a few are full runs with their samplers; each
pass also has to place what just came.
"""

from __future__ import annotations

import random
import time
from statistics import median

from openrl.scheduler.decide import decide
from openrl.scheduler.resources import (
    Claim,
    Demand,
    Device,
    Need,
    Node,
    Policy,
    Pool,
    Process,
    Seen,
    Snapshot,
    Worker,
    Workload,
)
from openrl.scheduler.trace import GIB
from openrl.tasks import keys

NOW = 1_000_000.0
WAITING = 0.05
"""The share of the workloads that have no place yet."""
NEEDS = ((9, 14), (14, 22), (30, 40), (60, 84))
"""GiB of device and of host memory."""
DEVICES = 8


def steady(workloads: int, nodes: int, *, seed: int = 0, strategy: str = "binpack") -> Snapshot:
    """Return a snapshot with so many workloads and nodes of eight devices, half of them with 24 GiB, half with 80."""
    draw = random.Random(seed)
    machines = [Node(name=f"node-{index}", host_bytes=1024 * GIB) for index in range(nodes)]
    spots = [(node, index, (24 if number % 2 else 80) * GIB)
             for number, node in enumerate(machines) for index in range(DEVICES)]  # fmt: skip
    draw.shuffle(spots)
    needs: dict[Pool, Need] = {}
    demand: dict[Pool, Demand] = {}
    seated: dict[int, list[Workload]] = {}
    waiting: list[Pool] = []
    for number in range(workloads):
        pool, need = _pool(number, draw)
        needs[pool] = need
        demand[pool] = Demand(depth=draw.choice((0, 1, 5)), oldest_s=draw.random() * 60)
        if draw.random() < WAITING:
            demand[pool] = Demand(depth=2, oldest_s=draw.random() * 600)
            waiting.append(pool)
            continue
        where = draw.randrange(len(spots) * 9 // 10)
        if len(seated.get(where, ())) >= 3 or spots[where][2] < need.device_bytes:
            where = next(index for index in range(len(spots)) if len(seated.get(index, ())) < 3
                         and spots[index][2] >= need.device_bytes)  # fmt: skip
        claim = f"claim-{where}"
        seated.setdefault(where, []).append(
            Workload(name=pool.workload_name, kind=pool.kind, base=pool.base, slug=pool.slug, since=NOW - 9000,
                     claim=claim, placed=1, need=need)
        )  # fmt: skip
    held = {where: f"claim-{where}" for where in seated}
    claims = tuple(
        Claim(name=held[where], node=spots[where][0].name, device_bytes=spots[where][2], tiers=(24 * GIB, 80 * GIB),
              seats=tuple(each.seat for each in members), since=NOW - 9000)
        for where, members in seated.items()
    )  # fmt: skip
    devices = tuple(
        Device(name=f"{node.name}.{index}", node=node.name, device_bytes=size, claim=held.get(where, ""))
        for where, (node, index, size) in enumerate(spots)
    )
    there = tuple(each for members in seated.values() for each in members)
    workers = tuple(
        Worker(worker_id=each.name, kind=each.kind, slug=each.slug, state="ready", started=NOW - 9000,
               last_busy=NOW - draw.random() * 600)
        for each in there
    )  # fmt: skip
    seen = Seen(
        nodes=tuple(machines), devices=devices, claims=claims, workloads=there, has_claims=True, can_claim=True,
        processes={each.name: Process(generation=0) for each in there},
    )  # fmt: skip
    policy = Policy(strategy="spread" if strategy == "spread" else "binpack", tiers=(24 * GIB, 80 * GIB),
                    residue_bytes=GIB // 2, most_seats=4, tier_host_bytes=128 * GIB)  # fmt: skip
    return Snapshot(now=NOW, demand=demand, seen=seen, needs=needs, workers=workers, policy=policy)


def decide_s(workloads: int, nodes: int, *, runs: int = 5) -> list[float]:
    """Return the seconds that one decision takes, once for each run, on another snapshot each time."""
    took = []
    for seed in range(runs):
        snapshot = steady(workloads, nodes, seed=seed)
        begun = time.perf_counter()
        decide(snapshot)
        took.append(time.perf_counter() - begun)
    return took


def growth(sizes: dict[int, float]) -> float:
    """Return the power of the number of workloads that the time grows with, between the smallest and the largest."""
    from math import log

    small, large = min(sizes), max(sizes)
    return log(sizes[large] / sizes[small]) / log(large / small)


def medians(sizes: tuple[int, ...] = (1_250, 2_500, 5_000, 10_000), *, runs: int = 5) -> dict[int, list[float]]:
    """Return by number of workloads what decisions took, with a node for each ten workloads."""
    return {size: sorted(decide_s(size, size // 10, runs=runs)) for size in sizes}


def typical(found: dict[int, list[float]]) -> dict[int, float]:
    """Return the median of each."""
    return {size: median(took) for size, took in found.items()}


def _pool(number: int, draw: random.Random) -> tuple[Pool, Need]:
    device, host = draw.choice(NEEDS)
    owner = f"tenant-{draw.randrange(50)}" if number % 4 == 0 else ""
    need = Need(device_bytes=device * GIB, host_bytes=host * GIB, owner=owner)
    if owner:
        slug = keys.pool_slug(f"base-{number % 20}", owner, f"run-{number}")
        return Pool(slug=slug, kind="trainer", base=f"Base-{number % 20}"), need
    return Pool(slug=f"base-{number}", kind="trainer" if number % 2 else "sampler", base=f"Base-{number}"), need
