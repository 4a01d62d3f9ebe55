"""Workloads as processes of this machine: the scheduler writes what is wanted, the supervisor makes it so.

What is wanted is one Redis hash. The two sides share nothing else: the scheduler starts no process, and
the supervisor decides nothing.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from openrl.scheduler.resources import Action, Workload
from openrl.tasks.store import Store, translated

WORKLOADS = "openrl:local:workloads"
"""hash: workload name -> its canonical JSON"""

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

        A start does nothing where the workload is wanted already, a stop nothing where it is not the one seen.
        """
        if not actions:
            return set()
        args = [text for act in actions for text in (act.verb, act.workload.name, act.workload.to_json())]
        with translated():
            return {name.decode() for name in self._apply(WORKLOADS, *args)}

    def clear(self) -> None:
        """Want nothing: no worker starts because a service did."""
        with translated():
            self._store.redis.delete(WORKLOADS)


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
