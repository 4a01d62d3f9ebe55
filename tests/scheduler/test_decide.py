"""The scheduler's decision: every case is a value in and a value out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from openrl.scheduler.clusters.local import claim_name
from openrl.scheduler.decide import decide
from openrl.scheduler.resources import (
    Claim,
    Demand,
    Node,
    Policy,
    Pool,
    Process,
    Seen,
    Sign,
    Snapshot,
    Worker,
    Workload,
)

NOW = 10_000.0
TRAINER = Pool(slug="tiny", kind="trainer", base="Org/Tiny")
SAMPLER = Pool(slug="tiny", kind="sampler", base="Org/Tiny")


def workload(pool: Pool = TRAINER, *, accelerator: int | None = None, since: float = NOW - 5000) -> Workload:
    claim = None if accelerator is None else claim_name(accelerator)
    return Workload(name=pool.workload_name, kind=pool.kind, base=pool.base, slug=pool.slug, claim=claim, since=since)


def worker(pool: Pool = TRAINER, *, state: str = "ready", last_busy: float = 0.0, started: float = 0.0) -> Worker:
    return Worker(worker_id="w", kind=pool.kind, slug=pool.slug, state=state, started=started, last_busy=last_busy)


def machine(*, workloads: tuple[Workload, ...] = (), accelerators: int = 0, processes=None) -> Seen:
    """One machine: each accelerator is a claim, and whoever names it has a seat there."""
    claims = tuple(
        Claim(name=name, node="local", fixed=True, seats=tuple(w.seat for w in workloads if w.claim == name))
        for name in map(claim_name, range(accelerators))
    )
    nodes = (Node(name="local"),)
    return Seen(
        nodes=nodes, claims=claims, workloads=workloads, processes=processes or {}, has_claims=bool(accelerators)
    )


def snapshot(*, workloads=(), accelerators: int = 0, processes=None, **fields) -> Snapshot:
    seen = machine(workloads=tuple(workloads), accelerators=accelerators, processes=processes)
    demand = {TRAINER: Demand(), SAMPLER: Demand()}
    return Snapshot(**{"now": NOW, "demand": demand, "seen": seen, "policy": Policy(idle_timeout_s=900), **fields})


def verbs(seen: Snapshot) -> list[tuple[str, str]]:
    return [(action.verb, action.workload.name) for action in decide(seen).actions]


def applied(seen: Snapshot) -> Snapshot:
    workloads = {w.name: w for w in seen.seen.workloads}
    for action in decide(seen).actions:
        workloads.pop(action.name, None)
        if action.after is not None:
            workloads[action.name] = action.after
    return replace(seen, seen=machine(workloads=tuple(workloads.values()), accelerators=len(seen.seen.claims)))


def test_nothing_starts_without_demand():
    assert verbs(snapshot()) == []


def test_demand_starts_one_worker_of_that_pool_alone():
    seen = snapshot(demand={TRAINER: Demand(depth=3, oldest_s=0.5), SAMPLER: Demand()})
    assert verbs(seen) == [("start", "trainer-tiny")]


def test_trainer_and_sampler_start_each_on_their_own_demand():
    seen = snapshot(demand={TRAINER: Demand(depth=1), SAMPLER: Demand(depth=1)})
    assert sorted(verbs(seen)) == [("start", "sampler-tiny"), ("start", "trainer-tiny")]


def test_a_thousand_operations_want_no_second_trainer():
    seen = snapshot(demand={TRAINER: Demand(depth=1000, oldest_s=900)}, workloads=(workload(),), workers=(worker(),))
    assert verbs(seen) == []


def test_deciding_again_after_applying_changes_nothing():
    seen = snapshot(demand={TRAINER: Demand(depth=1), SAMPLER: Demand(depth=2)}, accelerators=2)
    assert verbs(applied(seen)) == []


def test_the_same_snapshot_gives_the_same_decision_whatever_the_order_of_pools():
    pools = {TRAINER: Demand(depth=1, oldest_s=1), SAMPLER: Demand(depth=1, oldest_s=1)}
    turned = dict(reversed(pools.items()))
    assert decide(snapshot(demand=pools, accelerators=2)) == decide(snapshot(demand=turned, accelerators=2))


def test_an_idle_worker_stops_after_the_timeout():
    seen = snapshot(workloads=(workload(),), workers=(worker(last_busy=NOW - 901),))
    assert verbs(seen) == [("stop", "trainer-tiny")]


def test_an_idle_worker_stays_until_the_timeout():
    seen = snapshot(workloads=(workload(),), workers=(worker(last_busy=NOW - 899),))
    assert verbs(seen) == []


@pytest.mark.parametrize("state", ["starting", "busy"])
def test_a_worker_that_is_starting_or_busy_is_not_idle(state):
    seen = snapshot(workloads=(workload(),), workers=(worker(state=state),))
    assert verbs(seen) == []


def test_work_that_waits_keeps_a_worker_that_computed_nothing_for_long():
    seen = snapshot(
        demand={TRAINER: Demand(depth=1, oldest_s=2000)}, workloads=(workload(),), workers=(worker(last_busy=1.0),)
    )
    assert verbs(seen) == []


def test_a_workload_whose_worker_never_came_up_is_kept_for_the_timeout_and_then_let_go():
    assert verbs(snapshot(workloads=(workload(since=NOW - 899),))) == []
    assert verbs(snapshot(workloads=(workload(since=NOW - 901),))) == [("stop", "trainer-tiny")]


def test_a_fresh_worker_counts_its_idle_time_from_its_start():
    seen = snapshot(workloads=(workload(),), workers=(worker(started=NOW - 10),))
    assert verbs(seen) == []


def test_another_pools_worker_keeps_nothing_alive():
    seen = snapshot(workloads=(workload(),), workers=(worker(SAMPLER, state="busy", last_busy=NOW),))
    assert verbs(seen) == [("stop", "trainer-tiny")]


def test_a_workload_of_a_model_that_is_no_longer_served_stops():
    gone = Pool(slug="old", kind="sampler", base="Org/Old")
    seen = snapshot(workloads=(workload(gone),), workers=(worker(gone, state="busy"),))
    assert verbs(seen) == [("stop", "sampler-old")]


def test_new_demand_after_an_idle_stop_starts_it_again():
    idle = snapshot(workloads=(workload(),), workers=(worker(last_busy=NOW - 1000),))
    later = replace(applied(idle), demand={TRAINER: Demand(depth=1)})
    assert verbs(later) == [("start", "trainer-tiny")]


def test_without_accelerators_a_worker_goes_to_the_cpu():
    [action] = decide(snapshot(demand={TRAINER: Demand(depth=1)})).actions
    assert action.workload.accelerator is None


def test_each_worker_gets_the_least_loaded_accelerator():
    seen = snapshot(
        demand={TRAINER: Demand(depth=1), SAMPLER: Demand(depth=1)},
        workloads=(workload(accelerator=0),),
        accelerators=2,
    )
    [action] = decide(seen).actions
    assert (action.workload.name, action.workload.accelerator) == ("sampler-tiny", 1)


def test_workers_started_together_spread_and_then_share():
    pools = {Pool(slug=f"m{i}", kind="trainer", base=f"M{i}"): Demand(depth=1) for i in range(3)}
    placed = [action.workload.accelerator for action in decide(snapshot(demand=pools, accelerators=2)).actions]
    assert placed == [0, 1, 0]


def test_an_accelerator_that_is_let_go_is_free_for_the_start_beside_it():
    idle = workload(accelerator=0)
    kept = workload(Pool(slug="other", kind="trainer", base="Other"), accelerator=1)
    seen = snapshot(
        demand={TRAINER: Demand(), kept.pool: Demand(depth=1), SAMPLER: Demand(depth=1)},
        workloads=(idle, kept),
        workers=(worker(last_busy=NOW - 5000),),
        accelerators=2,
    )
    stop, start = decide(seen).actions
    assert (stop.verb, stop.workload.name) == ("stop", "trainer-tiny")
    assert (start.workload.name, start.workload.accelerator) == ("sampler-tiny", 0)


def test_the_pool_that_waited_longest_chooses_first():
    old, new = Pool(slug="z", kind="trainer", base="Z"), Pool(slug="a", kind="trainer", base="A")
    seen = snapshot(demand={new: Demand(depth=1, oldest_s=1), old: Demand(depth=1, oldest_s=9)}, accelerators=1)
    assert [action.workload.slug for action in decide(seen).actions] == ["z", "a"]


def test_every_action_says_why_in_words():
    seen = snapshot(demand={TRAINER: Demand(depth=2, oldest_s=1.25)}, accelerators=1)
    [start] = decide(seen).actions
    assert start.reason == "2 operations wait, the oldest for 1.2 s, and no worker is there; goes to gpu-0"
    [stop] = decide(snapshot(workloads=(workload(since=NOW - 1000),))).actions
    assert stop.reason == "nothing to do for 1000 s (idle timeout 900 s)"


def test_a_workload_survives_its_json():
    original = workload(accelerator=3)
    assert Workload.from_json(original.to_json()) == original


def hung(*, silent_s: float = 1000.0, process: Process | None = None, **fields) -> Snapshot:
    """A trainer whose process runs, and whose last sign of life is `silent_s` old."""
    name = TRAINER.workload_name
    return snapshot(**{
        "demand": {TRAINER: Demand(depth=1, oldest_s=silent_s), SAMPLER: Demand()},
        "workloads": (workload(),),
        "processes": {name: process or Process(pid=7, generation=0)},
        "signs": {name: Sign(pid=7, at=NOW - silent_s)},
        **fields,
    })  # fmt: skip


def test_a_process_that_lost_its_lease_long_ago_is_replaced():
    assert verbs(hung()) == [("replace", "trainer-tiny")]
    [action] = decide(hung()).actions
    assert action.reason == "process 7 runs and has not renewed its lease for 1000 s: it hangs"


@pytest.mark.parametrize(("lease_s", "silent_s"), [(30.0, 120.0), (4.0, 34.0)])
def test_a_lease_that_ended_a_while_ago_is_given_time_to_be_taken_anew(lease_s, silent_s):
    assert verbs(hung(lease_s=lease_s, silent_s=silent_s - 0.1)) == []
    assert verbs(hung(lease_s=lease_s, silent_s=silent_s + 0.1)) == [("replace", "trainer-tiny")]


def test_a_process_that_is_still_starting_does_not_hang_whatever_its_predecessor_did():
    assert verbs(hung(process=Process(pid=8, generation=0))) == []
    assert verbs(hung(signs={})) == []


def test_a_process_that_is_being_replaced_is_not_replaced_again():
    after = replace(workload(), generation=1)
    assert verbs(hung(workloads=(after,))) == []
    assert verbs(hung(workloads=(after,), process=Process(pid=7, generation=1))) == [("replace", "trainer-tiny")]


def test_a_workload_without_a_process_is_left_to_the_supervisor():
    assert verbs(hung(processes={})) == []


def test_nobody_hangs_because_the_store_or_the_machine_stood_still():
    assert verbs(hung(watched_since=NOW - 100)) == []


def test_what_is_let_go_is_not_replaced():
    idle = {TRAINER: Demand(), SAMPLER: Demand()}
    assert verbs(hung(demand=idle)) == [("stop", "trainer-tiny")]


def test_a_pod_that_lost_its_lease_long_ago_is_replaced_and_one_that_has_given_no_sign_yet_is_not():
    pod = Process(generation=0, started=NOW - 2000)
    [action] = decide(hung(process=pod)).actions
    assert action.reason == "its pod runs and has not renewed its lease for 1000 s: it hangs"
    assert verbs(hung(process=replace(pod, started=NOW - 500))) == [], "the sign is that of the pod before"
    assert verbs(hung(process=replace(pod, phase="pending"))) == []
    assert verbs(hung(process=replace(pod, leaving=True))) == []
