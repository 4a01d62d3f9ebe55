"""Where workers go when accelerators, memory and shares are scarce: each case by itself."""

from __future__ import annotations

from dataclasses import replace

from openrl.scheduler.decide import decide
from openrl.scheduler.resources import (
    Action,
    Claim,
    Demand,
    Device,
    Limit,
    Need,
    Node,
    Policy,
    Pool,
    Process,
    Seen,
    Snapshot,
    Worker,
    Workload,
)
from openrl.scheduler.trace import GIB
from openrl.tasks import keys

NOW = 10_000.0
SMALL, LARGE = 24 * GIB, 80 * GIB
POLICY = Policy(strategy="binpack", tiers=(SMALL, LARGE), most_seats=4, drop_s=30.0, idle_timeout_s=900.0)


def pool(name: str, kind: str = "trainer") -> Pool:
    return Pool(slug=name, kind=kind, base=name.upper())


def full(tenant: str, run: str = "run") -> tuple[Pool, Pool]:
    slug = keys.pool_slug("base", tenant, run)
    return tuple(Pool(slug=slug, kind=kind, base="BASE") for kind in ("trainer", "sampler"))


def need(device: int = 10, host: int = 10, **fields) -> Need:
    return Need(device_bytes=device * GIB, host_bytes=host * GIB, **fields)


def seated(of: Pool, claim: str, *, takes: Need | None = None, **fields) -> Workload:
    said = {"since": NOW - 5000, "placed": 1, "need": takes or need(), **fields}
    return Workload(name=of.workload_name, kind=of.kind, base=of.base, slug=of.slug, claim=claim, **said)


def claim(name: str, *workloads: Workload, node: str | None = "n0", size: int = SMALL, **fields) -> Claim:
    return Claim(name=name, node=node, device_bytes=size, seats=tuple(w.seat for w in workloads), **fields)


def busy(workload: Workload) -> Worker:
    return Worker(
        worker_id=workload.name, kind=workload.kind, slug=workload.slug, state="busy", started=0, last_busy=NOW
    )


def idle(workload: Workload, seconds: float) -> Worker:
    return Worker(worker_id=workload.name, kind=workload.kind, slug=workload.slug, state="ready", started=0,
                  last_busy=NOW - seconds)  # fmt: skip


def snapshot(asked: dict[Pool, Need], *, workloads=(), claims=(), devices=(), nodes=None, processes=None, idle_pools=(),
             workers=(), policy: Policy = POLICY, oldest_s: dict[Pool, float] | None = None) -> Snapshot:  # fmt: skip
    seen = Seen(
        nodes=nodes if nodes is not None else (Node(name="n0", host_bytes=100 * GIB),),
        devices=tuple(devices), claims=tuple(claims), workloads=tuple(workloads), has_claims=True, can_claim=True,
        processes=processes or {w.name: Process(generation=w.generation) for w in workloads if w.is_to_run},
    )  # fmt: skip
    waits = oldest_s or {}
    demand = {each: Demand(depth=1, oldest_s=waits.get(each, 5.0)) for each in asked}
    demand |= {each: Demand() for each in idle_pools}
    return Snapshot(now=NOW, demand=demand, seen=seen, needs=asked, workers=tuple(workers), policy=policy)


def said(seen: Snapshot) -> list[tuple[str, str, str | None]]:
    return [(a.verb, a.name, a.after.claim if a.after else None) for a in decide(seen).actions]


def only(seen: Snapshot) -> Action:
    [action] = decide(seen).actions
    return action


def test_a_free_device_is_claimed_by_the_smallest_tier_that_suffices():
    devices = [Device(name="big", node="n0", device_bytes=LARGE), Device(name="little", node="n0", device_bytes=SMALL)]
    made, start = decide(snapshot({pool("a"): need()}, devices=devices)).actions
    assert (made.verb, made.claim.name, made.claim.tiers) == ("claim", "trainer-a-c1", (SMALL, LARGE))
    assert (start.verb, start.after.claim, start.after.phase) == ("start", "trainer-a-c1", "Placing")


