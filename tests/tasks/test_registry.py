from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.tasks import keys
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, StoreUnavailable
from openrl.tasks.registry import BaseModel, Checkpoint, Registry, checkpoint_row
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

TENANT, OTHER = "local", "other"

MODEL = BaseModel(
    name="org/Tiny-1.0", slug="org-tiny-1.0", path="/m", vocab_size=260, max_context=512, arch="llama",
    tokenizer_id="org/Tiny-1.0", hidden_size=64, num_layers=2, tied_embeddings=True,
)  # fmt: skip

CHECKPOINT = Checkpoint(
    run_id="s-1:train:0", checkpoint_id="weights/a", kind="training", directory="d", size_bytes=5, created=1.0,
    base_model="b", rank=8, train_attn=True, train_mlp=True, train_unembed=False, step=3, has_optimizer=True,
)  # fmt: skip


def sampler(registry: Registry, session_id: str, seq: int = 0, **changes: str):
    fields = {"base_model": "b", "slug": "b"} | changes
    return registry.create_sampler(TENANT, session_id=session_id, seq=seq, **fields)


def save(store: Store, tenant: str, checkpoint: Checkpoint) -> None:
    row = checkpoint_row(tenant, checkpoint)
    store.redis.hset(row.key, row.field, row.value)


def test_a_slug_holds_no_suffix_and_no_strange_character():
    assert keys.slug("Org/My Model_7B:peft:262144") == "org-my-model_7b"


def test_a_model_is_found_by_its_name_with_or_without_a_suffix(registry):
    registry.add_model(MODEL)
    assert registry.model("org/Tiny-1.0") == registry.model("org/Tiny-1.0:peft:100") == MODEL
    assert registry.models() == [MODEL]


def test_what_a_sampler_serves_is_noted_unless_its_model_is_another_by_now(registry):
    registry.add_model(MODEL)
    registry.note_sampler(replace(MODEL, max_context=1), rank=8, head=False)
    assert registry.model(MODEL.name) == replace(MODEL, sampler_rank=8, sampler_head=False)
    newer = replace(MODEL, path="/newer", digest="d")
    registry.add_model(newer)
    registry.note_sampler(MODEL, rank=16, head=True)
    assert registry.model(MODEL.name) == newer
    registry.remove_models()
    registry.note_sampler(MODEL, rank=16, head=True)
    assert registry.models() == []


def test_an_unknown_model_is_answered_with_those_served(registry):
    registry.add_model(MODEL)
    with pytest.raises(NotFound, match=r"org/Tiny-1\.0"):
        registry.model("gone")
    registry.remove_models()
    with pytest.raises(NotFound, match="served: none"):
        registry.model("org/Tiny-1.0")


def test_a_session_is_kept_as_it_was_opened(registry):
    opened = registry.create_session(TENANT, tags=["a"], user_metadata={"exp": "sft"}, display_name="mine")
    assert registry.session(TENANT, opened.session_id) == opened
    assert (opened.tags, opened.user_metadata, opened.display_name) == (["a"], {"exp": "sft"}, "mine")
    assert len(opened.session_id) == 34
    assert not opened.finished


def test_the_same_idempotency_key_opens_one_session_for_each_tenant(registry):
    first = registry.create_session(TENANT, idempotency_key="k")
    assert registry.create_session(TENANT, idempotency_key="k").session_id == first.session_id
    assert registry.create_session(OTHER, idempotency_key="k").session_id != first.session_id
    assert registry.create_session(TENANT).session_id != registry.create_session(TENANT).session_id


def test_another_tenants_session_looks_like_none(registry, session_id):
    for read in (registry.session, registry.heartbeat, registry.session_contents):
        with pytest.raises(NotFound):
            read(OTHER, session_id)
    with pytest.raises(NotFound):
        registry.finish_session(OTHER, session_id, "x")


def test_a_finished_session_has_no_more_heartbeats(registry, session_id):
    registry.heartbeat(TENANT, session_id)
    registry.finish_session(TENANT, session_id, "success")
    registry.finish_session(TENANT, session_id, "again")
    assert registry.session(TENANT, session_id).finished
    with pytest.raises(Gone):
        registry.heartbeat(TENANT, session_id)
    with pytest.raises(Gone):
        sampler(registry, session_id)


