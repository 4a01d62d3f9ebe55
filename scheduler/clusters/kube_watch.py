"""Watches the cluster, only to say that something has changed: what is so now is listed anew, not taken from events.

One thread a kind lists once for a version and follows the changes from there, resumes where a watch ended, and lists
again where the server has forgotten so much (410). While any of them is broken nothing counts as unchanged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from openrl.scheduler.clusters.kube_api import (
    CLAIMS,
    LEDGERS,
    NODES,
    PODS,
    SLICES,
    WORKLOADS,
    ApiError,
    Expired,
    Kind,
    KubeApi,
)

log = logging.getLogger(__name__)

KINDS = (WORKLOADS, LEDGERS, CLAIMS, PODS, NODES, SLICES)
RETRY_S = 2.0
"""Before a broken watch is begun anew."""


class Watcher:
    """The watches of one scheduler. `on_change` is called from their threads, and must return at once."""

    def __init__(
        self,
        api: KubeApi,
        on_change: Callable[[], None],
        *,
        kinds: Sequence[Kind] = KINDS,
        timeout_s: int = 300,
        retry_s: float = RETRY_S,
    ) -> None:
        self._api = api
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._changed = threading.Event()
        self._changed.set()
        self._stopped = threading.Event()
        self._following = dict.fromkeys(kinds, False)
        self._threads = [
            threading.Thread(target=self._watch, args=(kind,), name=f"watch-{kind.plural}", daemon=True)
            for kind in kinds
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop watching; threads that wait for a change end with it or with the server's patience."""
        self._stopped.set()

    def take_changed(self) -> bool:
        """Tell whether something may have changed since this was asked last."""
        changed = self._changed.is_set() or not all(self._following.values())
        self._changed.clear()
        return changed

    def _watch(self, kind: Kind) -> None:
        version = ""
        while not self._stopped.is_set():
            try:
                if not version:
                    version = self._api.list(kind)[1]
                    self._note()
                self._following[kind] = True
                for event, obj in self._api.watch(kind, version, timeout_s=self._timeout_s):
                    version = obj["metadata"]["resourceVersion"]
                    if event != "BOOKMARK":
                        self._note()
                    if self._stopped.is_set():
                        return
            except Expired:
                version = ""
            except ApiError as broken:
                self._following[kind] = False
                log.info("watching %s again in %g s: %s", kind.plural, self._retry_s, broken)
                self._stopped.wait(self._retry_s)

    def _note(self) -> None:
        self._changed.set()
        self._on_change()
