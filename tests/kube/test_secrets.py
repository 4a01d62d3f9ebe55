"""The Secrets of an installation, on the emulated API server: made once, whatever breaks in between."""

from __future__ import annotations

import base64

import pytest

from openrl.scheduler.clusters import secrets
from openrl.scheduler.clusters.kube_api import ApiError, KubeApi
from openrl.tasks.store import Store
from openrl.tasks.tenants import SCOPES, Tenants
from tests.kube.machines import NAMESPACE, Machines
from tests.kube.objects import Kind
from tests.kube.server import Fault, Request

NAME = "openrl-admin-key"


@pytest.fixture
def cluster(machines: Machines) -> Machines:
    kind = Kind(group="", version="v1", plural="secrets", name="Secret", has_status=False)
    machines.objects.kinds[kind.group, kind.plural] = kind
    return machines


def kept(api: KubeApi, name: str, key: str) -> str:
    return base64.b64decode(api.get(secrets.SECRETS, name)["data"][key]).decode()


def test_passwords_are_made_once_and_left_alone(cluster: Machines, api: KubeApi):
    assert secrets.ensure(api, "openrl-redis", lambda: secrets.store_password("openrl-redis:6379"))
    password = kept(api, "openrl-redis", "password")
    assert len(password) == 64
    assert kept(api, "openrl-redis", "url") == f"redis://:{password}@openrl-redis:6379/0"
    assert not secrets.ensure(api, "openrl-redis", lambda: secrets.store_password("other:1"))
    assert kept(api, "openrl-redis", "password") == password
    assert api.get(secrets.SECRETS, "openrl-redis")["metadata"]["namespace"] == NAMESPACE
    assert [call.method for call in cluster.server.writes] == ["POST"]


def test_the_admins_key_may_do_everything_and_is_made_once(cluster: Machines, api: KubeApi, store: Store):
    tenants = Tenants(store)
    assert secrets.ensure_admin_key(api, tenants, NAME)
    found = tenants.look_up(kept(api, NAME, "key"))[0]
    assert found is not None and (found.tenant, found.scopes) == ("admin", tuple(SCOPES))
    assert not secrets.ensure_admin_key(api, tenants, NAME)
    assert len(tenants.list_keys()) == 1


def test_a_rotated_key_of_the_admin_is_not_taken_for_one_that_was_lost(cluster: Machines, api: KubeApi, store: Store):
    tenants = Tenants(store)
    secrets.ensure_admin_key(api, tenants, NAME)
    [first] = tenants.list_keys()
    tenants.rotate_key(first.key_id, grace_s=0)
    secrets.ensure_admin_key(api, tenants, NAME)
    assert len(tenants.list_keys()) == 2


@pytest.mark.parametrize("fault", [Fault("cut"), Fault("error", 500), Fault("lost")])
def test_a_key_that_could_not_be_kept_is_revoked_by_the_next_run(
    cluster: Machines, api: KubeApi, store: Store, fault: Fault
):
    tenants = Tenants(store)

    def breaks(request: Request) -> Fault | None:
        return fault if request.method == "POST" else None

    with cluster.server.failing(breaks), pytest.raises(ApiError):
        secrets.ensure_admin_key(api, tenants, NAME)
    secrets.ensure_admin_key(api, tenants, NAME)
    [only] = tenants.list_keys()
    assert tenants.look_up(kept(api, NAME, "key"))[0] == only


def test_of_two_runs_at_once_one_key_stays(cluster: Machines, api: KubeApi, store: Store):
    tenants = Tenants(store)

    def other_first(request: Request) -> Fault | None:
        if request.method == "POST":
            cluster.server.fault = lambda _: None
            assert secrets.ensure_admin_key(api, Tenants(store), NAME)
        return None

    with cluster.server.failing(other_first):
        secrets.ensure_admin_key(api, tenants, NAME)
    key = tenants.look_up(kept(api, NAME, "key"))[0]
    assert [key] == tenants.list_keys()
