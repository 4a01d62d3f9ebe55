"""Why a worker is where it is, or why it waits: what `openrl workloads` and `openrl explain` say.

Takes a snapshot and what would be decided on it now; changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from openrl.scheduler.decide import decide
from openrl.scheduler.needs import Needs
from openrl.scheduler.resources import Claim, Demand, Need, Pool, Process, Snapshot, Workload
from openrl.scheduler.sizes import in_words
from openrl.scheduler.view import NO_NEED
from openrl.tasks.errors import NotFound, shown
from openrl.tasks.registry import BaseModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker, in words and numbers. `claim` and `node` are "" where it has none."""

    name: str
    kind: str
    pool: str
    base: str
    phase: str
    claim: str
    node: str
    owner: str
    priority: int
    waiting: int
    oldest_s: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """All that can be said about one worker. `beside`: the others at its claim. `next`: what would be done now."""

    row: Row
    size: str
    device_bytes: int
    host_bytes: int
    beside: tuple[str, ...]
    place: str
    next: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return it as one flat object."""
        content = asdict(self)
        return {**content.pop("row"), **content}


def rows(snapshot: Snapshot) -> list[Row]:
    """Return every worker that there is, by name."""
    claims = {claim.name: claim for claim in snapshot.seen.claims}
    waits = decide(snapshot).waits
    return [_row(workload, snapshot, claims, waits) for workload in _by_name(snapshot.seen.workloads)]


def explain(
    name: str, snapshot: Snapshot, models: Sequence[BaseModel], needs: Needs, owners: Mapping[str, str]
) -> Explanation:
    """Explain one worker, also one that isn't there: what its pool would get.

    `owners`: the tenant of each pool of a full run.

    Raises:
        NotFound: no pool has a worker of this name.
    """
    workload = next((each for each in snapshot.seen.workloads if each.name == name), None)
    pool = workload.pool if workload else _pool(name, snapshot)
    claims = {claim.name: claim for claim in snapshot.seen.claims}
    decision = decide(snapshot)
    claim = claims.get(workload.claim) if workload and workload.claim else None
    model = next((each for each in models if each.name == pool.base), None)
    size = (
        needs.size(pool, model, on_bytes=claim.device_bytes if claim else 0) if model else f"{pool.base} isn't served"
    )
    seated = workload or _absent(name, pool, snapshot, needs.of([pool], models, owners).get(pool, NO_NEED))
    return Explanation(
        row=_row(seated, snapshot, claims, decision.waits),
        size=size if isinstance(size, str) else size.words,
        device_bytes=0 if isinstance(size, str) else size.device_bytes,
        host_bytes=0 if isinstance(size, str) else size.host_bytes,
        beside=tuple(seat.workload for seat in claim.seats if seat.workload != name) if claim else (),
        place=_place(claim, snapshot),
        next=tuple(f"{each.verb}: {each.reason}" for each in decision.actions if each.name == name),
    )


def _row(workload: Workload, snapshot: Snapshot, claims: Mapping[str, Claim], waits: Mapping[str, str]) -> Row:
    demand = snapshot.demand.get(workload.pool, Demand())
    claim = claims.get(workload.claim) if workload.claim else None
    return Row(
        name=workload.name,
        kind=workload.kind,
        pool=workload.slug,
        base=workload.base,
        phase=_phase(workload, snapshot.seen.processes.get(workload.name)),
        claim=workload.claim or "",
        node=(claim.node if claim else None) or "",
        owner=workload.need.owner,
        priority=workload.need.priority,
        waiting=demand.depth,
        oldest_s=round(demand.oldest_s, 1),
        reason=waits.get(workload.name) or workload.reason,
    )


def _phase(workload: Workload, process: Process | None) -> str:
    runs = process is not None and process.phase == "running" and process.generation == workload.generation
    return "Running" if workload.phase == "Placing" and runs else workload.phase


def _place(claim: Claim | None, snapshot: Snapshot) -> str:
    """Say what its accelerator and its node have, and how much of that is taken."""
    if claim is None:
        return "no accelerator" if snapshot.seen.has_claims else "the CPU, which all workers share"
    if claim.node is None:
        return f"{claim.name}, which isn't allocated: no node has a free accelerator of {in_words(claim.device_bytes)}"
    host = sum(seat.host_bytes for each in snapshot.seen.claims if each.node == claim.node for seat in each.seats)
    node = next((each for each in snapshot.seen.nodes if each.name == claim.node), None)
    size = in_words(claim.device_bytes) if claim.device_bytes else "a size that isn't known"
    of = f" of {in_words(node.host_bytes)}" if node and node.host_bytes else ""
    turns = "has it alone" if len(claim.seats) == 1 else f"{len(claim.seats)} workers take turns"
    return f"{claim.name} on {claim.node}, {size}; {turns}; {in_words(host)}{of} of the node's memory are taken"


def _absent(name: str, pool: Pool, snapshot: Snapshot, need: Need) -> Workload:
    asked = snapshot.demand[pool].depth
    reason = "it is about to be started" if asked else "nothing waits for it; it starts with the first operation"
    return Workload(
        name=name, kind=pool.kind, base=pool.base, slug=pool.slug, since=snapshot.now, phase="Pending", need=need,
        reason=reason,
    )  # fmt: skip


def _pool(name: str, snapshot: Snapshot) -> Pool:
    for pool in snapshot.demand:
        if pool.workload_name == name:
            return pool
    known = ", ".join(sorted(pool.workload_name for pool in snapshot.demand)) or "none"
    raise NotFound(f"no workload {shown(name)}; those that there can be: {known}")


def _by_name(workloads: Sequence[Workload]) -> list[Workload]:
    return sorted(workloads, key=lambda workload: workload.name)
