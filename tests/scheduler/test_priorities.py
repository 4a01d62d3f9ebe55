"""An operator's priorities: what they may be, whose workers they are for, and that they are seen."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from click.testing import CliRunner

from openrl.scheduler.needs import Budget, Needs
from openrl.scheduler.priorities import Priorities
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.resources import Pool
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.workload_cli import workloads
from openrl.tasks import keys
from openrl.tasks.registry import Registry
from tests.scheduler.test_process import TINY
from tests.scheduler.test_sizing import QWEN3_06B

SET = {"OPENRL_TENANT_PRIORITY": "ann=10, bob=-5", "OPENRL_MODEL_PRIORITY": "org/tiny=3"}


@pytest.mark.parametrize(
    ("text", "named"),
    [("ann", "'ann' must be a name"), ("ann=high", "ann=high"), ("=3", "'=3'"), ("ann=1001", "to 1000"),
     ("ann=1,ann=2", "'ann' is there twice"), ("ann=1.5", "ann=1.5")],
)  # fmt: skip
def test_a_priority_that_makes_no_sense_is_refused_by_name(text, named):
    with pytest.raises(ValueError, match=f"^OPENRL_TENANT_PRIORITY: .*{named}"):
        SchedulerSettings.from_env({"OPENRL_TENANT_PRIORITY": text})


def test_a_tenants_number_comes_before_its_models_and_is_for_his_own_workers_alone():
    priorities = Priorities.from_env(SET)
    assert [priorities.of(owner, "org/tiny") for owner in ("ann", "bob", "cho", "")] == [10, -5, 3, 3]
    assert priorities.of("cho", "other") == 0


def test_workers_have_their_priority_from_the_first_moment(store, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_06B))
    model = replace(TINY, path=str(tmp_path), name="org/tiny")
    shared = Pool(slug=model.slug, kind="trainer", base=model.name)
    full = Pool(slug=keys.pool_slug(model.slug, "ann", "run"), kind="trainer", base=model.name)
    needs = Needs(Budget(), Priorities.from_env(SET))
    owners = {full.slug: "ann"}
    assert {p: n.priority for p, n in needs.of([shared, full], [model], owners).items()} == {shared: 3, full: 10}
    assert {p: n.priority for p, n in needs.ranks([shared, full], owners).items()} == {shared: 3, full: 10}


def test_an_operator_sees_the_priority_where_device_sizes_are_not_known_too(store, monkeypatch):
    Registry(store).add_model(TINY)
    store.redis.hset(keys.depth("train", TINY.slug), "local", 3)
    environ = {"OPENRL_MODEL_PRIORITY": f"{TINY.name}=7", "OPENRL_ACCELERATORS": "1"}
    Reconciler(store, SchedulerSettings.from_env(environ)).reconcile()
    monkeypatch.setenv("OPENRL_REDIS_URL", store.settings.redis_url)
    monkeypatch.setenv("OPENRL_DATA_DIR", str(store.settings.data_dir))
    [row] = json.loads(CliRunner().invoke(workloads, ["--json"], catch_exceptions=False).stdout)
    assert row["priority"] == 7


def test_a_number_of_a_model_that_is_not_served_is_told_once(store, caplog):
    Registry(store).add_model(TINY)
    settings = SchedulerSettings.from_env({"OPENRL_MODEL_PRIORITY": f"{TINY.name}=7,org/tiney=3"})
    reconciler = Reconciler(store, settings)
    with caplog.at_level(logging.WARNING):
        reconciler.reconcile()
        reconciler.reconcile()
    [said] = [text for text in caplog.messages if "OPENRL_MODEL_PRIORITY" in text]
    assert "'org/tiney'" in said and TINY.name not in said
