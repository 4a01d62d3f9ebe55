"""Who is let go: workloads whose pool isn't served any more, or that have had nothing to do for long; empty claims."""

from __future__ import annotations

from openrl.scheduler.resources import Action, Pool, Workload
from openrl.scheduler.view import NO_DEMAND, View


def stops(view: View) -> list[Action]:
    """Return the workloads to let go."""
    return [
        Action(verb="stop", workload=workload, reason=reason)
        for workload in view.workloads
        if (reason := _why_not(workload, view))
    ]


def drops(view: View, *, used: set[str]) -> list[Action]:
    """Return the claims without seats to give back, but those that this pass has use for."""
    policy = view.policy
    return [
        Action(verb="drop", claim=claim, reason=f"nobody has a seat there for {view.now - claim.since:.0f} s")
        for claim in sorted(view.seen.claims, key=lambda claim: claim.name)
        if not (claim.fixed or claim.seats or claim.deleting or claim.name in used)
        and view.now - claim.since >= policy.drop_s
    ]


def _why_not(workload: Workload, view: View) -> str:
    """Return why the workload isn't wanted any more, "" if it is."""
    demand = view.demand(workload)
    if demand is None:
        return f"{workload.base} is no longer served"
    if workload.phase == "Stopping":
        return ""
    if workload.phase in ("Pending", "Reserved") and _has_company(workload, view):
        return ""
    if workload.phase == "Pending" and not demand.depth and not workload.placed:
        return "nothing waits for it any more, and it never had a place"
    idle_s = view.idle_s(workload)
    if idle_s < view.policy.idle_timeout_s:
        return ""
    return f"nothing to do for {idle_s:.0f} s (idle timeout {view.policy.idle_timeout_s:g} s)"


def _has_company(workload: Workload, view: View) -> bool:
    """Tell whether the other worker of its full run runs or is asked for: two that only wait keep none of them."""
    other = _other(view.pools[workload.name])
    if other is None:
        return False
    there = any(each.is_to_run for each in view.replicas.get(other, ()))
    return there or view.snapshot.demand.get(other, NO_DEMAND).depth > 0


def _other(pool: Pool) -> Pool | None:
    """Return the other pool of a full run, None for one that serves all."""
    if not pool.is_full:
        return None
    return Pool(slug=pool.slug, base=pool.base, kind="sampler" if pool.kind == "trainer" else "trainer")
