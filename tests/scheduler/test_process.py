"""The scheduler's process: beat and worker together, on a real store."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from openrl.scheduler import demand
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.resources import Demand, Pool, Process
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks import keys
from openrl.tasks.journal import Journal
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import BaseModel, Registry

TINY = BaseModel(
    name="Org/Tiny",
    slug="org-tiny",
    path="/nowhere",
    vocab_size=260,
    max_context=512,
    arch="llama",
    tokenizer_id="Org/Tiny",
    hidden_size=64,
    num_layers=2,
    tied_embeddings=True,
)


@pytest.fixture
def served(store):
    Registry(store).add_model(TINY)
    return store


def ask_for_training(store, depth: int) -> None:
    """Put the journal's own count of unfinished training operations at `depth`."""
    store.redis.hset(keys.depth("train", TINY.slug), "local", depth)


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def test_demand_is_what_the_journal_counts_over_all_tenants(served):
    served.redis.hset(keys.depth("sample", TINY.slug), mapping={"a": 2, "b": 3})
    pools = demand.demand(Journal(served), Registry(served).models())
    assert pools == {
        Pool(slug="org-tiny", kind="trainer", base="Org/Tiny"): Demand(),
        Pool(slug="org-tiny", kind="sampler", base="Org/Tiny"): Demand(depth=5),
    }


def test_a_worker_is_seen_while_its_lease_stands(served):
    with Lease(served, "trainer-org-tiny", "trainer", TINY.slug) as lease:
        lease.touch_busy()
        lease.set_state("busy")
        [worker] = demand.workers(served)
        assert (worker.worker_id, worker.kind, worker.state) == ("trainer-org-tiny", "trainer", "busy")
        assert abs(worker.last_busy - time.time()) < 60 and abs(worker.started - time.time()) < 60
    assert demand.workers(served) == ()


def test_reconciling_starts_keeps_and_lets_go(served):
    now = [time.time()]
    reconciler = Reconciler(served, SchedulerSettings(idle_timeout_s=60), clock=lambda: now[0])
    cluster = LocalCluster(served)
    reconciler.reconcile()
    assert cluster.workloads() == ()
    ask_for_training(served, 1)
    reconciler.reconcile()
    reconciler.reconcile()
    assert [workload.name for workload in cluster.workloads()] == ["trainer-org-tiny"]
    ask_for_training(served, 0)
    reconciler.reconcile()
    assert len(cluster.workloads()) == 1
    now[0] += 61
    reconciler.reconcile()
    assert cluster.workloads() == ()


def test_a_worker_that_has_fallen_silent_is_replaced_and_one_that_left_or_came_back_is_not(served):
    now = [time.time()]
    reconciler = Reconciler(served, SchedulerSettings(), clock=lambda: now[0])
    cluster = LocalCluster(served)
    name = "trainer-org-tiny"

    def generation_after(seconds: float) -> int:
        for _ in range(int(seconds / 10)):
            now[0] += 10
            reconciler.reconcile()
        return cluster.workloads()[0].generation

    ask_for_training(served, 1)
    reconciler.reconcile()
    cluster.report({name: Process(pid=os.getpid(), generation=0)})
    with Lease(served, name, "trainer", TINY.slug):
        assert generation_after(100) == 0
    assert demand.signs(served) == {}
    assert generation_after(1000) == 0  # it left by itself: its end is the supervisor's matter
    killed = Lease(served, name, "trainer", TINY.slug)
    assert demand.signs(served)[name].pid == os.getpid()
    now[0] = demand.signs(served)[name].at
    assert generation_after(110) == 0
    now[0] += 600
    assert generation_after(110) == 0  # the scheduler itself saw nothing for ten minutes
    assert generation_after(30) == 1
    assert generation_after(300) == 1
    killed.close()


def test_the_process_turns_demand_into_a_wanted_worker_and_leaves_when_asked(served, tmp_path):
    environ = {
        **os.environ,
        "OPENRL_REDIS_URL": served.settings.redis_url,
        "OPENRL_DATA_DIR": str(served.settings.data_dir),
    }
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "openrl.scheduler"], env=environ, stdout=log, stderr=log)
    try:
        ask_for_training(served, 1)
        until(LocalCluster(served).workloads)
        [workload] = LocalCluster(served).workloads()
        assert json.loads(workload.to_json())["name"] == "trainer-org-tiny"
        until(lambda: "start trainer-org-tiny: 1 operation waits" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == 0
        assert "Sending due task" not in (tmp_path / "log").read_text()
    finally:
        process.kill()
        process.wait()
