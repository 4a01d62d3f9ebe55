"""Workloads as processes of this machine: the scheduler writes what is wanted, the supervisor makes it so.

What is wanted is one Redis hash, what runs another. The two sides share nothing else: the scheduler starts no
process, and the supervisor decides nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from openrl.scheduler.resources import Action, Process, Workload
from openrl.tasks import keys
from openrl.tasks.schema import PROCESS
from openrl.tasks.store import Store, translated

WORKLOADS = "openrl:local:workloads"
"""hash: workload name -> its canonical JSON"""
WATCHED = "openrl:local:watched"
"""string: set once a scheduler has looked at the service that started last"""
PROCESSES = "openrl:local:processes"
"""hash: workload name -> JSON of the process that runs for it"""

DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


class LocalCluster:
    """The wanted processes of one machine."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._apply = store.script("workloads")

    def workloads(self) -> tuple[Workload, ...]:
        """Return every workload that is wanted now, by name."""
        with translated():
            rows = self._store.redis.hgetall(WORKLOADS)
        return tuple(Workload.from_json(rows[name]) for name in sorted(rows))

    def apply(self, actions: Sequence[Action]) -> set[str]:
        """Carry out the actions; return the names of the workloads that they changed.

        A start does nothing where the workload is wanted already, the others nothing where it is not the one seen.
        """
        if not actions:
            return set()
        args = [text for action in actions for text in (action.workload.name, *_change(action))]
        with translated():
            return {name.decode() for name in self._apply(WORKLOADS, *args)}

    def clear(self) -> None:
        """Want nothing: no worker starts because a service did. No scheduler has looked at it yet."""
        with translated():
            self._store.redis.delete(WORKLOADS, WATCHED, PROCESSES, keys.SIGNS)

    def processes(self) -> dict[str, Process]:
        """Return what the supervisor runs for the workloads, by name."""
        with translated():
            rows = self._store.redis.hgetall(PROCESSES)
        return {name.decode(): Process(**PROCESS.current(json.loads(row))) for name, row in rows.items()}

    def report(self, processes: Mapping[str, Process]) -> None:
        """Write down what runs, where that is news."""
        if processes == self.processes():
            return
        with translated(), self._store.redis.pipeline() as pipe:
            pipe.delete(PROCESSES)
            for name, process in processes.items():
                pipe.hset(PROCESSES, name, json.dumps(PROCESS.numbered(asdict(process))))
            pipe.execute()

    def set_watched(self) -> None:
        """Note that a scheduler works."""
        with translated():
            self._store.redis.set(WATCHED, 1)

    def is_watched(self) -> bool:
        """Tell whether a scheduler has worked since `clear`."""
        with translated():
            return bool(self._store.redis.exists(WATCHED))


def _change(action: Action) -> tuple[str, str]:
    """Return the workload's text before and after the action; "" means none."""
    text = action.workload.to_json()
    if action.verb == "replace":
        return text, replace(action.workload, generation=action.workload.generation + 1).to_json()
    return ("", text) if action.verb == "start" else (text, "")


def devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them. Loads no CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(index) for index in range(_count()))


def _count() -> int:
    if program := shutil.which("nvidia-smi"):
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0
