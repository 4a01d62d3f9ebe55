"""The data of a whole service: an older one is upgraded once, by nobody but `openrl up`; a newer one is left alone."""

from __future__ import annotations

import json

import pytest

from openrl.tasks import keys, upgrade
from openrl.tasks.errors import OtherVersion
from openrl.tasks.messages import OptimStep, Sample
from openrl.tasks.records import Sampler
from openrl.tasks.schema import DATA

TENANT, SLUG = "local", keys.slug("tiny/base")


def everything(store) -> dict[bytes, bytes]:
    return {name: store.redis.dump(name) for name in sorted(store.redis.scan_iter())}


@pytest.fixture
def old(store, created, registry, session_id, journal) -> str:
    """The id of a sample that waits in a store as the first version left it, with work under way."""
    run_id, lease, _ = created
    journal.submit(TENANT, run_id, 1, OptimStep())
    directory = store.settings.data_dir / "v"
    directory.mkdir()
    (directory / "adapter.safetensors").write_bytes(b"x" * 700)
    (directory / "manifest.json").write_bytes(b"{}")
    sampler = registry.create_sampler(
        TENANT, session_id=session_id, seq=0, base_model="tiny/base", slug=SLUG, adapter_dir="v", run_id=run_id
    )
    promise = journal.submit_sample(TENANT, sampler, 0, Sample(adapter_dir="v", prompt=(1,), num_samples=1)).request_id
    lease.close()
    row = json.loads(sampler.to_json())
    del row["size_bytes"]
    row["schema"] = 1
    store.redis.hset(keys.sampler(TENANT, sampler.sampler_id), "record", json.dumps(row))
    store.redis.hdel(keys.job(TENANT, promise), "of", "schema")
    store.redis.delete(keys.SCHEMA, keys.account(TENANT))
    return promise


def test_an_empty_store_gets_todays_number_and_a_new_directory_its_file(store):
    assert upgrade.upgrade(store, alone=True) is None
    assert int(store.redis.get(keys.SCHEMA)) == DATA
    assert json.loads((store.settings.data_dir / upgrade.MARKER).read_text()) == {"schema": DATA}
    upgrade.check(store)


def test_old_data_is_upgraded_once(store, old, session_id, created):
    assert upgrade.upgrade(store, alone=False) == 1
    assert store.redis.hget(keys.job(TENANT, old), "of").decode() == f"{SLUG} {session_id} {created[0]}"
    assert int(store.redis.hget(keys.account(TENANT), "unfinished")) == 2
    row = store.redis.hget(keys.sampler(TENANT, keys.parse_request(old).parent), "record")
    assert Sampler.from_json(row).size_bytes == 700
    before = everything(store)
    assert upgrade.upgrade(store, alone=False) is None
    assert everything(store) == before


def test_data_from_before_full_runs_gets_a_number_that_its_release_refuses_and_nothing_else(store, created, registry):
    number_of_that_release = 2
    sampler = registry.create_sampler(
        TENANT, session_id=keys.session_of(created[0]), seq=0, base_model="tiny/base", slug=SLUG
    )
    key = keys.sampler(TENANT, sampler.sampler_id)
    store.redis.hset(key, "record", json.dumps(json.loads(sampler.to_json()) | {"schema": 1}))
    store.redis.set(keys.SCHEMA, number_of_that_release)
    before = everything(store)
    assert upgrade.upgrade(store, alone=True) == number_of_that_release
    assert number_of_that_release < DATA, "it deletes what a full run's version leads on from"
    after = everything(store)
    assert {name for name in before | after if before.get(name) != after.get(name)} == {keys.SCHEMA.encode()}
    assert json.loads((store.settings.data_dir / upgrade.MARKER).read_text()) == {"schema": DATA}
    assert Sampler.from_json(store.redis.hget(key, "record")) == sampler
    assert json.loads(sampler.to_json())["schema"] == 2


def test_an_upgrade_that_broke_off_is_done_again_with_the_same_end(store, old, monkeypatch):
    def breaks_off(store):
        upgrade._count_unfinished(store)
        upgrade._name_users_of_samples(store)
        raise RuntimeError("the power went")

    with monkeypatch.context() as context:
        context.setitem(upgrade.STEPS, 1, breaks_off)
        with pytest.raises(RuntimeError):
            upgrade.upgrade(store, alone=True)
    assert store.redis.get(keys.SCHEMA) is None and not (store.settings.data_dir / upgrade.MARKER).exists()
    assert upgrade.upgrade(store, alone=True) == 1
    assert int(store.redis.hget(keys.account(TENANT), "unfinished")) == 2


def test_only_the_service_itself_upgrades(store, old):
    before = everything(store)
    with pytest.raises(OtherVersion, match=r"data of schema 1, .* `openrl up` of this version, which upgrades it"):
        upgrade.check(store)
    assert everything(store) == before


def test_nothing_is_upgraded_while_a_worker_of_the_earlier_version_is_there(store, old, new_lease):
    new_lease("trainer-old")
    before = everything(store)
    with pytest.raises(OtherVersion, match="the worker trainer-old of an earlier version still uses the store"):
        upgrade.upgrade(store, alone=False)
    assert {k: v for k, v in everything(store).items() if b"worker" not in k and b"signs" not in k} == {
        k: v for k, v in before.items() if b"worker" not in k and b"signs" not in k
    }


@pytest.mark.parametrize("found", [DATA + 1, 99, "x", "-1"])
def test_a_store_of_a_number_that_no_earlier_version_has_is_refused_and_nothing_changes(store, old, found):
    store.redis.set(keys.SCHEMA, found)
    before = everything(store)
    for look in (upgrade.check, lambda store: upgrade.upgrade(store, alone=True)):
        with pytest.raises(OtherVersion, match=f"(data of schema {found}|schema b'{found}', which no version has)"):
            look(store)
    assert everything(store) == before
    assert not (store.settings.data_dir / upgrade.MARKER).exists()


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (f'{{"schema": {DATA + 1}}}', f"has data of schema {DATA + 1}"),
        ("{}", "is damaged"),
        ("", "is damaged"),
        ('{"schema": "2"}', "damaged"),
    ],
)
def test_a_directory_that_a_newer_version_used_or_whose_file_is_torn_is_refused(store, text, rule):
    marker = store.settings.data_dir / upgrade.MARKER
    marker.write_text(text)
    for look in (upgrade.check, lambda store: upgrade.upgrade(store, alone=True)):
        with pytest.raises(OtherVersion, match=rule):
            look(store)
    assert marker.read_text() == text and store.redis.dbsize() == 0