def test_packing_joins_a_claim_that_has_seats_and_spreading_takes_the_free_device():
    there = seated(pool("a"), "c")
    fields = {"workloads": [there], "claims": [claim("c", there)], "workers": [busy(there)],
              "devices": [Device(name="d", node="n0", device_bytes=SMALL)]}  # fmt: skip
    asked = {pool("a"): need(), pool("b"): need()}
    assert said(snapshot(asked, **fields)) == [("start", "trainer-b", "c")]
    spread = snapshot(asked, policy=replace(POLICY, strategy="spread"), **fields)
    assert said(spread) == [("claim", "trainer-b-c1", None), ("start", "trainer-b", "trainer-b-c1")]


def test_nobody_joins_a_claim_that_is_not_allocated_or_is_being_deleted():
    there, leaving = seated(pool("a"), "c"), seated(pool("l"), "d")
    claims = [claim("c", there, node=None), claim("d", leaving, deleting=True)]
    decision = decide(snapshot({pool("a"): need(), pool("l"): need(), pool("b"): need()}, workloads=[there, leaving],
                               claims=claims, workers=[busy(leaving)]))  # fmt: skip
    joined = [a for a in decision.actions if a.after and a.after.claim in ("c", "d")]
    assert joined == []
    assert decision.waits["trainer-b"] == "waits until c is allocated, and joins it"


def test_what_is_parked_has_to_fit_the_memory_of_the_node_over_all_its_accelerators():
    there = seated(pool("a"), "c", takes=need(host=60))
    fields = {"workloads": [there], "claims": [claim("c", there), claim("d")], "workers": [busy(there)]}
    ours = {pool("a"): need(host=60)}
    assert said(snapshot(ours | {pool("b"): need(host=40)}, **fields))[0] == ("start", "trainer-b", "c")
    assert ("start", "trainer-b", "c") not in said(snapshot(ours | {pool("b"): need(host=41)}, **fields))


def test_a_device_holds_the_largest_worker_beside_what_parked_ones_leave_there():
    there = seated(pool("a"), "c", takes=need(device=20))
    policy = replace(POLICY, residue_bytes=4 * GIB)
    fields = {"workloads": [there], "claims": [claim("c", there)], "workers": [busy(there)], "policy": policy}
    ours = {pool("a"): need(device=20)}
    assert said(snapshot(ours | {pool("b"): need(device=20)}, **fields)) == [("start", "trainer-b", "c")]
    larger = said(snapshot(ours | {pool("b"): need(device=21)}, **fields))
    assert larger == [("claim", "trainer-b-c1", None), ("start", "trainer-b", "trainer-b-c1")], "20 + 4 is all there is"


def test_an_exclusive_worker_shares_with_nobody():
    there = seated(pool("a"), "c")
    asked = {pool("a"): need(), pool("b"): need(exclusive=True)}
    assert said(snapshot(asked, workloads=[there], claims=[claim("c", there)], workers=[busy(there)])) == [
        ("claim", "trainer-b-c1", None), ("start", "trainer-b", "trainer-b-c1"),
    ]  # fmt: skip
    alone = seated(pool("a"), "c", takes=need(exclusive=True))
    joins = snapshot(asked | {pool("b"): need()}, workloads=[alone], claims=[claim("c", alone)], workers=[busy(alone)])
    assert ("start", "trainer-b", "c") not in said(joins)


def test_a_node_takes_the_kinds_that_its_labels_allow():
    nodes = (Node(name="n0", kinds=frozenset({"sampler"})), Node(name="n1", kinds=frozenset({"trainer"})))
    claims = [claim("c", node="n0", since=NOW), claim("d", node="n1", since=NOW)]
    asked = {pool("a"): need(), pool("a", "sampler"): need()}
    assert said(snapshot(asked, claims=claims, nodes=nodes)) == [
        ("start", "sampler-a", "c"),
        ("start", "trainer-a", "d"),
    ]


