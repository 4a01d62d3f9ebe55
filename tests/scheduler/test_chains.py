"""A version of a full run stays readable as long as somebody names it: with all that its delta leads on from."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from openrl.scheduler.retention import retain
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.sweep import sweep, sweep_dropped
from openrl.tasks import keys
from openrl.tasks.journal import Journal, sampler_row
from openrl.tasks.messages import CreateModel
from openrl.tasks.orphans import Dropped
from openrl.tasks.records import Checkpoint
from openrl.tasks.registry import Registry, Sampler
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage
from openrl.tasks.versions import Versions
from openrl.workers.weights import layout
from openrl.workers.weights.publish import Publisher
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident

TENANT, BASE, NUM = "t", "tiny", 7


@pytest.fixture
def run_id(store: Store) -> str:
    session_id = Registry(store).create_session(TENANT).session_id
    message = CreateModel(base_model=BASE, rank=0, seed=1, fine_tuning="full")
    return Journal(store).create(TENANT, session_id, 0, message, slug=BASE).run_id


@pytest.fixture
def versions(store: Store, run_id: str) -> list[Sampler]:
    """Seven versions, each of one sampler: anchors are the first and the fifth."""
    session_id, made = keys.session_of(run_id), []
    weights = {"w": torch.zeros(4096)}
    home = layout.resolve(store.settings.data_dir, layout.ephemeral_dir(TENANT, run_id, 0, 1)).parent
    home.mkdir(parents=True)
    publisher = Publisher(home, anchor_every=4)
    for number in range(NUM):
        directory = layout.ephemeral_dir(TENANT, run_id, number, 1)
        weights["w"][number] = number + 1.0
        link = publisher.publish(directory.rpartition("/")[2], weights, step=number)
        made.append(
            Sampler(
                sampler_id=keys.sampler_id(session_id, number), session_id=session_id, base_model=BASE,
                slug=keys.pool_slug(BASE, TENANT, run_id), adapter_dir=directory, run_id=run_id,
                created=float(number), size_bytes=100, weights_digest=link.ident.digest,
            )
        )  # fmt: skip
        for row in sampler_row(TENANT, made[-1]):
            store.redis.hset(row.key, row.field, row.value)
    return made


def on_disk(store: Store, versions: list[Sampler]) -> str:
    return "".join(
        str(number) for number, one in enumerate(versions) if (store.settings.data_dir / one.adapter_dir).is_dir()
    )


def read(store: Store, version: Sampler) -> torch.Tensor:
    path = store.settings.data_dir / version.adapter_dir
    resident = Resident({"w": torch.full((4096,), -1.0)})
    with Reader(path.parent, resident).prepare(path.name, digest=version.weights_digest) as switch:
        switch.apply()
    return resident.tensors["w"]


def test_what_is_dropped_stays_on_disk_while_a_version_that_is_kept_leads_on_from_it(
    store: Store, versions: list[Sampler]
) -> None:
    assert retain(store, SchedulerSettings(version_last=1, version_ttl_s=1e-3)) == NUM - 1
    assert sweep_dropped(store, grace_s=-1) == 4
    assert on_disk(store, versions) == "456", "the last one's way begins at the anchor before it"
    assert read(store, versions[6])[:8].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 0.0]
    assert sweep_dropped(store, grace_s=-1) == 0


def test_a_chain_goes_with_its_last_version_but_not_what_the_run_published_last(
    store: Store, versions: list[Sampler], run_id: str
) -> None:
    store.redis.hset(keys.run(TENANT, run_id), "last_version", versions[5].adapter_dir)
    for version in versions:
        store.redis.delete(keys.sampler(TENANT, version.sampler_id))
        store.redis.hdel(keys.session_samplers(TENANT, version.session_id), version.sampler_id)
        store.redis.zadd(keys.DROPPED, {version.adapter_dir: 1.0})
    sweep_dropped(store, grace_s=-1)
    assert on_disk(store, versions) == "45"
    store.redis.hdel(keys.run(TENANT, run_id), "last_version")
    sweep_dropped(store, grace_s=-1)
    assert on_disk(store, versions) == ""


def test_the_sweep_of_what_nothing_names_leaves_a_chain_whole(store: Store, versions: list[Sampler]) -> None:
    for version in versions[:3]:
        store.redis.delete(keys.sampler(TENANT, version.sampler_id))
        store.redis.hdel(keys.session_samplers(TENANT, version.session_id), version.sampler_id)
    then = time.time() - 10 * 24 * 3600
    for path in store.settings.data_dir.rglob("*"):
        os.utime(path, (then, then))
    sweep(store, age_s=24 * 3600)
    assert on_disk(store, versions) == "0123456", "the fourth leads on from the first three"
    assert read(store, versions[3])[:4].tolist() == [1.0, 2.0, 3.0, 4.0]


def made_old(store: Store) -> None:
    then = time.time() - 10 * 24 * 3600
    for path in store.settings.data_dir.rglob("*"):
        os.utime(path, (then, then))


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "stat"])
@pytest.mark.parametrize("which", [6, 5], ids=["the kept version", "one before it"])
def test_what_can_not_be_read_now_costs_no_version_what_it_leads_on_from(
    store: Store, versions: list[Sampler], monkeypatch: pytest.MonkeyPatch, which: int, call: str, number: int
) -> None:
    assert retain(store, SchedulerSettings(version_last=1, version_ttl_s=1e-3)) == NUM - 1
    other = layout.ephemeral_dir(TENANT, keys.run_id("s-other", 0), 0, 1)
    layout.resolve(store.settings.data_dir, other).mkdir(parents=True)
    store.redis.zadd(keys.DROPPED, {other: 1.0})
    made_old(store)
    sick, whole = store.settings.data_dir / versions[which].adapter_dir, getattr(Path, call)

    def fails(path: Path, *args: object, **options: object) -> object:
        if path.is_relative_to(sick):
            raise OSError(number, os.strerror(number))
        return whole(path, *args, **options)

    with monkeypatch.context() as context:
        context.setattr(Path, call, fails)
        assert sweep_dropped(store, grace_s=-1) == 1, "of another run it goes on"
        store.redis.delete(keys.DROPPED)
        with suppress(OSError):  # it may also end there
            sweep(store, age_s=24 * 3600)
    assert on_disk(store, versions) == "0123456"
    sweep(store, age_s=24 * 3600)
    assert on_disk(store, versions) == "456", "once it can be read again"


def test_a_damaged_manifest_keeps_what_lies_beside_it_and_a_version_that_is_gone_keeps_nothing(
    store: Store, versions: list[Sampler]
) -> None:
    assert retain(store, SchedulerSettings(version_last=1, version_ttl_s=1e-3)) == NUM - 1
    last = store.settings.data_dir / versions[6].adapter_dir
    (last / "manifest.json").write_bytes(b"{}")
    assert sweep_dropped(store, grace_s=-1) == 0
    shutil.rmtree(last)
    assert sweep_dropped(store, grace_s=-1) == NUM - 1
    assert on_disk(store, versions) == ""


def stored(store: Store) -> int:
    """What the account says, which a new measurement must not change."""
    before = int(store.redis.hget(keys.account(TENANT), "stored") or 0)
    Usage(store).meter()
    assert int(store.redis.hget(keys.account(TENANT), "stored") or 0) == before
    return before


def test_a_version_is_counted_until_its_directory_goes(store: Store, versions: list[Sampler], run_id: str) -> None:
    Usage(store).meter()
    assert stored(store) == 700
    retain(store, SchedulerSettings(version_last=1, version_ttl_s=1e-3))
    assert stored(store) == 700, "nothing has gone yet"
    sweep_dropped(store, grace_s=-1)
    assert stored(store) == 300, "the last, and two that it leads on from"
    store.redis.hincrbyfloat(keys.account(TENANT), "metered", -3600)
    usage = Usage(store)
    usage.meter()
    rows = [row for row in usage.between(TENANT, time.time() - 7200, time.time()) if row.name == "byte_seconds"]
    assert {(row.slug, row.session_id, row.run_id) for row in rows} == {(BASE, keys.session_of(run_id), run_id)}
    [last] = Versions(store).all()
    assert Versions(store).drop(last) and stored(store) == 300
    assert sweep_dropped(store, grace_s=-1) == 3 and stored(store) == 0
    assert store.redis.exists(keys.DROPPED, keys.held(TENANT)) == 0


def test_a_named_version_is_counted_until_its_directory_goes_and_other_checkpoints_until_they_are_deleted(
    store: Store, versions: list[Sampler], run_id: str
) -> None:
    for number, digest in ((0, versions[0].weights_digest), (1, "")):
        made = Checkpoint(
            run_id=run_id, checkpoint_id=f"sampler_weights/{number}", kind="sampler",
            directory=layout.sampler_dir(TENANT, run_id, str(number), 1), size_bytes=1000, created=1.0,
            base_model=BASE, rank=0, train_attn=True, train_mlp=True, train_unembed=True, step=1,
            has_optimizer=False, weights_digest=digest,
        )  # fmt: skip
        store.script("checkpoint_swap")(TENANT, run_id, made.checkpoint_id, "", made.to_json())
    Usage(store).meter()
    registry = Registry(store)
    registry.set_public(TENANT, run_id, "sampler_weights/0", public=True)
    assert stored(store) == 2700
    for number, left in ((1, 1700), (0, 1700)):
        registry.delete_checkpoint(TENANT, run_id, f"sampler_weights/{number}")
        assert stored(store) == left
    assert sweep_dropped(store, grace_s=-1) == 2
    assert stored(store) == 700


def test_what_is_still_needed_is_looked_at_again_after_another_grace_only(
    store: Store, versions: list[Sampler]
) -> None:
    retain(store, SchedulerSettings(version_last=1, version_ttl_s=1e-3))
    store.redis.zadd(keys.DROPPED, dict.fromkeys(store.redis.zrange(keys.DROPPED, 0, -1), 1.0))
    assert sweep_dropped(store) == 4
    assert store.redis.zcard(keys.DROPPED) == 2
    assert Dropped(store).before(store.now() - 60) == [], "each look reads every row"
