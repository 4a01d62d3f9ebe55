"""What goes and what stays: versions by use and number, checkpoints by their time, files when nothing needs them."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.retention import retain, surplus
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.sweep import sweep, sweep_dropped
from openrl.tasks import keys
from openrl.tasks.errors import NotFound
from openrl.tasks.journal import Journal, Outcome, checkpoint_row, sampler_row
from openrl.tasks.messages import CreateModel, LoadWeights, Sample, SaveWeights
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Checkpoint, Registry, Sampler
from openrl.tasks.store import Store
from openrl.tasks.versions import Version, Versions
from openrl.workers.weights import layout

TENANT, BASE, DAY = "t", "tiny", 24 * 3600.0
FILE_BYTES = 1000


def version(number: int, **changes: object) -> Version:
    fields = {
        "tenant": TENANT, "sampler_id": f"s:sample:{number}", "run_id": "s:train:0", "directory": f"v{number}",
        "size_bytes": 10, "created": float(number), "last_used": float(number),
    }  # fmt: skip
    return Version(**fields | changes)  # type: ignore[arg-type]


def kept(versions: list[Version], **limits: float) -> list[str]:
    rules = {"now": 1000.0, "ttl_s": 100.0, "last": 2, "most_bytes": 10**9} | limits
    dropped = surplus(random.Random(0).sample(versions, len(versions)), **rules)  # type: ignore[arg-type]
    return [each.directory for each in versions if each not in dropped]


def test_of_each_run_the_newest_stay_and_of_the_others_those_used_of_late() -> None:
    versions = [version(number) for number in range(5)]
    assert kept(versions) == ["v3", "v4"]
    assert kept([replace(versions[0], last_used=950.0), *versions[1:]]) == ["v0", "v3", "v4"]
    other = [version(number, run_id="s:train:1", directory=f"w{number}") for number in range(3)]
    assert kept(versions + other) == ["v3", "v4", "w1", "w2"]
    assert kept([replace(each, tenant="u") for each in other], last=1) == ["w2"]


def test_a_version_with_unfinished_samples_stays_however_old_it_is() -> None:
    assert kept([version(0, busy=True), *(version(number) for number in range(1, 5))], most_bytes=0) == [
        "v0",
        "v3",
        "v4",
    ]


def test_over_a_runs_bytes_the_versions_go_that_were_not_used_for_longest() -> None:
    versions = [version(number, last_used=990.0 - number) for number in range(6)]
    assert kept(versions) == [f"v{number}" for number in range(6)]
    assert kept(versions, most_bytes=40) == ["v0", "v1", "v4", "v5"]
    assert kept(versions, most_bytes=0) == ["v4", "v5"]


def test_samplers_of_one_directory_stay_or_go_together() -> None:
    shared = [version(number, directory="v", last_used=950.0 if number == 7 else 1.0) for number in (1, 7)]
    assert kept([*shared, *(version(number) for number in (8, 9))]) == ["v", "v", "v8", "v9"]


# on a store -----------------------------------------------------------------------------------------


@pytest.fixture
def run_id(store: Store) -> str:
    session_id = Registry(store).create_session(TENANT).session_id
    return Journal(store).create(TENANT, session_id, 0, CreateModel(base_model=BASE, rank=4, seed=1), slug=BASE).run_id


def on_disk(store: Store, relative: str) -> Path:
    path = store.settings.data_dir / relative
    path.mkdir(parents=True)
    (path / "adapter_model.safetensors").write_bytes(b"x" * FILE_BYTES)
    return path


def ephemeral(store: Store, run_id: str, number: int, *, created: float, redis: Any = None) -> Sampler:
    """Save what `save_weights_and_get_sampling_client` saves: a directory and a sampler's record."""
    session_id = keys.session_of(run_id)
    directory = layout.ephemeral_dir(TENANT, run_id, number, number + 1)
    on_disk(store, directory)
    sampler = Sampler(
        sampler_id=keys.sampler_id(session_id, number), session_id=session_id, base_model=BASE, slug=BASE,
        adapter_dir=directory, run_id=run_id, created=created, size_bytes=FILE_BYTES,
    )  # fmt: skip
    for row in sampler_row(TENANT, sampler):
        (redis or store.redis).hset(row.key, row.field, row.value)
    return sampler


