from __future__ import annotations

import pytest

from openrl.tasks import keys
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
    assert tenants.look_up(secret) == ("team-a", True)
    assert tenants.look_up("") == (None, True)
