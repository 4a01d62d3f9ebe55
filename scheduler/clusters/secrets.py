"""The Secrets that an installation needs, each made once: a password for the store, one for Flower, an admin's key.

Made in the cluster itself, so that none is ever in a file, a manifest or a log. What is there already is left alone,
whoever made it: `get` and `create` are all the rights that this takes.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable, Mapping

from openrl.scheduler.clusters.kube_api import Conflict, Kind, KubeApi, Missing
from openrl.tasks.tenants import SCOPES, Tenants

SECRETS = Kind(group="", version="v1", plural="secrets", name="Secret")

ADMIN_TENANT = "admin"
ADMIN_NOTE = "made at install"

LABELS = {"app.kubernetes.io/part-of": "openrl", "app.kubernetes.io/managed-by": "openrl-install"}


def ensure(api: KubeApi, name: str, make: Callable[[], Mapping[str, str]]) -> bool:
    """Make the Secret unless it is there; tell whether it was made now.

    Raises:
        ApiError: we may not, or the API server doesn't answer.
    """
    return not _exists(api, name) and _create(api, name, make())


def store_password(host: str) -> dict[str, str]:
    """Return a new password, and the address of the store at `host` (HOST:PORT) with it."""
    password = secrets.token_hex(32)
    return {"password": password, "url": f"redis://:{password}@{host}/0"}


def flower_login() -> dict[str, str]:
    """Return a new login for Flower, as its option --basic-auth takes it."""
    return {"basic-auth": f"openrl:{secrets.token_urlsafe(24)}"}


def ensure_admin_key(api: KubeApi, tenants: Tenants, name: str) -> bool:
    """Make a key that may do everything as the tenant `admin`, and keep it as the Secret `name`; once.

    Earlier ones that a run has made and could not keep are revoked: nobody knows them.

    Raises:
        ApiError: as `ensure`; the next run puts it right.
    """
    made = not _exists(api, name) and _make_admin_key(api, tenants, name)
    kept = tenants.look_up(base64.b64decode(api.get(SECRETS, name)["data"].get("key", "")).decode())[0]
    if kept is not None:
        # A later one is the kept one's successor, which has its note too.
        for key in tenants.list_keys():
            if (key.tenant, key.note) == (ADMIN_TENANT, ADMIN_NOTE) and key.created < kept.created:
                tenants.revoke_key(key.key_id)
    return made


def _make_admin_key(api: KubeApi, tenants: Tenants, name: str) -> bool:
    secret = tenants.create_key(ADMIN_TENANT, name, note=ADMIN_NOTE, scopes=tuple(SCOPES))
    if _create(api, name, {"key": secret}):
        return True
    # Another run was first: its key is the one that is kept, and ours must not stay behind.
    ours = tenants.look_up(secret)[0]
    if ours is not None:
        tenants.revoke_key(ours.key_id)
    return False


def _exists(api: KubeApi, name: str) -> bool:
    try:
        api.get(SECRETS, name)
    except Missing:
        return False
    return True


def _create(api: KubeApi, name: str, data: Mapping[str, str]) -> bool:
    """Make a Secret; False where somebody was first."""
    encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
    meta = {"name": name, "namespace": api.namespace, "labels": LABELS}
    try:
        api.create(SECRETS, {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "data": encoded})
    except Conflict:
        return False
    return True