def checkpoint(store: Store, run_id: str, name: str, token: int = 1, **changes: object) -> Checkpoint:
    directory = layout.weights_dir(TENANT, run_id, name, token)
    on_disk(store, directory)
    fields = {
        "run_id": run_id, "checkpoint_id": f"weights/{name}", "kind": "training", "directory": directory,
        "size_bytes": FILE_BYTES, "created": 0.0, "base_model": BASE, "rank": 4, "train_attn": True, "train_mlp": True,
        "train_unembed": True, "step": 0, "has_optimizer": True,
    }  # fmt: skip
    made = Checkpoint(**fields | changes)  # type: ignore[arg-type]
    row = checkpoint_row(TENANT, made)
    store.redis.hset(row.key, row.field, row.value)
    return made


def usage(store: Store) -> tuple[int, int]:
    """How many directories of versions there are, and the bytes in them."""
    files = list(store.settings.data_dir.glob("tenants/*/runs/*/*/*/*"))
    return len({file.parent for file in files}), sum(file.stat().st_size for file in files)


def sample(store: Store, sampler: Sampler, seq: int = 0) -> None:
    Journal(store).submit_sample(
        TENANT, sampler, seq, Sample(adapter_dir=sampler.adapter_dir, prompt=(1,), num_samples=1)
    )


def test_the_disk_is_bounded_after_five_hundred_ephemeral_saves_in_one_session(store: Store, run_id: str) -> None:
    settings = SchedulerSettings(version_last=4, version_bytes=20 * FILE_BYTES)
    began = time.time()
    for beat in range(5):
        with store.redis.pipeline(transaction=False) as pipe:
            for number in range(100 * beat, 100 * beat + 100):
                ephemeral(store, run_id, number, created=began + number / 1000, redis=pipe)
            pipe.execute()
        assert retain(store, settings) == sweep_dropped(store, grace_s=-1) == (100 if beat else 80)
        assert usage(store) == (20, 20 * FILE_BYTES)
    registry, session_id = Registry(store), keys.session_of(run_id)
    for number in (480, 499):
        assert layout.existing(
            store.settings.data_dir, registry.sampler(TENANT, f"{session_id}:sample:{number}").adapter_dir
        )
    for setting in ("OPENRL_VERSION_TTL_S", "OPENRL_VERSION_LAST", "OPENRL_VERSION_BYTES"):
        with pytest.raises(NotFound, match=setting):
            registry.sampler(TENANT, f"{session_id}:sample:479")
    assert registry.session_contents(TENANT, session_id)[1][0] == f"{session_id}:sample:0"
    assert store.redis.zcard(keys.DROPPED) == 0


def test_versions_that_were_used_within_the_time_stay_and_go_after_it(store: Store, run_id: str) -> None:
    long_ago = time.time() - 2 * DAY
    samplers = [ephemeral(store, run_id, number, created=long_ago + number) for number in range(4)]
    sample(store, samplers[1])
    settings = SchedulerSettings(version_last=1)
    assert retain(store, settings) == 2
    for sampler, is_there in zip(samplers, (False, True, False, True), strict=True):
        record = store.redis.hget(keys.sampler(TENANT, sampler.sampler_id), "record")
        assert bool(record) is is_there
    store.redis.hset(keys.sampler(TENANT, samplers[1].sampler_id), "last_used", str(long_ago))
    assert retain(store, settings) == 0, "its sample isn't finished"
    with Lease(store, "w", "sampler", BASE) as lease:
        [job] = Journal(store).take_samples(BASE, lease, limit=9)
        Journal(store).commit_sample(lease, job, Outcome(result=b"{}"))
    assert retain(store, settings) == 1
    assert retain(store, settings) == 0


def test_a_version_that_is_used_in_the_moment_it_is_given_up_stays(store: Store, run_id: str) -> None:
    sampler = ephemeral(store, run_id, 0, created=1.0)
    [seen] = Versions(store).all()
    sample(store, sampler)
    assert not Versions(store).drop(seen)
    assert Registry(store).sampler(TENANT, sampler.sampler_id) == sampler


