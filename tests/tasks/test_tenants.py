from __future__ import annotations

import hashlib
import json
import time

import pytest

from openrl.tasks import audit, keys, upgrade
from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.tasks.tenants import Tenants


@pytest.fixture
def tenants(store):
    return Tenants(store)


def test_a_key_names_its_tenant_and_only_its_hash_is_stored(tenants, store):
    secret = tenants.create_key("team-a", "laptop")
    assert secret.startswith("tml-")
    assert len(secret) >= 46
    assert tenants.tenant_of(secret) == "team-a"
    assert secret[4:] not in repr(store.redis.hgetall(keys.KEYS))
    (shown,) = tenants.list_keys()
    assert (shown.tenant, shown.name) == ("team-a", "laptop")


@pytest.mark.parametrize("wrong", ["", "tml-", "tml-nonsense", "\udcff"])
def test_any_other_secret_names_nobody(tenants, wrong):
    tenants.create_key("team-a")
    assert tenants.tenant_of(wrong) is None


def test_a_revoked_key_is_invalid_at_once_and_the_others_stay(tenants):
    first, second = tenants.create_key("a"), tenants.create_key("a")
    (key_id,) = [key.key_id for key in tenants.list_keys() if key.key_id != tenants.list_keys()[1].key_id]
    tenants.revoke_key(key_id)
    assert [tenants.tenant_of(first), tenants.tenant_of(second)].count(None) == 1
    with pytest.raises(NotFound):
        tenants.revoke_key(key_id)


def test_revoking_the_last_key_does_not_open_the_service(tenants):
    assert not tenants.any_keys()
    tenants.create_key("a")
    assert tenants.any_keys()
    tenants.revoke_key(tenants.list_keys()[0].key_id)
    assert tenants.list_keys() == []
    assert tenants.any_keys()


def test_a_tenant_needs_a_possible_name(tenants):
    with pytest.raises(InvalidRequest):
        tenants.create_key("Team A")
    assert not tenants.any_keys()


def test_one_look_tells_whose_key_it_is_and_whether_there_are_any(tenants):
    assert tenants.look_up("tml-unknown") == (None, False)
    secret = tenants.create_key("team-a")
    key, secured = tenants.look_up(secret)
    assert (key.tenant, secured) == ("team-a", True)
    assert tenants.look_up("") == (None, True)


def test_a_key_may_read_train_and_sample_unless_told_otherwise(tenants):
    tenants.create_key("a")
    tenants.create_key("a", scopes=["sample", "admin", "sample"])
    assert sorted(key.scopes for key in tenants.list_keys()) == [("read", "train", "sample"), ("sample", "admin")]


@pytest.mark.parametrize(
    "wrong",
    [{"scopes": ["root"]}, {"scopes": []}, {"expires": 1.0}, {"expires": 1e300}, {"name": "x\n"}, {"note": "n" * 300}],
)
def test_a_key_that_makes_no_sense_is_not_made(tenants, wrong):
    with pytest.raises(InvalidRequest):
        tenants.create_key("a", **wrong)
    assert tenants.list_keys() == [] and not tenants.any_keys()


def test_a_key_of_the_first_version_keeps_working_and_can_be_found_by_its_id(tenants, store):
    secret = tenants.create_key("a")
    ((digest, _),) = store.redis.hgetall(keys.KEYS).items()
    old = {"schema": 1, "key_id": "0123456789ab", "tenant": "a", "name": "old", "created": 1.0}
    store.redis.hset(keys.KEYS, digest, json.dumps(old))
    store.redis.delete(keys.KEY_IDS, keys.SCHEMA)
    upgrade.upgrade(store, alone=True)
    key, _ = tenants.look_up(secret)
    assert (key.scopes, key.expires, key.expired) == (("read", "train", "sample"), None, False)
    assert tenants.by_id("0123456789ab") == key and key.number == 0x0123456789AB
    tenants.revoke_key("0123456789ab")
    assert tenants.look_up(secret)[0] is None and tenants.by_id("0123456789ab") is None


def test_a_rotated_key_is_like_the_old_one_which_ends_after_its_grace(tenants):
    old = tenants.create_key("a", "laptop", note="n", scopes=["admin"], expires=time.time() + 1000)
    before = tenants.list_keys()[0]
    new, key = tenants.rotate_key(before.key_id, grace_s=60)
    assert (key.tenant, key.name, key.note, key.scopes) == ("a", "laptop", "n", ("admin",))
    assert key.key_id != before.key_id and 990 < key.expires - time.time() <= 1000
    assert tenants.tenant_of(old) == tenants.tenant_of(new) == "a"
    assert 50 < tenants.by_id(before.key_id).expires - time.time() <= 60
    tenants.rotate_key(key.key_id, grace_s=0)
    assert tenants.tenant_of(new) is None and tenants.look_up(new)[0].expired


def test_a_key_that_is_revoked_while_it_is_rotated_does_not_come_back(tenants):
    secret = tenants.create_key("a")
    key_id = tenants.list_keys()[0].key_id

    class Revoked(Tenants):
        def _find(self, key_id):
            found = super()._find(key_id)
            tenants.revoke_key(key_id)  # in the moment after this one has read it
            return found

    with pytest.raises(NotFound):
        Revoked(tenants._store).rotate_key(key_id, grace_s=60)
    assert tenants.tenant_of(secret) is None and tenants.list_keys() == []


def test_what_is_done_with_keys_is_in_the_audit_and_no_secret_is(tenants, store):
    secret = tenants.create_key("a", "laptop")
    key_id = tenants.list_keys()[0].key_id
    other, key = tenants.rotate_key(key_id, grace_s=5)
    tenants.revoke_key(key.key_id, actor="key:x")
    found = audit.entries(store, "a", since=0, before=time.time() + 1)
    assert [entry.event for entry in found] == ["key_created", "key_rotated", "key_revoked"]
    assert found[0].details["scopes"] == "read,train,sample" and found[2].details["actor"] == "key:x"
    for one in (secret, other):
        assert one[4:] not in repr(found) and hashlib.sha256(one.encode()).hexdigest() not in repr(found)
