"""Revoking an operation's task cancels the operation: `celery control revoke ID`, and so in Flower.

Celery alone would drop the doorbell, which decides nothing. Terminating is the same as revoking here: what a worker
carries out is finished. Every process that listens does this, and the second finds it done. Knows no engine.
"""

from __future__ import annotations

from typing import Any

from celery.utils.functional import maybe_list
from celery.worker.control import Panel
from celery.worker.control import revoke as flag_as_revoked

from openrl.tasks import keys
from openrl.tasks.cancelling import BY_OPERATOR, Answer, Cancelling
from openrl.tasks.errors import OpenRLError
from openrl.tasks.store import Store

_SAID: dict[Answer, str] = {
    "cancelled": "is cancelled",
    "asked": "is cancelled as soon as its trainer looks, unless it has begun",
    "finished": "has ended",
}

_work: Cancelling | None = None


def listen(store: Store) -> None:
    """Let this process's Celery worker cancel what is revoked."""
    global _work
    _work = Cancelling(store)


@Panel.register(name="revoke", type="control", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(state: Any, task_id: str | list[str], **_: Any) -> dict[str, str]:
    """Cancel operations by their request ids, which are the ids of their tasks; `terminate` makes no difference."""
    ids = [str(each) for each in maybe_list(task_id) or []]
    flag_as_revoked(state, ids)
    return {"ok": "; ".join(map(_cancel, ids))}


def _cancel(request_id: str) -> str:
    if _work is None:
        return f"{request_id} is flagged as revoked"
    try:
        tenant = _work.owner_of(keys.parse_request(request_id).parent)
        return f"{request_id} {_SAID[_work.cancel(tenant, request_id, BY_OPERATOR)]}"
    except OpenRLError as refusal:
        return str(refusal)
