"""Seats by compare-and-swap: a ledger is only ever replaced in the version that was read.

An absent ledger is a tombstone: nobody gets a seat at its claim any more. A seat's assignment id is drawn anew each
time and never used again, so that whoever holds an older one can be told from the present holder.
"""

from __future__ import annotations

import copy
import uuid

from openrl.scheduler.clusters import kube_objects as objects
from openrl.scheduler.clusters.kube_api import CLAIMS, LEDGERS, ApiError, Conflict, KubeApi, Missing, Obj
from openrl.scheduler.clusters.kube_objects import PREFIX
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.resources import Claim, Workload

RETRIES = 5
"""How often an edit is tried where others edit the same ledger: each of them got something done."""


def new_assignment() -> str:
    """Return an id that no seat ever had."""
    return str(uuid.uuid4())


def make(api: KubeApi, claim: Claim, settings: KubeSettings) -> None:
    """Make a ledger and its claim, in this order: without a ledger nobody may sit. What is there already stays.

    Raises:
        Conflict: a claim of this name belongs to another ledger, or is on its way out.
    """
    try:
        ledger = api.create(LEDGERS, objects.ledger_object(claim))
    except Conflict:
        ledger = api.get(LEDGERS, claim.name)
    if "deletionTimestamp" in ledger["metadata"]:
        raise Conflict(f"ledger {claim.name} is being deleted")
    try:
        api.create(CLAIMS, objects.claim_object(claim, ledger, settings))
    except Conflict:
        there = api.get(CLAIMS, claim.name)
        owners = {each["uid"] for each in there["metadata"].get("ownerReferences", ())}
        if "deletionTimestamp" in there["metadata"] or ledger["metadata"]["uid"] not in owners:
            raise Conflict(f"claim {claim.name} is not the one of this ledger") from None


def drop(api: KubeApi, ledger: Obj, claim: Obj | None) -> None:
    """Delete a ledger without seats, in the version that was seen, and then its claim. Raises Conflict."""
    if ledger["spec"].get("seats"):
        raise Conflict(f"ledger {ledger['metadata']['name']} has seats")
    api.delete(LEDGERS, ledger, unchanged=True)
    if claim is not None:
        api.delete(CLAIMS, claim)


def sit(api: KubeApi, workload: Workload, uid: str, name: str, *, mates: frozenset[str]) -> str:
    """Write a provisional seat at a claim; return its assignment id. `mates`: workloads that may sit there already.

    Raises:
        Conflict: the claim is going, somebody else sits there, or a seat of the workload is left over.
        Missing: the claim or its ledger is gone.
    """
    ledger = api.get(LEDGERS, name)
    there = api.get(CLAIMS, name)
    if "deletionTimestamp" in ledger["metadata"] or "deletionTimestamp" in there["metadata"]:
        raise Conflict(f"claim {name} is going")
    sitting = {seat["workload"] for seat in ledger["spec"].get("seats", ())}
    if not sitting <= {objects.object_name(mate) for mate in mates - {workload.name}}:
        raise Conflict(f"claim {name} has other seats than were seen")
    assignment = new_assignment()
    new = copy.deepcopy(ledger)
    new["spec"].setdefault("seats", []).append(objects.seat_object(workload, uid, assignment))
    api.replace(LEDGERS, new)
    return assignment


def rise(api: KubeApi, name: str, assignment: str, *, at: float) -> bool:
    """Take a seat away; tell whether it was there. Only where nothing can make the seat current any more.

    The last one that rises leaves the time behind, so that the claim's idle time can be told.
    """
    for _ in range(RETRIES):
        try:
            ledger = api.get(LEDGERS, name)
        except Missing:
            return False
        seats = ledger["spec"].get("seats", [])
        rest = [seat for seat in seats if seat["assignmentID"] != assignment]
        if len(rest) == len(seats):
            return False
        new = copy.deepcopy(ledger)
        new["spec"]["seats"] = rest
        if not rest:
            new["metadata"].setdefault("annotations", {})[f"{PREFIX}vacant-since"] = repr(at)
        try:
            api.replace(LEDGERS, new)
            return True
        except Conflict:
            continue
    raise ApiError(f"ledger {name} changes faster than a seat can be taken away")


def has_seat(ledger: Obj | None, assignment: str, uid: str) -> bool:
    """Tell whether a ledger has this seat of this workload."""
    seats = ledger["spec"].get("seats", ()) if ledger else ()
    return any((seat["assignmentID"], seat["workloadUID"]) == (assignment, uid) for seat in seats)
