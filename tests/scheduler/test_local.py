"""The local cluster: two deciders at once do no harm, and what is wanted is one hash in the store."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrl.scheduler.clusters import local
from openrl.scheduler.clusters.local import LocalCluster, claim_name, devices
from openrl.scheduler.resources import Action, Claim, Process, Workload


def workload(*, since: float = 1.0, accelerator: int | None = None, name: str = "trainer-tiny") -> Workload:
    claim = None if accelerator is None else claim_name(accelerator)
    return Workload(name=name, kind="trainer", base="Org/Tiny", slug="tiny", claim=claim, since=since)


def start(*, claim: Claim | None = None, **fields) -> Action:
    wanted = workload(**fields)
    seen = claim or (Claim(name=wanted.claim, revision="0") if wanted.claim else None)
    return Action(verb="start", workload=wanted, after=wanted, claim=seen, reason="")


def stop(**fields) -> Action:
    return Action(verb="stop", workload=workload(**fields), reason="")


def renewed(**fields) -> Action:
    after = replace(workload(**fields), generation=1)
    return Action(verb="replace", workload=workload(**fields), after=after, reason="")


@pytest.fixture
def cluster(store) -> LocalCluster:
    return LocalCluster(store)


def test_a_start_is_wanted_and_a_stop_is_not(cluster):
    assert cluster.apply([start()]) == {"trainer-tiny"}
    assert cluster.workloads() == (workload(),)
    assert cluster.apply([stop()]) == {"trainer-tiny"}
    assert cluster.workloads() == ()


def test_the_second_of_two_starts_changes_nothing(cluster):
    cluster.apply([start(since=1.0, accelerator=0)])
    assert cluster.apply([start(since=2.0, accelerator=1)]) == set()
    assert cluster.workloads() == (workload(since=1.0, accelerator=0),)


def test_a_stop_decided_on_an_older_workload_leaves_the_newer_one(cluster):
    cluster.apply([start(since=2.0)])
    assert cluster.apply([stop(since=1.0)]) == set()
    assert cluster.workloads() == (workload(since=2.0),)


def test_a_stop_of_what_is_gone_changes_nothing(cluster):
    assert cluster.apply([stop()]) == set()


def test_of_two_deciders_that_take_the_last_room_at_an_accelerator_one_has_it(store):
    cluster = LocalCluster(store, accelerators=2)
    seen, _ = cluster.observe().claims
    both = [start(claim=seen, accelerator=0, name=name) for name in "ab"]
    assert cluster.apply(both) == {"a", "b"}
    assert cluster.apply([start(claim=seen, accelerator=0, name="c")]) == set()
    now, other = cluster.observe().claims
    assert [seat.workload for seat in now.seats] == ["a", "b"] and other.seats == ()
    assert cluster.apply([start(claim=now, accelerator=0, name="c")]) == {"c"}
    cluster.apply([stop(accelerator=0, name="a")])
    assert cluster.apply([start(claim=now, accelerator=0, name="d")]) == set(), "a seat that was left is a change too"


def test_one_that_waits_for_a_place_has_no_process(store):
    cluster = LocalCluster(store, accelerators=1)
    waiting = replace(workload(), phase="Pending")
    cluster.apply([Action(verb="start", workload=waiting, after=waiting, reason="")])
    assert cluster.workloads() == (waiting,) and cluster.wanted() == ()


def test_nothing_to_do_asks_nothing_of_the_store(cluster):
    assert cluster.apply([]) == set()


def test_a_service_that_starts_wants_nothing(cluster):
    cluster.apply([start()])
    cluster.clear()
    assert cluster.workloads() == ()


def test_devices_are_those_that_the_environment_leaves(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    assert devices() == ("2", "3")
    for none in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", none)
        assert devices() == ()


def test_a_machine_without_a_driver_has_no_devices(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(local, "DRIVER_GPUS", tmp_path / "gpus")
    assert devices() == ()
    (tmp_path / "gpus" / "0000:01").mkdir(parents=True)
    assert devices() == ("0",)


def test_devices_are_counted_by_the_drivers_own_tool(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: X (UUID: a)'\necho '  MIG 1g'\necho 'GPU 1: X (UUID: b)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert devices() == ("0", "1")


def test_of_two_deciders_that_replace_a_process_one_does(cluster):
    cluster.apply([start()])
    assert cluster.apply([renewed()]) == {"trainer-tiny"}
    assert cluster.apply([renewed()]) == set()
    assert [each.generation for each in cluster.workloads()] == [1]
    assert cluster.apply([stop()]) == set()


def test_what_runs_is_what_was_reported_last_and_nothing_after_a_start(cluster):
    cluster.report({"a": Process(pid=1, generation=0), "b": Process(pid=2, generation=3)})
    cluster.report({"b": Process(pid=2, generation=3)})
    assert cluster.processes() == {"b": Process(pid=2, generation=3)}
    cluster.clear()
    assert cluster.processes() == {}


def test_each_device_has_its_own_size_by_index_uuid_or_its_beginning(monkeypatch, tmp_path, store):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho '0, GPU-aa1, 24564'\necho '1, GPU-ab2, 81559'\necho '2, GPU-ac3, [N/A]'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    small, large = 24564 << 20, 81559 << 20
    assert local.device_bytes(["1", "GPU-aa1", "GPU-ab", "GPU-a", "2", "7", "MIG-x"]) == (
        large, small, large, 0, 0, 0, 0,
    )  # fmt: skip
    machine = LocalCluster(store, accelerators=2, device_bytes=local.device_bytes(["1"]))
    machine.set_watched()
    for each in (machine, LocalCluster.as_watched(store)):
        assert [claim.device_bytes for claim in each.observe().claims] == [large, 0]
