"""Records say which version wrote them: what is older is brought up to date, what is newer is refused by name."""

from __future__ import annotations

import json
import re
from importlib import resources

import pytest

from openrl.scheduler.clusters.local import LocalCluster
from openrl.scheduler.resources import Action, Process, Workload
from openrl.tasks import audit, keys, schema
from openrl.tasks.errors import OtherVersion
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import OptimStep, Sample, SaveWeights
from openrl.tasks.records import BaseModel, Checkpoint, Run, Sampler, Session, checkpoint_row
from openrl.tasks.schema import Schema
from openrl.tasks.tenants import Tenants

TENANT, SLUG = "local", keys.slug("tiny/base")
MODEL = BaseModel(
    name="tiny/base", slug=SLUG, path="/m", vocab_size=260, max_context=64, arch="llama", tokenizer_id="tiny/base",
    hidden_size=8, num_layers=1, tied_embeddings=True,
)  # fmt: skip
CHECKPOINT = Checkpoint(
    run_id="s-1:train:0", checkpoint_id="weights/a", kind="training", directory="d", size_bytes=5, created=1.0,
    base_model="tiny/base", rank=8, train_attn=True, train_mlp=True, train_unembed=True, step=1, has_optimizer=True,
)  # fmt: skip

THING = Schema(
    noun="thing",
    number=3,
    migrations={1: lambda row: row | {"b": row["a"] + 1}, 2: lambda row: row | {"c": row["b"] + 1}},
)


def test_an_older_record_goes_through_every_step_to_todays_form():
    assert THING.current({"schema": 1, "a": 1}) == {"a": 1, "b": 2, "c": 3}
    assert THING.current({"schema": 2, "a": 1, "b": 5}) == {"a": 1, "b": 5, "c": 6}
    assert THING.current(THING.numbered({"a": 1})) == {"a": 1}


@pytest.mark.parametrize("number", [4, 99, -1, 2.0, True, "x", [1], b"4", ""])
def test_a_record_of_a_number_that_this_version_does_not_know_is_refused_by_name(number):
    with pytest.raises(
        OtherVersion, match=r"a thing has schema .* up to 3: an operator starts the version that wrote it"
    ):
        THING.current({"schema": number, "a": 1})


@pytest.mark.parametrize("row", [{"a": 1}, {"schema": 0, "a": 1}, {"schema": None, "a": 1}])
def test_a_record_that_is_older_than_all_steps_is_refused_by_name(row):
    with pytest.raises(OtherVersion, match="a thing has schema 0, which is older than this version reads"):
        THING.current(row)


def test_the_number_of_a_hash_is_text():
    assert THING.check(b"3") == THING.check("3") == THING.check(3) == 3


@pytest.mark.parametrize("record", [MODEL, CHECKPOINT, Session(session_id="s-1")])
def test_a_row_comes_back_and_a_newer_one_is_refused(record):
    row = json.loads(record.to_json())
    assert type(record).from_json(json.dumps(row)) == record
    with pytest.raises(OtherVersion, match=f"a {record.schema.noun} has schema {record.schema.number + 1}"):
        type(record).from_json(json.dumps(row | {"schema": record.schema.number + 1}))


def test_scripts_write_the_numbers_that_this_module_says():
    said = re.search(r"local SCHEMA = \{(.*)\}", resources.files("openrl.tasks").joinpath("steps.lua").read_text())
    assert said is not None
    numbers = dict(re.findall(r"(\w+) = (\d+)", said[1]))
    assert numbers == {
        "entry": str(schema.ENTRY.number), "future": str(schema.FUTURE.number), "sample": str(schema.SAMPLE.number),
    }  # fmt: skip


def test_an_entry_of_a_newer_version_waits_and_keeps_nobody_else(store, created, new_run, journal, caplog):
    run_id, lease, token = created
    other = new_run(1)
    for seq in (1, 2, 3):
        journal.submit(TENANT, run_id, seq, OptimStep())
    header = json.loads(store.redis.hget(keys.journal(TENANT, run_id), 2))
    store.redis.hset(keys.journal(TENANT, run_id), 2, json.dumps(header | {"schema": 9}))
    taken = {piece.run_id: [each.seq_id for each in piece.operations] for piece in journal.take(SLUG, lease)}
    assert taken == {run_id: [1], other: [0]}
    (piece,) = (piece for piece in journal.take(SLUG, lease) if piece.run_id == run_id)
    journal.commit(lease, piece.operations[0], Outcome(result=b"{}"), token=token)
    assert [piece.run_id for piece in journal.take(SLUG, lease)] == [other]
    assert caplog.text.count("operation 2 of run") == 1 and "a journal entry has schema 9" in caplog.text
    store.redis.hset(keys.journal(TENANT, run_id), 2, json.dumps(header))
    taken = {piece.run_id: [each.seq_id for each in piece.operations] for piece in journal.take(SLUG, lease)}
    assert taken[run_id] == [2, 3]


