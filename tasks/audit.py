"""The audit log: who did what to a tenant's keys, checkpoints and quotas, and which keys were refused.

One stream a tenant, to which is only added; the oldest entries go when there are too many. An entry holds ids and
numbers, never a key, a token, a link or a body. Knows no HTTP and not what the events mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from openrl.tasks import keys
from openrl.tasks.errors import OpenRLError
from openrl.tasks.schema import AUDIT
from openrl.tasks.store import Store, translated

log = logging.getLogger(__name__)

MOST_ENTRIES = 10_000
"""Kept of each tenant; some more, since they go in blocks."""

MOST_CHARS = 256
"""A longer detail is cut."""

NOTED_S = 3600
"""A refused key is noted once in this time: whoever tries it all the time must not push out the rest."""

KINDS: dict[str, tuple[str, ...]] = {
    "all": ("",),
    "checkpoints": ("checkpoint_",),
    "projects": ("project_", "session_"),
    "teams": ("team_",),
    "organizations": ("key_", "login_", "quota_", "accelerator_"),
}
"""What may be asked for, and how the names of such events begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What happened. `event` is `<thing>_<deed>`; `at` in unix seconds."""

    at: float
    event: str
    details: Mapping[str, str] = field(default_factory=dict)


def record(store: Store, tenant: str, event: str, *, actor: str = "", **details: str | float | None) -> None:
    """Add an entry to a tenant's log. Never raises: what was done is done, whether or not it can be written down.

    `actor`: `key:<id>` of whoever asked, empty for an operator at the command line.
    """
    _add(store, keys.audit(tenant), event, actor=actor or "operator", **details)


def record_refusal(store: Store, tenant: str, reason: str, *, key_id: str = "", address: str = "") -> None:
    """Note a request that was refused for its key: in the tenant's log if the key was once its, else in the service's.

    Only the first of an hour is noted, by key, or by the address that it came from.
    """
    name = f"{reason}:{key_id or address}"
    mark = keys.noted(tenant, name) if tenant else f"{keys.REFUSALS}:{name}"
    try:
        with translated():
            if not store.redis.set(mark, 1, nx=True, ex=NOTED_S):
                return
    except OpenRLError as error:
        log.error("a refused login was not noted: %s", error)
        return
    stream = keys.audit(tenant) if tenant else keys.REFUSALS
    _add(store, stream, "login_refused", reason=reason, key_id=key_id, address=address)


def record_for_service(store: Store, event: str, **details: str | float | None) -> None:
    """Add what an operator did that is no tenant's matter; as little as `record` does it raise."""
    _add(store, keys.REFUSALS, event, actor="operator", **details)


@translated()
def entries(store: Store, tenant: str, *, since: float, before: float, kind: str = "all") -> list[Entry]:
    """Return a tenant's entries of a time, oldest first; of tenant "" the service's, and refusals of nobody's key."""
    stream = keys.audit(tenant) if tenant else keys.REFUSALS
    last = f"({int(before * 1000)}"
    rows = store.redis.xrange(stream, min=str(int(since * 1000)), max=last)
    found = [_entry(ident, row) for ident, row in rows]
    return [entry for entry in found if entry.event.startswith(KINDS[kind])]


def _add(store: Store, stream: str, event: str, **details: str | float | None) -> None:
    texts = {name: str(value)[:MOST_CHARS] for name, value in details.items() if value not in ("", None)}
    try:
        with translated():
            row: dict[str, str] = {**texts, "event": event, "schema": str(AUDIT.number)}
            store.redis.xadd(stream, row, maxlen=MOST_ENTRIES, approximate=True)
    except OpenRLError as error:
        log.error("%s is missing in the audit log: %s", event, error)


def _entry(ident: bytes, row: Mapping[bytes, bytes]) -> Entry:
    texts = {name.decode(): value.decode(errors="replace") for name, value in row.items()}
    AUDIT.check(texts.pop("schema", None))
    return Entry(at=int(ident.split(b"-")[0]) / 1000, event=texts.pop("event"), details=texts)
