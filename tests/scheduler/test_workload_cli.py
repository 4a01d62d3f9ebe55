"""`openrl workloads`, `openrl explain`, `openrl simulate`, as an operator types them."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from openrl.scheduler import remembered, trace
from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.needs import Budget
from openrl.scheduler.noted import Noted
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.workload_cli import explain_command, simulate_command, workloads
from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.registry import Registry
from tests.scheduler.test_process import TINY
from tests.scheduler.test_sizing import QWEN3_06B

NAME = "trainer-org-tiny"


@pytest.fixture
def service(store, tmp_path, monkeypatch):
    """A service whose scheduler has looked once, with two accelerators and work for a trainer."""
    from dataclasses import replace

    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    Registry(store).add_model(replace(TINY, path=str(tmp_path)))
    store.redis.hset(keys.depth("train", TINY.slug), "local", 3)
    Reconciler(store, SchedulerSettings(accelerators=2)).reconcile()
    monkeypatch.setenv("OPENRL_REDIS_URL", store.settings.redis_url)
    monkeypatch.setenv("OPENRL_DATA_DIR", str(store.settings.data_dir))
    return store


def run(command, *arguments: str):
    return CliRunner().invoke(command, arguments, catch_exceptions=False)


def test_workloads_lists_each_with_its_place_and_why(service):
    [row] = json.loads(run(workloads, "--json").stdout)
    assert (row["name"], row["claim"], row["node"], row["waiting"]) == (NAME, "gpu-0", "local", 3)
    assert row["reason"].startswith("3 operations wait")
    assert NAME in run(workloads).stdout.replace("\n", "")


def test_explain_says_where_a_worker_is_why_and_what_it_takes(service):
    said = run(explain_command, NAME).stdout
    assert "gpu-0 on local" in said and "base weights (596M x 2 bytes)" in said and "3 operations wait" in said
    found = json.loads(run(explain_command, NAME, "--json").stdout)
    assert found["device_bytes"] > 2 * 596_049_920 and found["beside"] == [] and found["next"] == []


def test_explain_goes_by_what_the_running_scheduler_was_told_and_not_by_the_shell(service, monkeypatch):
    environ = Noted({"OPENRL_SAMPLER_KV_TOKENS": "4096", "OPENRL_TOKEN": "secret"})
    Budget.from_env(environ), SchedulerSettings.from_env(environ)
    remembered.keep(service, environ.answered)
    monkeypatch.setenv("OPENRL_SAMPLER_KV_TOKENS", "8192")
    found = json.loads(run(explain_command, "sampler-org-tiny", "--json").stdout)
    assert "cache of 4096 positions" in found["size"]
    assert remembered.kept(service) == {"OPENRL_SAMPLER_KV_TOKENS": "4096"}, "what no setting reads is not kept"


def test_explain_says_of_one_that_is_not_there_what_it_would_take(service):
    found = json.loads(run(explain_command, "sampler-org-tiny", "--json").stdout)
    assert found["reason"] == "nothing waits for it; it starts with the first operation"
    assert "cache of 65536 positions" in found["size"]


@pytest.mark.parametrize("accelerators", [0, 2])
def test_explain_says_of_one_that_is_not_there_whose_it_would_be_and_its_priority(service, accelerators):
    Reconciler(service, SchedulerSettings(accelerators=accelerators)).reconcile()
    remembered.keep(service, {"OPENRL_TENANT_PRIORITY": "ann=10", "OPENRL_ACCELERATORS": str(accelerators)})
    for tenant, priority in (("ann", 10), ("bob", 0)):
        slug = keys.pool_slug(TINY.slug, tenant, "run")
        service.redis.hset(keys.pools(TINY.slug), slug, f"{tenant} run")
        found = json.loads(run(explain_command, f"sampler-{slug}", "--json").stdout)
        assert (found["owner"], found["priority"]) == (tenant, priority)


def test_explaining_changes_nothing(service):
    before = LocalCluster(service).workloads()
    service.redis.hset(keys.depth("sample", TINY.slug), "local", 1)
    assert json.loads(run(explain_command, "sampler-org-tiny", "--json").stdout)["next"]
    assert LocalCluster(service).workloads() == before


def test_a_workload_that_there_can_not_be_is_refused_with_those_that_there_can(service):
    refused = run(explain_command, "trainer-other")
    assert refused.exit_code == 2 and "trainer-other" in refused.stderr and NAME in refused.stderr


def test_without_a_service_it_says_how_to_name_one(tmp_path, monkeypatch):
    monkeypatch.delenv("OPENRL_REDIS_URL", raising=False)
    refused = run(workloads, "--data-dir", str(tmp_path / "none"))
    assert refused.exit_code == 2 and "no service runs on" in refused.stderr


def test_simulate_prints_a_line_a_figure_in_the_benchmarks_fields(tmp_path):
    said = {
        "machines": [{"name": "n", "count": 1, "most": 2, "devices": 2, "device_gib": 24, "host_gib": 64}],
        "jobs": [{"at_s": 0, "work_s": 60, "device_gib": 10, "host_gib": 10},
                 {"at_s": 5, "work_s": 60, "device_gib": 99, "host_gib": 10, "name": "huge"}],
    }  # fmt: skip
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(said))
    lines = [json.loads(line) for line in run(simulate_command, str(path), "--json").stdout.splitlines()]
    assert {frozenset(line) for line in lines} == {
        frozenset({"name", "value", "unit", "baseline", "ratio", "runs", "spread"})
    }
    done = next(line for line in lines if line["name"] == "ours_done")
    assert (done["value"], done["baseline"]) == (1.0, 2.0)
    assert "never served: trainer-huge" in run(simulate_command, str(path)).stdout


@pytest.mark.parametrize("name", trace.SHIPPED)
def test_the_shipped_traces_can_be_read_and_are_the_same_each_time(name):
    assert trace.read(name) == trace.read(name) and trace.read(name).jobs


@pytest.mark.parametrize(("said", "named"), [
    ({"machines": []}, "machines is empty"), ({"machines": [{"name": "n"}]}, r"machines\[0\] lacks count"),
    ({"machines": [], "speed": 1}, "'speed'"), ({"machines": [{"name": "n", "gpu": 1}]}, "'gpu'"),
])  # fmt: skip
def test_a_trace_that_makes_no_sense_is_refused_by_the_field(said, named):
    with pytest.raises(InvalidRequest, match=named):
        trace.parse(said, name="t")