@pytest.mark.parametrize("bad", ["", "a:b", "a b", "../x", "x" * 200, "a\nb"])
def test_an_impossible_id_is_simply_not_found(registry, bad):
    with pytest.raises(NotFound):
        registry.session(TENANT, bad)
    with pytest.raises(NotFound):
        registry.run(TENANT, f"{bad}:train:x")


@pytest.mark.parametrize("bad", ["", "-a", "A", "a:b", "a" * 64, "a/b"])
def test_an_impossible_tenant_is_refused(registry, bad):
    with pytest.raises(InvalidRequest):
        registry.create_session(bad)


def test_pages_come_newest_first_with_a_total(registry):
    ids = [registry.create_session(TENANT).session_id for _ in range(5)]
    registry.create_session(OTHER)
    page, total = registry.sessions(TENANT, limit=2, offset=1)
    assert ([session.session_id for session in page], total) == ([ids[3], ids[2]], 5)
    assert registry.sessions(TENANT, limit=0, offset=0) == ([], 5)


def test_runs_are_listed_newest_first_and_in_their_session(registry, session_id, new_run):
    ids = [new_run(number) for number in (0, 2, 10)]
    page, total = registry.runs(TENANT, limit=2, offset=0)
    assert ([run.run_id for run in page], total) == ([ids[2], ids[1]], 3)
    assert registry.session_contents(TENANT, session_id) == (ids, [])
    assert registry.runs(OTHER, limit=5, offset=0) == ([], 0)
    with pytest.raises(NotFound):
        registry.run(OTHER, ids[0])


def test_the_same_sampler_again_is_the_same_and_a_different_one_is_refused(registry, session_id):
    first = sampler(registry, session_id, 3)
    assert first.sampler_id == f"{session_id}:sample:3"
    assert sampler(registry, session_id, 3) == first == registry.sampler(TENANT, first.sampler_id)
    with pytest.raises(KeyReused):
        sampler(registry, session_id, 3, model_path="tinker://x/sampler_weights/y")
    assert registry.session_contents(TENANT, session_id) == ([], [first.sampler_id])
    with pytest.raises(NotFound):
        registry.sampler(OTHER, first.sampler_id)


def test_a_sampler_needs_a_session_and_a_possible_number(registry, session_id):
    with pytest.raises(NotFound):
        sampler(registry, "s-none")
    with pytest.raises(InvalidRequest):
        sampler(registry, session_id, -1)


def test_a_checkpoint_is_found_by_its_address_by_its_tenant_alone(registry, store, new_run):
    saved = replace(CHECKPOINT, run_id=new_run())
    save(store, TENANT, saved)
    assert registry.checkpoint_by_uri(TENANT, saved.uri) == saved
    for tenant, uri in ((OTHER, saved.uri), (TENANT, saved.uri + "x")):
        with pytest.raises(NotFound):
            registry.checkpoint_by_uri(tenant, uri)
    for uri in ("weights/a", "tinker://a/b", "tinker://a/b/c/d", "tinker:///b/c"):
        with pytest.raises(InvalidRequest):
            registry.checkpoint_by_uri(TENANT, uri)


def test_checkpoints_are_listed_newest_first_without_expired_ones(registry, store, new_run):
    first, second = new_run(0), new_run(1)
    for number, run_id in enumerate((first, second, first)):
        save(store, TENANT, replace(CHECKPOINT, run_id=run_id, checkpoint_id=f"weights/{number}", created=number))
    save(store, TENANT, replace(CHECKPOINT, run_id=first, checkpoint_id="weights/old", expires_at=time.time() - 1))
    page, total = registry.checkpoints(TENANT, None, 2, 0)
    assert ([c.checkpoint_id for c in page], total) == (["weights/2", "weights/1"], 3)
    assert registry.checkpoints(TENANT, first, 10, 1)[0][0].checkpoint_id == "weights/0"
    with pytest.raises(NotFound):
        registry.checkpoints(OTHER, first, 10, 0)
    with pytest.raises(NotFound):
        registry.checkpoint(TENANT, first, "weights/old")


