"""Workloads as processes of this machine: the scheduler writes what is wanted, the supervisor makes it so.

What is wanted is one Redis hash, what runs another. The two sides share nothing else: the scheduler starts no
process, and the supervisor decides nothing. The machine is the one node, each of its accelerators a claim that is
always allocated, and a claim's seats are the workloads that name it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import psutil

from openrl.scheduler.resources import Action, Claim, Node, Process, Seat, Seen, Workload
from openrl.tasks import keys
from openrl.tasks.schema import PROCESS
from openrl.tasks.store import Store, translated

WORKLOADS = "openrl:local:workloads"
"""hash: workload name -> its canonical JSON"""
SEATS = "openrl:local:seats"
"""hash: claim -> how often its seats have changed"""
WATCHED = "openrl:local:watched"
"""string: set once a scheduler has looked at the service that started last: its accelerators, and the bytes of each"""
PROCESSES = "openrl:local:processes"
"""hash: workload name -> JSON of the process that runs for it"""

NODE = "local"
DRIVER_GPUS = Path("/proc/driver/nvidia/gpus")


class LocalCluster:
    """The wanted processes of one machine.

    `accelerators`: how many it has. `device_bytes`: the memory of each, 0 or missing where that isn't known.
    """

    def __init__(self, store: Store, *, accelerators: int = 0, device_bytes: Sequence[int] = ()) -> None:
        self._store = store
        self._accelerators = accelerators
        self._device_bytes = [*device_bytes, *[0] * accelerators][:accelerators]
        self._apply = store.script("workloads")

    @classmethod
    def as_watched(cls, store: Store) -> Self:
        """Return the machine as its scheduler takes it to be."""
        with translated():
            said = store.redis.get(WATCHED) or b"0"
        accelerators, *device_bytes = (int(number) for number in said.split())
        return cls(store, accelerators=accelerators, device_bytes=device_bytes)

    def observe(self) -> Seen:
        """Return this machine, what is wanted on it, and what the supervisor said that runs."""
        # Counts before seats: a seat that is taken in between is one that the count doesn't know.
        counts = self._counts()
        workloads = self.workloads()
        return Seen(
            nodes=(Node(name=NODE, host_bytes=psutil.virtual_memory().total),),
            claims=self._claims(workloads, counts),
            workloads=workloads,
            processes=self.processes(),
            has_claims=bool(self._accelerators),
        )

    def workloads(self) -> tuple[Workload, ...]:
        """Return every workload that there is now, by name; also those that wait for a place."""
        with translated():
            rows = self._store.redis.hgetall(WORKLOADS)
        return tuple(Workload.from_json(rows[name]) for name in sorted(rows))

    def wanted(self) -> tuple[Workload, ...]:
        """Return the workloads whose processes are to run, by name."""
        return tuple(workload for workload in self.workloads() if workload.is_to_run)

    def apply(self, actions: Sequence[Action]) -> set[str]:
        """Carry out the actions; return the names of the workloads that they changed.

        A start does nothing where the workload is there already, the others nothing where it is not the one seen, and
        none takes a seat at an accelerator whose seats have changed.
        """
        args = [text for action in actions if action.workload for text in _change(action)]
        if not args:
            return set()
        with translated():
            return {name.decode() for name in self._apply(WORKLOADS, SEATS, *args)}

    def _counts(self) -> dict[str, str]:
        with translated():
            rows = self._store.redis.hgetall(SEATS)
        return {name.decode(): count.decode() for name, count in rows.items()}

    def _claims(self, workloads: Sequence[Workload], counts: Mapping[str, str]) -> tuple[Claim, ...]:
        seats: dict[str, list[Seat]] = defaultdict(list)
        for workload in workloads:
            if workload.claim is not None:
                seats[workload.claim].append(workload.seat)
        return tuple(
            Claim(
                name=name,
                node=NODE,
                device_bytes=size,
                seats=tuple(seats[name]),
                fixed=True,
                revision=counts.get(name, "0"),
            )
            for name, size in zip(map(claim_name, range(self._accelerators)), self._device_bytes, strict=True)
        )

    def clear(self) -> None:
        """Want nothing: no worker starts because a service did. No scheduler has looked at it yet."""
        with translated():
            self._store.redis.delete(WORKLOADS, SEATS, WATCHED, PROCESSES, keys.SIGNS)

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
            self._store.redis.set(WATCHED, " ".join(map(str, (self._accelerators, *self._device_bytes))))

    def is_watched(self) -> bool:
        """Tell whether a scheduler has worked since `clear`."""
        with translated():
            return bool(self._store.redis.exists(WATCHED))


def claim_name(index: int) -> str:
    """Return the name of the claim that this machine's accelerator of an index is."""
    return f"gpu-{index}"


def _change(action: Action) -> tuple[str, ...]:
    """Return what the script takes for one action: "" means none."""
    before, after = None if action.verb == "start" else action.workload, action.after
    left = (before.claim if before else None) or ""
    taken = (after.claim if after else None) or ""
    stays = left == taken
    return (
        action.name,
        before.to_json() if before else "",
        after.to_json() if after else "",
        "" if stays else left,
        "" if stays else taken,
        action.claim.revision if action.claim and not stays else "",
    )


def devices() -> tuple[str, ...]:
    """Return the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES names them. Loads no CUDA."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    return tuple(str(index) for index in range(_count()))


def device_bytes(names: Sequence[str]) -> tuple[int, ...]:
    """Return the memory of CUDA devices that are named as in CUDA_VISIBLE_DEVICES: by index or uuid, or its beginning.

    0 for each of which the driver's tool doesn't say it, as for a part of a device (MIG).
    """
    known: dict[str, int] = {}
    if names and (program := shutil.which("nvidia-smi")):
        command = [program, "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
        listing = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        for line in listing.stdout.splitlines() if listing.returncode == 0 else ():
            index, uuid, size = (*(field.strip() for field in line.split(",")), "", "")[:3]
            if size.isdecimal():
                known[index] = known[uuid] = int(size) << 20
    return tuple(_size_of(name, known) for name in names)


def _size_of(name: str, known: Mapping[str, int]) -> int:
    """Return the size of a device, where exactly one is meant."""
    if name.isdecimal():
        return known.get(name, 0)
    found = [size for uuid, size in known.items() if name and uuid.startswith(name)]
    return found[0] if len(found) == 1 else 0


def _count() -> int:
    if program := shutil.which("nvidia-smi"):
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
        if listing.returncode == 0:
            return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return len(list(DRIVER_GPUS.iterdir())) if DRIVER_GPUS.is_dir() else 0
