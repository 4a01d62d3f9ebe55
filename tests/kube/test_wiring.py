"""The scheduler's own parts on the emulated cluster: its task, watches, process, and word to workers and turns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import yaml

from openrl.scheduler.clusters.errors import ClusterUnavailable
from openrl.scheduler.clusters.kube_api import LEDGERS, PODS
from openrl.scheduler.clusters.kube_watch import Watcher
from openrl.scheduler.clusters.kubernetes import KubernetesCluster
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks.assignment import Assignment, Assignments, keep
from openrl.timeslice.holder import Holder, Place
from openrl.timeslice.standing import standing
from openrl.timeslice.turn import Turns
from tests.kube.machines import NAMESPACE
from tests.kube.server import Fault
from tests.kube.test_emulator import ledger
from tests.kube.world import SETTINGS
from tests.scheduler.test_process import ask_for_training, served, until

__all__ = ["served"]


def test_the_journals_demand_brings_a_pod(served, machines, api):
    machines.add_node("n1")
    cluster = KubernetesCluster(api, SETTINGS, Assignments(served), clock=lambda: machines.clock_s)
    reconciler = Reconciler(served, SchedulerSettings(), cluster=cluster, version=SETTINGS.version)
    ask_for_training(served, 1)
    for _ in range(5):
        reconciler.reconcile()
        machines.step(2)
    [made] = api.list(PODS)[0]
    assert made["status"]["phase"] == "Running"
    assert made["metadata"]["annotations"]["openrl.io/name"] == "trainer-org-tiny"


def test_a_cluster_that_does_not_answer_leaves_the_task_to_the_next_tick(served, machines, api):
    reconciler = Reconciler(served, SchedulerSettings(), cluster=KubernetesCluster(api, SETTINGS, Assignments(served)))
    with machines.server.failing(lambda _: Fault("error", 503)), pytest.raises(ClusterUnavailable, match="503"):
        reconciler.reconcile()
    reconciler.reconcile()


def test_a_turn_ends_once_the_api_server_has_proved_its_holders_pod_gone(store):
    turns, reconciler = Turns(store.redis), Reconciler(store, SchedulerSettings())
    away = Place(machine="", boot="other", pid_namespace="pid:[1]")
    holder = replace(_holder(), place=away, pod="uid-1")
    assert turns.ask("c1", "a", "seat", holder) is not None
    reconciler.sweep_turns()
    assert standing(turns, "c1").present is not None
    Assignments(store).note_pod_ended("uid-1")
    reconciler.sweep_turns()
    assert standing(turns, "c1").present is None


def _holder() -> Holder:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        return Holder.of(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_holder_tells_its_pod_and_one_written_before_had_none(monkeypatch):
    monkeypatch.setenv("OPENRL_POD_UID", "uid-1")
    holder = _holder()
    assert Holder.from_json(holder.to_json()) == holder
    assert holder.pod == "uid-1"
    old = {name: value for name, value in json.loads(holder.to_json()).items() if name != "pod"}
    assert Holder.from_json(json.dumps(old)).pod == ""


def test_a_place_that_has_ended_never_becomes_current_again(store):
    places = Assignments(store)
    mine = Assignment(store, "a")
    assert mine.state() == ""
    places.begin(["a", "b"])
    assert mine.state() == "current"
    places.end("a")
    places.begin(["a"])
    assert (mine.state(), Assignment(store, "b").state()) == ("ended", "current")


def test_a_worker_waits_for_its_place_and_leaves_when_it_is_anothers(store):
    assert keep(store, {})
    mine, slept = Assignment(store, "a"), []
    assert not mine.wait(patience_s=4, sleep=slept.append)
    assert slept == [2.0, 2.0]

    def told(_: float) -> None:
        Assignments(store).begin(["a"])

    assert mine.wait(sleep=told)
    Assignments(store).end("a")
    assert not mine.wait(sleep=slept.append)
    assert not keep(store, {"OPENRL_ASSIGNMENT_ID": "a"})


def test_a_running_worker_is_told_that_its_place_has_ended(store, monkeypatch):
    monkeypatch.setattr("openrl.tasks.assignment.ASK_S", 0.01)
    left = threading.Event()
    Assignments(store).begin(["a"])
    stop = Assignment(store, "a").watch(left.set)
    Assignments(store).end("a")
    assert left.wait(10)
    stop.set()


def test_a_worker_with_a_place_touches_the_file_that_a_probe_looks_at_whatever_the_store_says(
    store, tmp_path, monkeypatch
):
    monkeypatch.setattr("openrl.tasks.assignment.ASK_S", 0.01)
    alive = tmp_path / "alive"
    mine = Assignment.of(store, {"OPENRL_ASSIGNMENT_ID": "a", "OPENRL_ALIVE_FILE": str(alive)})
    assert not mine.wait(patience_s=0) and alive.exists(), "while it waits, too"
    os.utime(alive, (0, 0))
    stop = mine.watch(lambda: None)
    until(lambda: alive.stat().st_mtime > 0)
    stop.set()
    nowhere = {"OPENRL_ASSIGNMENT_ID": "a", "OPENRL_ALIVE_FILE": str(tmp_path / "none" / "alive")}
    Assignments(store).begin(["a"])
    assert Assignment.of(store, nowhere).wait(patience_s=0), "a file that can't be touched ends nobody"


def test_a_watch_pokes_resumes_and_survives_a_broken_server_and_a_forgotten_log(machines, api):
    pokes = threading.Semaphore(0)
    watcher = Watcher(api, pokes.release, kinds=(LEDGERS,), timeout_s=1, retry_s=0.01)
    watcher.start()
    assert pokes.acquire(timeout=60)  # the first list
    until(lambda: not watcher.take_changed())
    kind = machines.objects.kinds["openrl.io", "claimledgers"]
    for name, trouble in (("c1", None), ("c2", machines.objects.compact), ("c3", None)):
        machines.objects.create(kind, NAMESPACE, ledger(name), manager="x")
        if trouble:
            trouble()
        assert pokes.acquire(timeout=60)
        assert watcher.take_changed()
    with machines.server.failing(lambda _: Fault("error", 500)):
        until(lambda: any(call.query.get("watch") for call in machines.server.calls[-3:]) and watcher.take_changed())
    until(lambda: not watcher.take_changed())
    machines.objects.create(kind, NAMESPACE, ledger("c4"), manager="x")
    until(watcher.take_changed)
    watcher.stop()


def test_a_look_is_kept_while_no_watch_hears_of_a_change(machines, api, store):
    class Heard:
        changed = True

        def take_changed(self) -> bool:
            changed, self.changed = self.changed, False
            return changed

    heard = Heard()
    cluster = KubernetesCluster(api, SETTINGS, Assignments(store), watcher=heard, clock=lambda: machines.clock_s)
    for _ in range(2):
        cluster.observe()
        cluster.apply([])
    looks = len(machines.server.calls)
    cluster.observe()
    assert len(machines.server.calls) == looks
    heard.changed = True
    cluster.observe()
    assert len(machines.server.calls) > looks
    cluster.apply([])
    looks = len(machines.server.calls)
    machines.clock_s += 11
    cluster.observe()
    assert len(machines.server.calls) > looks


@pytest.mark.full
def test_the_schedulers_process_serves_a_cluster_and_is_poked_by_its_changes(served, machines, api, tmp_path):
    machines.add_node("n1")
    machines.server.unanswered_watches_s = 2.0
    kubeconfig = tmp_path / "kubeconfig"
    cluster = {"name": "c", "cluster": {"server": machines.server.url}}
    context = {"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
    kubeconfig.write_text(
        yaml.safe_dump(
            {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {}}], "current-context": "x"}
        )
    )
    environ = {
        **os.environ,
        "OPENRL_REDIS_URL": served.settings.redis_url,
        "OPENRL_DATA_DIR": str(tmp_path),
        "OPENRL_CLUSTER": "kubernetes",
        "OPENRL_NAMESPACE": NAMESPACE,
        "OPENRL_KUBECONFIG": str(kubeconfig),
        "OPENRL_TRAINER_IMAGE": "t",
        "OPENRL_SAMPLER_IMAGE": "s",
    }
    ask_for_training(served, 1)
    process = subprocess.Popen([sys.executable, "-m", "openrl.scheduler"], env=environ)
    try:
        until(lambda: api.list(PODS)[0])
        for _ in range(6):
            machines.step(2)
        until(lambda: [each for each in machines.objects.all("workloads") if each["status"]["phase"] == "Running"])
    finally:
        process.terminate()
        assert process.wait(20) == 0


@pytest.mark.full
def test_a_setting_that_is_missing_is_refused_at_start(served, tmp_path):
    environ = {**os.environ, "OPENRL_REDIS_URL": served.settings.redis_url, "OPENRL_DATA_DIR": str(tmp_path)}
    environ |= {"OPENRL_CLUSTER": "kubernetes", "OPENRL_TRAINER_IMAGE": "t"}
    ended = subprocess.run(
        [sys.executable, "-m", "openrl.scheduler"], env=environ, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 2
    assert "OPENRL_SAMPLER_IMAGE is not set" in ended.stderr