def test_versions_of_checkpoints_are_the_checkpoints_until_these_are_deleted(store: Store, run_id: str) -> None:
    registry, home = Registry(store), keys.session_of(run_id)
    made = [checkpoint(store, run_id, name) for name in ("a", "b", "c")]
    for number, one in enumerate(made):
        registry.create_sampler(
            TENANT, session_id=home, seq=number, base_model=BASE, slug=BASE, adapter_dir=one.directory,
            model_path=one.uri, run_id=run_id,
        )  # fmt: skip
    assert Versions(store).all() == []
    for one in made[:2]:
        registry.delete_checkpoint(TENANT, run_id, one.checkpoint_id)
    assert [each.sampler_id for each in Versions(store).all()] == [f"{home}:sample:0", f"{home}:sample:1"]
    assert sweep_dropped(store, grace_s=-1) == 0, "samplers hold them"
    store.redis.hset(keys.sampler(TENANT, f"{home}:sample:0"), "last_used", "1")
    assert retain(store, SchedulerSettings(version_last=1)) == 1
    assert sweep_dropped(store, grace_s=-1) == 1
    assert [(store.settings.data_dir / one.directory).exists() for one in made] == [False, True, True]


def test_expired_checkpoints_lose_their_row_first_and_their_files_later(store: Store, run_id: str) -> None:
    now = time.time()
    gone = checkpoint(store, run_id, "gone", expires_at=now - 1)
    stays = [checkpoint(store, run_id, "later", expires_at=now + 60), checkpoint(store, run_id, "ever")]
    registry = Registry(store)
    assert registry.expire() == 1 and registry.expire() == 0
    assert store.redis.hkeys(keys.checkpoints(TENANT, run_id)) == [b"weights/later", b"weights/ever"]
    assert sweep_dropped(store) == 0 and (store.settings.data_dir / gone.directory).is_dir(), "it may be in use"
    # A crash in between forgets nothing: what is to be deleted is in the store.
    assert sweep_dropped(store, grace_s=-1) == 1
    assert not (store.settings.data_dir / gone.directory).exists()
    assert all((store.settings.data_dir / one.directory).is_dir() for one in stays)


def test_the_beats_task_expires_retains_and_sweeps(store: Store, run_id: str) -> None:
    checkpoint(store, run_id, "gone", expires_at=1.0)
    for number in range(3):
        ephemeral(store, run_id, number, created=float(number))
    Reconciler(store, SchedulerSettings(version_last=1)).sweep_checkpoints()
    assert not store.redis.exists(keys.checkpoints(TENANT, run_id))
    assert store.redis.zcard(keys.DROPPED) == 3
    store.redis.zadd(keys.DROPPED, dict.fromkeys(store.redis.zrange(keys.DROPPED, 0, -1), 1.0))
    Reconciler(store, SchedulerSettings(version_last=1)).sweep_checkpoints()
    assert usage(store)[0] == 1 and store.redis.zcard(keys.DROPPED) == 0


def test_a_directory_stays_while_a_waiting_load_or_a_snapshot_needs_it(store: Store, run_id: str) -> None:
    loaded, snapshot = checkpoint(store, run_id, "a"), checkpoint(store, run_id, "b")
    load = LoadWeights(checkpoint_path=loaded.uri, checkpoint_dir=loaded.directory, with_optimizer=True)
    Journal(store).submit(TENANT, run_id, 1, load)
    store.redis.hset(keys.run(TENANT, run_id), "snapshot_dir", snapshot.directory)
    for one in (loaded, snapshot):
        Registry(store).delete_checkpoint(TENANT, run_id, one.checkpoint_id)
    assert sweep_dropped(store, grace_s=-1) == 0
    store.redis.hdel(keys.bodies(TENANT, run_id), "1")
    assert sweep_dropped(store, grace_s=-1) == 1
    assert (store.settings.data_dir / snapshot.directory).is_dir()