def test_unmet_demand_leaves_as_few_standing_claims_as_would_have_room_for_it():
    asked = {pool(f"p{n}"): need() for n in range(6)}
    decision = decide(snapshot(asked))
    claims = [action for action in decision.actions if action.verb == "claim"]
    assert len(claims) == 2, "four seats a claim"
    pending = [action for action in decision.actions if action.verb == "start" and action.after.phase == "Pending"]
    assert len(pending) == 4 and all("is allocated, and joins it" in action.reason for action in pending)


def test_a_full_run_is_placed_together_with_its_sampler_or_not_at_all():
    trainer, sampler = full("ann")
    asked = {trainer: need(20, 40), sampler: need(20, 70)}
    fields = {"claims": [claim("c", since=NOW)], "policy": replace(POLICY, tier_host_bytes=60 * GIB)}
    decision = decide(snapshot(asked, **fields))
    assert not any(a.after and a.after.claim == "c" for a in decision.actions), "110 GiB of 100"
    room = decide(snapshot({trainer: need(20, 40), sampler: need(20, 60)}, **fields))
    assert {a.name: a.after.claim for a in room.actions} == {trainer.workload_name: "c", sampler.workload_name: "c"}


def waits(of: Pool, **fields) -> Workload:
    return replace(seated(of, "", **fields), claim=None, phase="Pending", placed=0)


def test_what_is_let_go_is_given_no_place_in_the_same_decision_nor_is_its_partner():
    trainer, sampler = full("ann")
    devices = [Device(name="d", node="n0", device_bytes=LARGE)]
    there = snapshot({}, workloads=[waits(trainer)], devices=devices, idle_pools=[trainer, sampler])
    assert said(there) == [("stop", trainer.workload_name, None)]


def test_two_of_a_run_that_only_wait_do_not_keep_each_other():
    both = full("ann")
    there = snapshot({}, workloads=[waits(each) for each in both], idle_pools=both,
                     policy=replace(POLICY, limits={"ann": Limit(seats=0)}))  # fmt: skip
    assert sorted(said(there)) == sorted(("stop", each.workload_name, None) for each in both)


def test_who_waits_for_its_partner_is_placed_with_it_once_that_is_asked_for():
    trainer, sampler = full("ann")
    devices = [Device(name="d", node="n0", device_bytes=LARGE)]
    there = snapshot({sampler: need()}, workloads=[waits(trainer)], devices=devices, idle_pools=[trainer])
    assert {(verb, name) for verb, name, at in said(there) if at} == {
        ("place", trainer.workload_name), ("start", sampler.workload_name)
    }  # fmt: skip
    assert "stop" not in {verb for verb, _, _ in said(there)}


def test_the_place_of_a_full_runs_sampler_is_kept_and_it_wakes_with_its_first_sample():
    trainer, sampler = full("ann")
    asked = {trainer: need(20, 40), sampler: need(20, 20)}
    seen = snapshot(asked, claims=[claim("c", since=NOW)])
    seen = replace(seen, demand={trainer: Demand(depth=1), sampler: Demand()})
    phases = {a.name: a.after.phase for a in decide(seen).actions}
    assert phases == {trainer.workload_name: "Placing", sampler.workload_name: "Reserved"}
    there = [a.after for a in decide(seen).actions]
    later = snapshot(asked, workloads=there, claims=[claim("c", *there)], workers=[busy(there[0])])
    woken = only(later)
    assert (woken.verb, woken.name, woken.after.phase) == ("wake", sampler.workload_name, "Placing")
    quiet = replace(later, demand={trainer: Demand(depth=1), sampler: Demand()})
    assert decide(quiet).actions == ()


