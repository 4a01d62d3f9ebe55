"""What Prometheus may ask the scheduler: what each pool has before it, and which workers are there.

Read from the store when it is asked, so that any scheduler gives the same answer. Tenants aren't named: whoever may
read this may not read their books. Decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from openrl.scheduler import demand
from openrl.tasks.errors import StoreFault, StoreUnavailable
from openrl.tasks.journal import Journal
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store


class Pools(Collector):
    """The pools and workers of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._journal = Journal(store)
        self._registry = Registry(store)

    def collect(self) -> Iterable[Metric]:
        """Return the figures of this moment; while the store is away, that alone."""
        up = GaugeMetricFamily("openrl_store_up", "1 while the store answers, else 0")
        try:
            found = [*self._pools(), self._workers()]
        except (StoreUnavailable, StoreFault):
            up.add_metric([], 0)
            return [up]
        up.add_metric([], 1)
        return [up, *found]

    def _pools(self) -> Iterable[Metric]:
        labels = ["kind", "pool"]
        unfinished = GaugeMetricFamily(
            "openrl_unfinished", "operations or samples accepted and not finished", labels=labels
        )
        oldest = GaugeMetricFamily("openrl_oldest_seconds", "age of the oldest that could be executed", labels=labels)
        for pool, asked in sorted(demand.demand(self._journal, self._registry.models()).items()):
            unfinished.add_metric([pool.kind, pool.slug], asked.depth)
            oldest.add_metric([pool.kind, pool.slug], asked.oldest_s)
        return [unfinished, oldest]

    def _workers(self) -> Metric:
        family = GaugeMetricFamily(
            "openrl_workers", "workers whose leases stand, by what they do", labels=["kind", "pool", "state"]
        )
        counted = Counter((worker.kind, worker.slug, worker.state) for worker in demand.workers(self._store))
        for labels, number in sorted(counted.items()):
            family.add_metric(list(labels), number)
        return family


def registry(store: Store) -> CollectorRegistry:
    """Return what is exported of a store."""
    found = CollectorRegistry(auto_describe=False)
    found.register(Pools(store))
    return found


def serve(store: Store, port: int) -> None:
    """Answer on all addresses of this machine, in a thread. Raises OSError where the port is taken."""
    start_http_server(port, registry=registry(store))