def test_what_was_just_dropped_is_no_orphan_however_old_its_files_are(store: Store, run_id: str) -> None:
    old = checkpoint(store, run_id, "a")
    path = store.settings.data_dir / old.directory
    os.utime(path, (1, 1))
    Registry(store).delete_checkpoint(TENANT, run_id, old.checkpoint_id)
    assert sweep(store, age_s=DAY) == 0 and path.is_dir()


def test_the_version_that_an_overwriting_save_replaces_is_dropped(store: Store, run_id: str) -> None:
    old = checkpoint(store, run_id, "a", token=1)
    new = replace(old, directory=layout.weights_dir(TENANT, run_id, "a", 2))
    journal = Journal(store)
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a", overwrite=True))
    with Lease(store, "w", "trainer", BASE) as lease:
        [piece] = journal.take(BASE, lease)
        journal.commit(lease, piece.operations[0], Outcome(), token=piece.token)
        save = Outcome(rows=(checkpoint_row(TENANT, new),))
        journal.commit(lease, piece.operations[1], save, token=piece.token)
    on_disk(store, new.directory)
    assert sweep_dropped(store, grace_s=-1) == 1
    assert not (store.settings.data_dir / old.directory).exists() and (store.settings.data_dir / new.directory).is_dir()


def test_deletions_saves_and_changes_at_once_leave_no_half_state(store: Store, run_id: str) -> None:
    # Whatever wins: a row names a directory that is there, and what no row names is noted as dropped.
    registry, errors = Registry(store), []
    journal = Journal(store)
    with Lease(store, "w", "trainer", BASE) as lease:
        for seq in range(1, 21):
            journal.submit(TENANT, run_id, seq, SaveWeights(name="a", overwrite=True))
        [piece] = journal.take(BASE, lease)
        first, *saves = piece.operations
        journal.commit(lease, first, Outcome(), token=piece.token)
        done = threading.Event()

        def change(deed: str) -> None:
            while not done.is_set():
                try:
                    if deed == "delete":
                        registry.delete_checkpoint(TENANT, run_id, "weights/a")
                    elif deed == "ttl":
                        registry.set_expiry(TENANT, run_id, "weights/a", time.time() + 60)
                    else:
                        registry.set_public(TENANT, run_id, "weights/a", public=True)
                except NotFound:
                    pass
                except Exception as error:
                    errors.append(error)
                time.sleep(0.001)

        threads = [threading.Thread(target=change, args=(deed,)) for deed in ("delete", "delete", "ttl", "publish")]
        for thread in threads:
            thread.start()
        written = set()
        for operation in saves:
            directory = layout.weights_dir(TENANT, run_id, "a", operation.seq_id)
            on_disk(store, directory)
            written.add(directory)
            made = Checkpoint(
                run_id=run_id, checkpoint_id="weights/a", kind="training", directory=directory, size_bytes=1,
                created=0.0, base_model=BASE, rank=4, train_attn=True, train_mlp=True, train_unembed=True, step=0,
                has_optimizer=True,
            )  # fmt: skip
            outcome = Outcome(rows=(checkpoint_row(TENANT, made),))
            journal.commit(lease, operation, outcome, token=piece.token)
        done.set()
        for thread in threads:
            thread.join()
    assert errors == []
    row = store.redis.hget(keys.checkpoints(TENANT, run_id), "weights/a")
    named = {Checkpoint.from_json(row).directory} if row else set()
    dropped = {member.decode() for member in store.redis.zrange(keys.DROPPED, 0, -1)}
    assert named | dropped == written and not named & dropped
    public = bool(row) and Checkpoint.from_json(row).public
    assert bool(store.redis.exists(keys.published(run_id))) is public
    assert int(store.redis.hget(keys.account(TENANT), "stored") or 0) == (1 if row else 0)
    sweep_dropped(store, grace_s=-1)
    assert {path.relative_to(store.settings.data_dir).as_posix() for path in layout.versions(
        store.settings.data_dir, TENANT, run_id)} == named  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"), [("OPENRL_VERSION_TTL_S", "0"), ("OPENRL_VERSION_LAST", "0"), ("OPENRL_VERSION_BYTES", "-1")]
)
def test_settings_that_make_no_sense_are_refused(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerSettings.from_env({name: value})
