"""Orphans: what nothing names and is old goes, everything else stays."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.sweep import sweep
from openrl.tasks import keys
from openrl.tasks.journal import Journal, Outcome, checkpoint_row
from openrl.tasks.messages import CreateModel, LoadWeights, Sample, SaveWeights
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Checkpoint, Registry
from openrl.workers.weights import layout

TENANT, BASE = "t", "tiny"
DAY = 24 * 3600.0


@pytest.fixture
def run_id(store) -> str:
    session_id = Registry(store).create_session(TENANT).session_id
    return Journal(store).create(TENANT, session_id, 0, CreateModel(base_model=BASE, rank=4, seed=1), slug=BASE).run_id


def directory(store, relative: str) -> Path:
    path = store.settings.data_dir / relative
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(b"x")
    return path


def age(store) -> None:
    """Make everything that lies there two days old."""
    then = time.time() - 2 * DAY
    for path in store.settings.data_dir.rglob("*"):
        os.utime(path, (then, then))


def save(store, run_id: str, name: str, directory: str) -> None:
    checkpoint = Checkpoint(
        run_id=run_id, checkpoint_id=f"weights/{name}", kind="training", directory=directory, size_bytes=1,
        created=0.0, base_model=BASE, rank=4, train_attn=True, train_mlp=True, train_unembed=True, step=0,
        has_optimizer=True,
    )  # fmt: skip
    row = checkpoint_row(TENANT, checkpoint)
    store.redis.hset(row.key, row.field, row.value)


def test_directories_that_nothing_names_go_when_they_are_old_and_only_then(store, run_id):
    home = layout.run_dir(TENANT, run_id)
    kept = directory(store, layout.weights_dir(TENANT, run_id, "a", 2))
    save(store, run_id, "a", layout.weights_dir(TENANT, run_id, "a", 2))
    snapshot = directory(store, layout.snapshot_dir(TENANT, run_id, 7, 2))
    store.redis.hset(keys.run(TENANT, run_id), "snapshot_dir", layout.snapshot_dir(TENANT, run_id, 7, 2))
    orphans = [
        directory(store, f"{home}/{name}")
        for name in (
            "weights/a.1",
            "weights/.tmp-a.1-00",
            "sampler_weights/@0.1",
            "external_weights/e.1",
            "snapshots/3.1",
        )
    ]
    unknown = directory(store, layout.weights_dir(TENANT, run_id.replace("s-", "s-0"), "a", 1))
    assert sweep(store, age_s=DAY) == 0
    age(store)
    young = directory(store, f"{home}/snapshots/9.1")
    assert sweep(store, age_s=DAY) == len(orphans)
    assert not any(path.exists() for path in orphans)
    assert all(path.exists() for path in (kept, snapshot, unknown, young))


def test_a_version_stays_while_a_sampler_or_a_waiting_load_names_it(store, run_id):
    version, overwritten = (layout.weights_dir(TENANT, run_id, "a", token) for token in (1, 2))
    kept = [directory(store, relative) for relative in (version, overwritten)]
    Registry(store).create_sampler(
        TENANT, session_id=keys.session_of(run_id), seq=0, base_model=BASE, slug=BASE, adapter_dir=version
    )
    load = LoadWeights(checkpoint_path="tinker://x/weights/a", checkpoint_dir=overwritten, with_optimizer=True)
    Journal(store).submit(TENANT, run_id, 1, load)
    age(store)
    assert sweep(store, age_s=DAY) == 0
    assert all(path.exists() for path in kept)


def test_files_of_the_spool_stay_while_an_operation_a_sample_or_a_result_needs_them(store, run_id):
    journal, registry = Journal(store), Registry(store)
    sampler = registry.create_sampler(TENANT, session_id=keys.session_of(run_id), seq=0, base_model=BASE, slug=BASE)
    journal.submit(TENANT, run_id, 1, SaveWeights(name="n", user_metadata={"x": "y" * 5000}))
    journal.submit_sample(TENANT, sampler, 0, Sample(adapter_dir="", prompt=(1,) * 3000, num_samples=1, seed=1))
    with Lease(store, "w", "trainer", BASE) as lease:
        (piece,) = journal.take(BASE, lease)
        journal.commit(lease, piece.operations[0], Outcome(result=b"r" * 5000), token=piece.token)
    spool = store.settings.data_dir / "spool"
    named = [path for path in spool.rglob("*") if path.is_file()]
    assert len(named) == 3
    for name in ("0" * 32, "1" * 32 + ".tmp"):
        (named[0].parent / name).write_bytes(b"left over")
    age(store)
    assert sweep(store, age_s=DAY) == 2
    assert sorted(path for path in spool.rglob("*") if path.is_file()) == sorted(named)


def test_an_age_that_could_hit_what_is_being_written_is_refused():
    with pytest.raises(ValueError, match="OPENRL_ORPHAN_AGE_S"):
        SchedulerSettings.from_env({"OPENRL_ORPHAN_AGE_S": "1"})
