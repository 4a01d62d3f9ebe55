"""Two schedulers at once do what one would, whatever one does between any two calls of the other to the store."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.resources import Process
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks import keys
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import CreateModel, OptimStep
from openrl.tasks.operations import Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from tests.scheduler.test_process import TINY, ask_for_training, until

NAME, TENANT = "trainer-org-tiny", "local"
SETTINGS = SchedulerSettings(idle_timeout_s=60)


class Watched:
    """A client of the store that tells of each call before it is made, those of pipelines and scripts included."""

    def __init__(self, client: Any, before: Callable[[], None]) -> None:
        self._client, self._before = client, before

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if name == "pipeline":
            return lambda **options: Watched(found(**options), self._before)
        if name == "register_script":
            return lambda text: self._told(found(text))
        return self._told(found) if callable(found) else found

    def __enter__(self) -> Watched:
        self._client.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._client.__exit__(*raised)

    def _told(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any, **options: Any) -> Any:
            self._before()
            return call(*args, **options)

        return told


def interleaved(store: Store, prepare: Callable[[], float], act: Callable[[Reconciler], None]) -> Iterator[int]:
    """Let one scheduler act, and another in the midst of it: before its first call to the store, its second, and so on.

    `prepare` fills the empty store and returns the time at which both look. Yields when both are done, each time anew.
    """
    moment, made = 0, 1
    while moment < made:
        store.redis.flushall()
        Registry(store).add_model(TINY)
        now = prepare()
        other, made = Reconciler(store, SETTINGS, clock=lambda now=now: now), 0

        def before(moment: int = moment, other: Reconciler = other) -> None:
            nonlocal made
            made += 1
            if made == moment + 1:
                act(other)

        act(Reconciler(Store(Watched(store.redis, before), store.settings), SETTINGS, clock=lambda now=now: now))
        yield moment
        moment += 1
    assert moment > 3, "each call was a moment of its own"


def test_a_worker_that_is_wanted_is_wanted_once(store):
    def prepare() -> float:
        ask_for_training(store, 1)
        return store.now()

    for _ in interleaved(store, prepare, Reconciler.reconcile):
        [wanted] = LocalCluster(store).workloads()
        assert (wanted.name, wanted.generation) == (NAME, 0)


def test_a_worker_that_is_idle_is_let_go_and_one_that_gets_work_meanwhile_is_not(store):
    def prepare() -> float:
        ask_for_training(store, 1)
        now = store.now()
        Reconciler(store, SETTINGS, clock=lambda: now).reconcile()
        ask_for_training(store, 0)
        return now + 61

    def reconcile_twice(reconciler: Reconciler) -> None:
        reconciler.reconcile()
        reconciler.reconcile()

    for _ in interleaved(store, prepare, Reconciler.reconcile):
        assert LocalCluster(store).workloads() == ()

    def work_comes(reconciler: Reconciler) -> None:
        ask_for_training(store, 1)
        reconcile_twice(reconciler)

    for _ in interleaved(store, prepare, work_comes):
        assert [wanted.name for wanted in LocalCluster(store).workloads()] == [NAME]


def test_a_gap_is_closed_once_and_storage_is_counted_once(store):
    runs: list[str] = []

    def prepare() -> float:
        journal, session = Journal(store), Registry(store).create_session(TENANT).session_id
        message = CreateModel(base_model=TINY.name, rank=4, seed=1)
        runs[:] = [journal.create(TENANT, session, 0, message, slug=TINY.slug).run_id]
        with Lease(store, NAME, "trainer", TINY.slug) as lease:
            [piece] = journal.take(TINY.slug, lease)
            journal.commit(lease, piece.operations[0], Outcome(run_fields={"state": "ready"}), token=piece.token)
        for seq in (3, 6):
            journal.submit(TENANT, runs[0], seq, OptimStep())
        long_ago = store.now() - 10 * store.settings.gap_timeout_s
        store.redis.zadd(keys.GAPS, {f"{TENANT} {runs[0]}": long_ago})
        return store.now()

    def all_tasks(reconciler: Reconciler) -> None:
        sweeps = ("sweep_results", "sweep_checkpoints", "sweep_orphans", "sweep_turns")
        for task in ("close_gaps", "meter_storage", *sweeps):
            getattr(reconciler, task)()

    for _ in interleaved(store, prepare, all_tasks):
        futures = Futures(store)
        states = [futures.get(TENANT, f"{runs[0]}:{seq}").state for seq in (1, 2, 3)]
        assert states == ["failed", "failed", "pending"]
        header = store.redis.hget(keys.journal(TENANT, runs[0]), "4")
        assert header is None, "the next gap stands for a while of its own"
        assert Journal(store).depth(TINY.slug)["train"] == {TENANT: 4}


def test_two_processes_with_a_beat_each_want_one_worker_and_end_cleanly(store, tmp_path):
    Registry(store).add_model(TINY)
    environ = {
        **os.environ,
        "OPENRL_REDIS_URL": store.settings.redis_url,
        "OPENRL_DATA_DIR": str(store.settings.data_dir),
    }
    logs = [tmp_path / f"{number}.log" for number in range(2)]
    started = []
    try:
        for path in logs:
            with path.open("wb") as log:
                command = [sys.executable, "-m", "openrl.scheduler"]
                started.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
        until(lambda: all("ready." in path.read_text() for path in logs))
        ask_for_training(store, 1)
        until(LocalCluster(store).workloads)
        [wanted] = LocalCluster(store).workloads()
        assert (wanted.name, wanted.generation) == (NAME, 0)
        LocalCluster(store).report({NAME: Process(pid=os.getpid(), generation=0)})
        for process in started:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=15) for process in started] == [0, 0]
        said = "".join(path.read_text() for path in logs)
        assert said.count(f"start {NAME}") == 1 and "Traceback" not in said
    finally:
        for process in started:
            process.kill()
            process.wait()