def test_an_idle_worker_gives_way_to_one_that_waits_and_a_busy_one_does_not():
    resting, working = seated(pool("i"), "c"), seated(pool("w"), "d")
    policy = replace(POLICY, most_seats=1, most_pending=0)
    seen = snapshot({pool("w"): need(), pool("b"): need()}, idle_pools=[pool("i")], workloads=[resting, working],
                    claims=[claim("c", resting), claim("d", working)], workers=[idle(resting, 20), busy(working)],
                    policy=policy)  # fmt: skip
    stopped = [action for action in decide(seen).actions if action.verb == "stop"]
    assert [(a.name, a.reason) for a in stopped] == [
        ("trainer-i", "idle for 20 s, and gives way to trainer-b, which waits")
    ]
    fresh = replace(seen, workers=(idle(resting, 10), busy(working)))
    assert not any(action.verb == "stop" for action in decide(fresh).actions), "ten seconds are no idleness yet"


def test_a_higher_priority_is_served_first_and_never_stops_who_computes():
    asked = {pool("low"): need(), pool("high"): need(priority=5)}
    policy = replace(POLICY, most_seats=1, most_pending=0)
    decision = decide(snapshot(asked, claims=[claim("c", since=NOW)], policy=policy,
                               oldest_s={pool("low"): 100.0, pool("high"): 1.0}))  # fmt: skip
    assert {a.name: a.after.claim for a in decision.actions} == {"trainer-high": "c", "trainer-low": None}


def test_the_tenant_that_has_least_is_served_first_by_its_weight():
    mine = [seated(each, f"c{n}", takes=need(owner="ann")) for n, each in enumerate(full("ann", "one"))]
    asked = {each.pool: each.need for each in mine}
    ann, bob = full("ann", "two"), full("bob")
    asked |= {each: need(owner=tenant) for tenant, pools in (("ann", ann), ("bob", bob)) for each in pools}
    policy = replace(POLICY, most_seats=1, most_pending=0)
    fields = {"workloads": mine, "workers": [busy(each) for each in mine], "oldest_s": dict.fromkeys(ann, 200.0)}
    claims = [*(claim(f"c{n}", each) for n, each in enumerate(mine)), claim("x", since=NOW), claim("y", since=NOW)]
    placed = {a.name for a in decide(snapshot(asked, claims=claims, policy=policy, **fields)).actions if a.after.claim}
    assert placed == {each.workload_name for each in bob}
    heavy = replace(policy, limits={"ann": Limit(weight=1e9)})
    tied = decide(snapshot(asked, claims=claims, policy=heavy, **fields))
    assert {a.name for a in tied.actions if a.after.claim} == {each.workload_name for each in bob}


def test_a_tenant_has_no_more_workers_of_its_own_than_its_limit_and_is_told():
    trainer, sampler = full("ann")
    asked = {trainer: need(owner="ann"), sampler: need(owner="ann")}
    policy = replace(POLICY, limits={"ann": Limit(seats=1)})
    decision = decide(snapshot(asked, claims=[claim("c", since=NOW)], policy=policy))
    assert set(decision.waits.values()) == {"tenant ann has 0 of 1 workers of its own"}
    assert all(action.after.claim is None for action in decision.actions)


def test_who_has_waited_for_long_has_the_next_room_kept_from_those_who_came_later():
    there = seated(pool("a"), "c", takes=need(host=60))
    large, small = pool("large"), pool("small")
    asked = {pool("a"): need(host=60), large: need(host=80), small: need(host=10)}
    fields = {"workloads": [there], "claims": [claim("c", there)], "workers": [busy(there)],
              "policy": replace(POLICY, most_pending=0)}  # fmt: skip
    young = snapshot(asked, oldest_s={large: 100.0}, **fields)
    assert ("start", "trainer-small", "c") in said(young)
    old = snapshot(asked, oldest_s={large: 1000.0}, **fields)
    assert ("start", "trainer-small", None) in said(old)


