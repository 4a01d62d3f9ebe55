"""What the store says is wanted on this machine, and what it is told runs here, in a thread beside the supervisor.

Knows the store's side alone; `crew` has the processes.
"""

from __future__ import annotations

import threading

from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.resources import Process, Workload
from openrl.tasks.errors import StoreFault, StoreUnavailable

WANTED_S = 0.5


class Wanted(threading.Thread):
    """Reads what is wanted and writes what runs, so that a store that doesn't answer never holds up the supervisor."""

    def __init__(self, cluster: LocalCluster) -> None:
        super().__init__(name="wanted", daemon=True)
        self._cluster = cluster
        self._stopping = threading.Event()
        self.latest: tuple[Workload, ...] | None = None
        self.running: dict[str, Process] = {}

    def run(self) -> None:
        """Look twice a second; while the store is away, what was wanted last is still wanted."""
        while not self._stopping.wait(WANTED_S):
            try:
                self._cluster.report(self.running)
                self.latest = self._cluster.wanted()
            except (StoreUnavailable, StoreFault):
                continue

    def stop(self) -> None:
        """Stop reading; a read under way may still end."""
        self._stopping.set()