def test_a_promise_and_a_sample_of_a_newer_version_are_refused_by_name(
    store, registry, session_id, journal, futures, new_lease
):
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model="tiny/base", slug=SLUG)
    promise = journal.submit_sample(TENANT, sampler, 0, Sample(adapter_dir="", prompt=(1,), num_samples=1)).request_id
    store.redis.hset(keys.job(TENANT, promise), "schema", 9)
    assert journal.take_samples(SLUG, new_lease("w1", "sampler"), limit=5) == []
    assert "can't be read" in futures.get(TENANT, promise).error
    store.redis.hset(keys.future(TENANT, promise), "schema", 9)
    with pytest.raises(OtherVersion, match="a promise has schema b'9'"):
        futures.get(TENANT, promise)


# Every record there is ---------------------------------------------------------------------------

ROWS = {
    rf"{keys.KEYS}": None, rf"{keys.MODELS}": None, r"openrl:local:workloads": None, r"openrl:local:processes": None,
    r"openrl:t:[^:]+:run:.*:journal": None, r"openrl:t:[^:]+:run:.*:checkpoints": None,
    r"openrl:t:[^:]+:run:[^:]+:train:\d+": b"record", r"openrl:t:[^:]+:session:[^:]+": b"record",
    r"openrl:t:[^:]+:sampler:[^:]+:sample:\d+": b"record",
}  # fmt: skip
"""Hashes of JSON rows: all of their fields, or one of them."""

HASHES = (r"openrl:t:[^:]+:future:.*", r"openrl:t:[^:]+:job:.*")
"""Hashes that are one record each."""

NO_RECORDS = (
    r"openrl:t:[^:]+:session:[^:]+:(runs|samplers)", r"openrl:t:[^:]+:run:.*:bodies", r"openrl:t:[^:]+:sampler:.*:ops",
    r"openrl:depth:.*", r"openrl:served:.*", r"openrl:inflight:.*", r"openrl:worker:.*", keys.SIGNS, keys.MADE_ON,
    keys.KEY_IDS, keys.QUOTAS, r"openrl:published:.*", r"openrl:t:[^:]+:(account|held|quota|usage:\d+)",
)  # fmt: skip
"""Indexes, counters, leases, and bodies, whose entry has the number: the store's own number is theirs."""


def test_every_record_in_the_store_says_its_schema(store, created, registry, session_id, journal, new_lease):
    _fill(store, created, registry, session_id, journal, new_lease)
    seen = set()
    for name in store.redis.scan_iter():
        key = name.decode()
        if store.redis.type(name) == b"stream":
            assert all(b"schema" in row for _, row in store.redis.xrange(name)), key
        if store.redis.type(name) != b"hash" or any(re.fullmatch(rule, key) for rule in NO_RECORDS):
            continue
        content = store.redis.hgetall(name)
        [rule] = [rule for rule in (*ROWS, *HASHES) if re.fullmatch(rule, key)]
        if rule in HASHES:
            assert content[b"schema"].isdigit(), key
        else:
            rows = [content[ROWS[rule]]] if ROWS[rule] else content.values()
            assert all(type(json.loads(row)["schema"]) is int for row in rows), key
        seen.add(rule)
    assert seen == {*ROWS, *HASHES}


def _fill(store, created, registry, session_id, journal, new_lease):
    run_id, lease, token = created
    registry.add_model(MODEL)
    Tenants(store).create_key("ada", "a key")
    audit.record(store, "ada", "key_created", key_id="1")
    workload = Workload(name="w", kind="trainer", base="tiny/base", slug=SLUG, since=1.0)
    LocalCluster(store).apply([Action(verb="start", workload=workload, after=workload, reason="asked for")])
    LocalCluster(store).report({"w": Process(pid=1, generation=0)})
    journal.submit(TENANT, run_id, 1, SaveWeights(name="a"))
    journal.refuse(TENANT, run_id, 2, "optim_step", b"digest", "it makes no sense")
    journal.submit(TENANT, run_id, 4, OptimStep())
    (piece,) = journal.take(SLUG, lease)
    row = checkpoint_row(TENANT, Checkpoint.from_json(CHECKPOINT.to_json(), run_id=run_id))
    journal.commit(lease, piece.operations[0], Outcome(result=b"{}", rows=(row,)), token=token)
    sampler = registry.create_sampler(TENANT, session_id=session_id, seq=0, base_model="tiny/base", slug=SLUG)
    for seq in (0, 1):
        journal.submit_sample(TENANT, sampler, seq, Sample(adapter_dir="", prompt=(1,), num_samples=1))
    drawing = new_lease("w2", "sampler")
    (job,) = journal.take_samples(SLUG, drawing, limit=1)
    journal.commit_sample(drawing, job, Outcome(result=b"{}"))
    assert {type(Run.from_json(store.redis.hget(keys.run(TENANT, run_id), "record"))), type(sampler)} == {Run, Sampler}