def test_a_seat_that_is_left_serves_one_that_stands_before_a_claim_which_cannot_be_allocated():
    stands = seated(pool("a"), "new")
    claims = [claim("new", stands, node=None, tiers=(SMALL,), since=NOW), claim("c", since=NOW)]
    unschedulable = {stands.name: Process(generation=0, phase="pending", unschedulable=True)}
    seen = snapshot({pool("a"): need()}, workloads=[stands], claims=claims, processes=unschedulable)
    action = only(seen)
    assert (action.verb, action.reason) == ("release", "new isn't allocated, and c has room now")
    coming = replace(seen, seen=replace(seen.seen, processes={stands.name: Process(generation=0, phase="pending")}))
    assert decide(coming).actions == (), "its pod may be scheduled any moment"


def test_an_idle_worker_moves_back_from_a_larger_tier_once_a_preferred_device_is_free():
    there = seated(pool("a"), "c")
    large = claim("c", there, size=LARGE, tiers=(SMALL, LARGE))
    device = Device(name="d", node="n0", device_bytes=SMALL)
    fields = {"workloads": [there], "claims": [large], "idle_pools": [pool("a")]}
    moved = only(snapshot({}, devices=[device], workers=[idle(there, 200)], **fields))
    assert (moved.verb, moved.after.claim, moved.after.phase) == ("release", None, "Pending")
    assert moved.reason == "idle on a device of 80 GiB, and one of 24 GiB is free"
    assert decide(snapshot({}, devices=[device], workers=[idle(there, 20)], **fields)).actions == ()
    assert decide(snapshot({}, workers=[idle(there, 200)], **fields)).actions == ()


def test_a_worker_whose_node_or_claim_is_gone_is_placed_anew():
    there, other = seated(pool("a"), "c"), seated(pool("b"), "gone")
    seen = snapshot({pool("a"): need(), pool("b"): need()}, workloads=[there, other], nodes=(Node(name="n1"),),
                    claims=[claim("c", there)])  # fmt: skip
    assert [(a.verb, a.name, a.reason) for a in decide(seen).actions] == [
        ("release", "trainer-a", "node n0 is lost"), ("release", "trainer-b", "claim gone is gone"),
    ]  # fmt: skip


def test_an_empty_claim_is_given_back_after_a_while_and_not_while_somebody_takes_it():
    assert said(snapshot({}, claims=[claim("c", since=NOW - 31)])) == [("drop", "c", None)]
    assert said(snapshot({}, claims=[claim("c", since=NOW - 29)])) == []
    assert said(snapshot({pool("a"): need()}, claims=[claim("c", since=NOW - 31)])) == [("start", "trainer-a", "c")]


def test_workers_of_an_older_version_are_replaced_one_by_one_the_idle_ones_first():
    old = [seated(pool(name), "c", version="v1") for name in ("a", "b")]
    fields = {"claims": [claim("c", *old)], "policy": replace(POLICY, version="v2")}
    asked = {pool("a"): need()}
    seen = snapshot(asked, workloads=old, idle_pools=[pool("b")], workers=[busy(old[0]), idle(old[1], 60)], **fields)
    first = only(seen)
    assert (first.verb, first.name, first.after.version, first.after.generation) == ("replace", "trainer-b", "v2", 1)
    between = snapshot(asked, workloads=[old[0], first.after], idle_pools=[pool("b")], workers=[busy(old[0])], **fields)
    assert decide(between).actions == (), "the first isn't at work yet"
    after = replace(between, workers=(busy(old[0]), idle(first.after, 5)))
    assert [(a.verb, a.name) for a in decide(after).actions] == [("replace", "trainer-a")]


def test_samplers_of_a_pool_come_with_its_depth_and_go_when_it_has_less():
    sampler = pool("a", "sampler")
    policy = replace(POLICY, sampler_replicas=3, replica_depth=100)
    seen = snapshot({sampler: need()}, claims=[claim("c", since=NOW)], policy=policy)
    many = replace(seen, demand={sampler: Demand(depth=250)})
    assert [a.name for a in decide(many).actions] == ["sampler-a", "sampler-a-1", "sampler-a-2"]
    there = [a.after for a in decide(many).actions]
    workers = [busy(there[0]), idle(there[1], 1000), idle(there[2], 10)]
    fewer = snapshot({sampler: need()}, workloads=[replace(each, since=0.0) for each in there], workers=workers,
                     claims=[claim("c", *there)], policy=policy)  # fmt: skip
    assert [(a.verb, a.name) for a in decide(fewer).actions] == [("stop", "sampler-a-1")]


