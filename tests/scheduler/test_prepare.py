"""A store and a data directory made ready for parts that something else starts, again and again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from openrl.scheduler import install_cli
from openrl.scheduler.prepare import EPOCH, NotPrepared, prepare
from openrl.tasks import keys
from openrl.tasks.errors import OtherVersion, StoreUnavailable
from openrl.tasks.ownership import epoch_of
from openrl.tasks.quotas import Quotas
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.upgrade import check
from tests.scheduler.test_models import write


def model(name: str, digest: str = "d1") -> BaseModel:
    return BaseModel(
        name=name, slug=keys.slug(name), path=f"/models/{name}", vocab_size=8, max_context=8, arch="llama",
        tokenizer_id=name, hidden_size=8, num_layers=1, tied_embeddings=False, digest=digest,
    )  # fmt: skip


@pytest.fixture
def bare(store: Store) -> Store:
    """A store whose data directory isn't there yet."""
    store.settings.data_dir.rmdir()
    return store


def test_an_empty_store_is_made_ready_once_and_told_again_what_to_serve(bare: Store):
    first = prepare(bare, [model("a"), model("b")], patience_s=0)
    assert (first.models, first.new_epoch) == (("a", "b"), 1)
    assert bare.settings.data_dir.stat().st_mode & 0o777 == 0o700
    check(bare)
    again = prepare(bare, [model("b")], patience_s=0)
    assert (again.models, again.new_epoch, again.upgraded_from) == (("b",), None, None)
    assert [served.name for served in Registry(bare).models()] == ["b"]
    assert epoch_of(bare) == 1


def test_a_store_that_came_back_empty_gets_an_epoch_above_all_earlier_ones(bare: Store):
    prepare(bare, [], patience_s=0)
    bare.redis.set(keys.EPOCH, 7)
    assert prepare(bare, [], patience_s=0).new_epoch is None
    assert (bare.settings.data_dir / EPOCH).read_text() == "7"
    bare.redis.flushall()
    assert prepare(bare, [], patience_s=0).new_epoch == 8


def test_quotas_of_the_environment_are_published(bare: Store):
    prepare(Store(bare.redis, replace(bare.settings, quota_runs=3)), [], patience_s=0)
    assert Quotas(bare).standing("alice").limits.runs == 3


def test_other_weights_under_a_name_with_runs_are_refused_and_nothing_is_changed(bare: Store):
    prepare(bare, [model("a")], patience_s=0)
    bare.redis.hset(keys.MADE_ON, "a", "d1")
    with pytest.raises(NotPrepared, match="--model a: /models/a holds other weights"):
        prepare(bare, [model("a", "d2"), model("b")], patience_s=0)
    assert [served.name for served in Registry(bare).models()] == ["a"]


def test_data_of_a_newer_version_is_refused(bare: Store):
    bare.redis.set(keys.SCHEMA, 99)
    with pytest.raises(OtherVersion, match="schema 99"):
        prepare(bare, [], patience_s=0)


def test_a_store_that_does_not_answer_is_named_by_its_setting(tmp_path: Path):
    nowhere = Store.connect(StoreSettings(redis_url=f"unix://{tmp_path}/none", data_dir=tmp_path / "data"))
    with pytest.raises(StoreUnavailable, match="OPENRL_REDIS_URL"):
        prepare(nowhere, [], patience_s=0)
    assert not (tmp_path / "data").exists()


def test_a_base_model_says_again_at_each_start_which_adapters_its_samplers_serve(
    bare: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = write(tmp_path / "model")
    monkeypatch.setenv("OPENRL_REDIS_URL", bare.settings.redis_url)
    monkeypatch.setenv("OPENRL_DATA_DIR", str(bare.settings.data_dir))
    for engine, rank in (("vllm", 32), ("vllm", 32), ("", 0)):
        monkeypatch.setenv("OPENRL_SAMPLER_ENGINE", engine)
        monkeypatch.setenv("OPENRL_SAMPLER_MAX_LORA_RANK", "32")
        done = CliRunner().invoke(install_cli.prepare, ["--model", f"m={path}"])
        assert done.exit_code == 0, done.output
        assert [model.sampler_rank for model in Registry(bare).models()] == [rank]