def test_a_checkpoint_changed_meanwhile_is_read_again_and_one_deleted_is_gone(registry, store):
    where = keys.checkpoints(TENANT, "s-1:train:0")
    # As a later version wrote it: what it holds beyond our fields doesn't keep it from being changed.
    store.redis.hset(where, "weights/a", CHECKPOINT.to_json()[:-1] + ', "later": 1}')
    stale = replace(CHECKPOINT, step=7).to_json()
    assert store.script("checkpoint_swap")(TENANT, "s-1:train:0", "weights/a", stale, "") == b"CHANGED"
    registry.set_expiry(TENANT, "s-1:train:0", "weights/a", 4e9)
    assert registry.checkpoint(TENANT, "s-1:train:0", "weights/a").expires_at == 4e9
    registry.set_expiry(TENANT, "s-1:train:0", "weights/a", None)
    kept = store.redis.hget(where, "weights/a")
    assert registry.delete_checkpoint(TENANT, "s-1:train:0", "weights/a").directory == "d"
    assert store.script("checkpoint_swap")(TENANT, "s-1:train:0", "weights/a", kept, "") == b"OK"
    for gone in (registry.checkpoint, registry.delete_checkpoint):
        with pytest.raises(NotFound):
            gone(TENANT, "s-1:train:0", "weights/a")


def test_a_row_with_fields_of_a_later_version_is_read(registry, store):
    store.redis.hset(keys.MODELS, "org/Tiny-1.0", MODEL.to_json().replace('"name"', '"new": 1, "name"'))
    assert registry.model("org/Tiny-1.0") == MODEL


def test_the_names_are_the_same_in_python_and_in_lua(store):
    source = (Path(keys.__file__).parent / "keys.lua").read_text()
    cases = {
        "sessions": ("t",), "session": ("t", "s"), "session_runs": ("t", "s"), "session_samplers": ("t", "s"),
        "idempotency": ("t", "k"), "queued": ("t",), "runs": ("t",), "run": ("t", "s:train:0"),
        "journal": ("t", "s:train:0"), "bodies": ("t", "s:train:0"), "checkpoints": ("t", "s:train:0"),
        "cancels": ("t", "s:train:0"),
        "sampler": ("t", "s:sample:0"), "sampler_ops": ("t", "s:sample:0"),
        "completions": ("t",), "sampler_done": ("t", "s:sample:0", "3"),
        "future": ("t", "r"), "job": ("t", "r"), "waiting": ("t", "x"), "ready": ("x",), "turns": ("x",),
        "served": ("x",), "unfinished": ("x",), "claimants": ("x",), "inflight": ("w/g",), "depth": ("train", "x"),
        "worker": ("w",), "published": ("s:train:0",), "unloads": ("x",),
        "quota": ("t",), "account": ("t",), "usage": ("t", "5"), "held": ("t",),
        "queues": ("train", "x"), "pools": ("x",), "wake": ("w",),
    }  # fmt: skip
    for name, args in cases.items():
        spoken = store.redis.eval(source + f"return K.{name}(unpack(ARGV))", 0, *args)
        assert spoken.decode() == getattr(keys, name)(*args), name
    for name in (
        "GAPS",
        "WORKERS",
        "FILES",
        "EPOCH",
        "TENANTS",
        "DONE",
        "PUBLISHED",
        "DROPPED",
        "QUOTAS",
        "RUNG",
    ):
        assert store.redis.eval(source + f"return K.{name}", 0).decode() == getattr(keys, name)


def test_a_store_that_does_not_answer_is_named_without_its_password(tmp_path):
    url = "redis://:hunter2@127.0.0.1:1/0"
    settings = StoreSettings(redis_url=url, data_dir=tmp_path)
    assert "hunter2" not in repr(settings)
    store = Store.connect(settings)
    assert not store.ready()
    for call in (Registry(store).models, lambda: Registry(store).heartbeat(TENANT, "s-1"), store.now):
        with pytest.raises(StoreUnavailable) as caught:
            call()
        assert "hunter2" not in str(caught.value)
    store.close()


def test_settings_refuse_what_makes_no_sense(tmp_path):
    env = {"OPENRL_REDIS_URL": "unix:///s", "OPENRL_DATA_DIR": str(tmp_path), "OPENRL_LEASE_S": "8"}
    settings = StoreSettings.from_env(env)
    assert (settings.lease_s, settings.broker_url) == (8.0, "redis+socket:///s")
    for name, value in (
        ("OPENRL_REDIS_URL", "http://x"), ("OPENRL_REDIS_URL", ""), ("OPENRL_DATA_DIR", "relative"),
        ("OPENRL_LEASE_S", "0"), ("OPENRL_LEASE_S", "x"), ("OPENRL_INLINE_BYTES", "-1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            StoreSettings.from_env(env | {name: value})