def test_what_no_machine_could_ever_take_says_so():
    decision = decide(snapshot({pool("a"): need(device=200)}, claims=[claim("c", since=NOW)]))
    assert decision.waits == {"trainer-a": "trainer-a takes 200 GiB of an accelerator, and the largest tier has 80 GiB"}


def test_names_of_claims_are_names_of_objects_whatever_the_slug():
    odd = [Pool(slug=slug, kind="trainer", base="B") for slug in ("a_b", "a-b", "x" * 90, "x" * 91)]
    names = [
        a.claim.name
        for a in decide(snapshot({each: need(exclusive=True) for each in odd})).actions
        if a.verb == "claim"
    ]
    assert len(set(names)) == 4
    assert all(len(name) <= 63 and set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-") for name in names)


def held_elsewhere(*, stuck_s: float) -> Snapshot:
    """A worker before a claim, unschedulable for so long; devices that look free; an idle worker at another claim."""
    stands, rests = seated(pool("a"), "new"), seated(pool("i"), "c")
    pod = Process(generation=0, phase="pending", unschedulable=True, unschedulable_since=NOW - stuck_s)
    return snapshot(
        {pool("a"): need()}, workloads=[stands, rests], idle_pools=[pool("i")], workers=[idle(rests, 60)],
        claims=[claim("new", stands, node=None, since=NOW - 100), claim("c", rests)],
        devices=[Device(name=name, node="n0", device_bytes=SMALL) for name in "de"],
        processes={stands.name: pod, rests.name: Process(generation=0)}, policy=replace(POLICY, most_seats=1),
    )  # fmt: skip


def test_a_claim_that_the_cluster_finds_no_device_for_is_not_matched_to_one_that_looks_free():
    assert decide(held_elsewhere(stuck_s=5)).actions == (), "it may be allocated any moment"
    decision = decide(held_elsewhere(stuck_s=60))
    assert decision.waits == {"trainer-a": "new can't be allocated yet: no device is free for it"}
    assert ("stop", "trainer-i") in [(action.verb, action.name) for action in decision.actions]
    seen = replace(held_elsewhere(stuck_s=60), policy=replace(POLICY, most_seats=2))
    [moved] = [action for action in decide(seen).actions if action.verb == "release"]
    assert (moved.name, moved.reason) == ("trainer-a", "new isn't allocated, and c has room now")
    rests = next(each for each in seen.seen.workloads if each.name == "trainer-i")
    spreading = replace(POLICY, strategy="spread")
    fields = {"idle_pools": [rests.pool], "workloads": [moved.after, rests], "claims": [claim("c", rests)],
              "workers": [busy(rests)], "devices": seen.seen.devices, "policy": spreading}  # fmt: skip
    assert said(snapshot({pool("a"): need()}, **fields)) == [("place", "trainer-a", "c")], "not to that device again"


def test_a_worker_that_its_node_has_no_room_for_after_all_goes_to_another_and_not_back():
    there = seated(pool("a"), "c")
    pod = Process(generation=0, phase="pending", unschedulable=True, unschedulable_since=NOW - 60)
    nodes = (Node(name="n0", host_bytes=100 * GIB), Node(name="n1", host_bytes=100 * GIB))
    asked = {pool("a"): need()}
    seen = snapshot(asked, workloads=[there], claims=[claim("c", there)], nodes=nodes, processes={there.name: pod})
    moved = only(seen)
    assert (moved.verb, moved.after.claim, moved.after.avoids) == ("release", None, "n0")
    assert moved.reason == "node n0, where c lies, has no room for its pod"
    young = replace(pod, unschedulable_since=NOW - 5)
    assert decide(replace(seen, seen=replace(seen.seen, processes={there.name: young}))).actions == ()
    claims = [claim("c", since=NOW), claim("d", node="n1", since=NOW)]
    after = snapshot(asked, workloads=[moved.after], claims=claims, nodes=nodes)
    assert said(after) == [("place", "trainer-a", "d")]
    later = replace(moved.after, since=NOW - POLICY.avoid_s)
    assert said(snapshot(asked, workloads=[later], claims=claims, nodes=nodes)) == [("place", "trainer-a", "c")]


def test_a_cordoned_node_keeps_its_workers_and_takes_no_others():
    there = seated(pool("a"), "c")
    nodes = (Node(name="n0", host_bytes=100 * GIB, takes_new=False),)
    asked = {pool("a"): need(), pool("b"): need()}
    seen = snapshot(asked, workloads=[there], claims=[claim("c", there)], workers=[busy(there)], nodes=nodes,
                    devices=[Device(name="d", node="n0", device_bytes=SMALL)])  # fmt: skip
    assert said(seen) == [("claim", "trainer-b-c1", None), ("start", "trainer-b", "trainer-b-c1")]
    [standing] = [action.after for action in decide(seen).actions if action.after]
    assert standing.reason.endswith("trainer-b-c1, which has to be allocated"), "the device of that node isn't taken"


def test_one_that_stands_before_a_claim_holds_up_no_upgrade():
    old = seated(pool("a"), "c", version="v1")
    stands = seated(pool("b"), "new", version="v2", takes=need(70))
    pods = {old.name: Process(generation=0), stands.name: Process(generation=0, phase="pending", unschedulable=True)}
    claims = [claim("c", old), claim("new", stands, node=None, size=LARGE)]
    seen = snapshot({pool("a"): need(), pool("b"): need(70)}, workloads=[old, stands], claims=claims, processes=pods,
                    workers=[busy(old)], policy=replace(POLICY, version="v2"))  # fmt: skip
    assert [a.name for a in decide(seen).actions if a.verb == "replace"] == ["trainer-a"]
    starting = pods | {stands.name: Process(generation=0, phase="pending")}
    assert decide(replace(seen, seen=replace(seen.seen, processes=starting))).actions == (), "that one is on its way"


def on_one_machine(asked: dict[Pool, Need], *workloads: Workload, devices: int = 1, host: int = 64) -> Snapshot:
    claims = [claim(f"gpu-{n}", *(w for w in workloads if w.claim == f"gpu-{n}"), fixed=True) for n in range(devices)]
    seen = snapshot(asked, workloads=workloads, claims=claims, workers=[busy(each) for each in workloads],
                    nodes=(Node(name="n0", host_bytes=host * GIB),))  # fmt: skip
    return replace(seen, seen=replace(seen.seen, can_claim=False))


def test_on_one_machine_who_would_be_alone_starts_whatever_its_size_and_sizes_bind_who_shares():
    huge, other = need(200, 900), need(10, 50)
    assert said(on_one_machine({pool("a"): huge})) == [("start", "trainer-a", "gpu-0")]
    for strategy in ("spread", "binpack"):
        there = seated(pool("a"), "gpu-0", takes=huge)
        asked = {pool("a"): huge, pool("b"): other}
        seen = on_one_machine(asked, there, devices=2)
        seen = replace(seen, policy=replace(POLICY, strategy=strategy))
        assert said(seen) == [("start", "trainer-b", "gpu-1")]
    assert said(on_one_machine(asked, there)) == [("start", "trainer-b", None)], "beside it there is no room"


def test_on_one_machine_only_who_shares_an_accelerator_parks():
    there = [seated(pool(name), f"gpu-{n}", takes=need(10, 60)) for n, name in enumerate("ab")]
    asked = {each.pool: each.need for each in there} | {pool("c"): need(10, 4)}
    assert said(on_one_machine(asked, *there, devices=2, host=64)) == [("start", "trainer-c", "gpu-0")], "60 and 4"
    assert said(on_one_machine(asked, *there, devices=2, host=63)) == [("start", "trainer-c", None)]
