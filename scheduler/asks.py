"""Who asks for a place, and in which order: what has to be placed together is one ask.

First by priority. Among equals the tenant who has least beside its weight comes first, counted anew after each place
that is given (deficit round-robin, Shreedhar and Varghese 1996, with seats for bytes); what belongs to nobody alone
serves all and costs nobody. Then whoever has waited longest, then the larger.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace

from openrl.scheduler.resources import KINDS, Action, Demand, Kind, Limit, Need, Pool, Workload
from openrl.scheduler.view import NO_DEMAND, View

NO_LIMIT = Limit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker to place. `workload`: as it is seen, None where it isn't there yet. `asked`: somebody waits for it.

    `avoids`: where it is not to be placed, as a workload has it.
    """

    pool: Pool
    name: str
    need: Need
    workload: Workload | None
    asked: bool
    avoids: str = ""

    @property
    def kind(self) -> Kind:
        """Return what it is."""
        return self.pool.kind

    def fresh(self, view: View, reason: str) -> Workload:
        """Return it as a workload that isn't there yet and has no place."""
        pool = self.pool
        return Workload(
            name=self.name, kind=pool.kind, base=pool.base, slug=pool.slug, since=view.now, need=self.need,
            version=view.policy.version, reason=reason,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Workers to place together or not at all. `waited_s`: the longest wait of an operation for one of them.

    `standing`: the claim that they have seats at already, and that isn't allocated.
    """

    members: tuple[Member, ...]
    waited_s: float
    depth: int
    standing: str = ""

    @property
    def owner(self) -> str:
        """Return the tenant who has them to himself, or ""."""
        return self.members[0].need.owner

    @property
    def priority(self) -> int:
        """Return the highest of their priorities."""
        return max(member.need.priority for member in self.members)

    @property
    def size(self) -> tuple[int, int]:
        """Return what they take together: bytes of host memory, and of device."""
        hosts = sum(member.need.host_bytes for member in self.members)
        return hosts, sum(member.need.device_bytes for member in self.members)

    @property
    def in_words(self) -> str:
        """Say what waits for them."""
        return waiting(self.depth, self.waited_s)

    @property
    def name(self) -> str:
        """Return the first worker's name."""
        return self.members[0].name


class Queue:
    """Asks, the next one first. `given` must be told of each that was served."""

    def __init__(self, asks: list[Ask], view: View) -> None:
        self._limits = view.policy.limits
        self._seats = seats_of_owners(view)
        self._asks: dict[int, dict[str, list[Ask]]] = defaultdict(lambda: defaultdict(list))
        for ask in sorted(asks, key=_by_wait, reverse=True):
            self._asks[ask.priority][ask.owner].append(ask)

    def __iter__(self) -> Iterator[Ask]:
        """Yield each ask once."""
        for priority in sorted(self._asks, reverse=True):
            waiting = self._asks[priority]
            heap = [self._entry(owner, waiting[owner][-1]) for owner in sorted(waiting)]
            heapq.heapify(heap)
            while heap:
                owner = heapq.heappop(heap)[-1]
                yield waiting[owner].pop()
                if waiting[owner]:
                    heapq.heappush(heap, self._entry(owner, waiting[owner][-1]))

    def given(self, ask: Ask) -> None:
        """Note that it was served."""
        self._seats[ask.owner] += 0 if ask.standing else len(ask.members)

    def beyond_limit(self, ask: Ask) -> str:
        """Return why its tenant may not have it, "" if he may."""
        limit = self._limits.get(ask.owner, NO_LIMIT).seats
        if ask.standing or not ask.owner or limit is None or self._seats[ask.owner] + len(ask.members) <= limit:
            return ""
        return f"tenant {ask.owner} has {self._seats[ask.owner]} of {limit} workers of its own"

    def _entry(self, owner: str, ask: Ask) -> tuple[float, tuple[object, ...], str]:
        weight = self._limits.get(owner, NO_LIMIT).weight
        return (self._seats[owner] / weight if owner else 0.0), _by_wait(ask), owner


def waiting(depth: int, oldest_s: float) -> str:
    """Say how many operations wait, and for how long."""
    return f"{'1 operation waits' if depth == 1 else f'{depth} operations wait'}, the oldest for {oldest_s:.1f} s"


def asks(view: View, *, leaving: Container[str] = ()) -> list[Ask]:
    """Return what has to be placed now, but the workloads that are `leaving`."""
    members: dict[str, list[tuple[Member, Demand]]] = defaultdict(list)
    for pool, demand in view.snapshot.demand.items():
        for member in _members(pool, demand, view, leaving):
            members[pool.slug if pool.is_full else member.name].append((member, demand))
    found = [_ask(group) for group in members.values() if any(member.asked or member.workload for member, _ in group)]
    return sorted(found, key=lambda ask: ask.name)


def standing_asks(view: View, unspoken: Iterable[str], *, leaving: Container[str] = ()) -> list[Ask]:
    """Return those who have seats at pending claims for which no device is free; a place elsewhere would do too.

    Not where one of them is `leaving`: the claim is seen anew once it is gone.
    """
    wanted = set(unspoken)
    groups: dict[str, list[Workload]] = defaultdict(list)
    for workload in view.workloads:
        if workload.claim in wanted and view.demand(workload) is not None:
            groups[workload.claim].append(workload)
    found = []
    for claim in sorted(groups):
        if any(each.name in leaving for each in groups[claim]) or not _stands(groups[claim], view):
            continue
        demands = [view.demand(workload) or NO_DEMAND for workload in groups[claim]]
        members = tuple(
            Member(
                pool=view.pools[each.name],
                name=each.name,
                need=each.need,
                workload=each,
                asked=True,
                avoids=view.avoided(each),
            )
            for each in groups[claim]
        )
        waited_s, depth = max(each.oldest_s for each in demands), sum(each.depth for each in demands)
        found.append(Ask(members=members, waited_s=waited_s, depth=depth, standing=claim))
    return found


def _stands(members: list[Workload], view: View) -> bool:
    """Tell whether no node has room for a claim's pods, rather than that they come or go just now."""
    processes = [process for each in members if (process := view.process(each))]
    leaving = any(process.leaving for process in processes) or any(each.phase == "Stopping" for each in members)
    return not leaving and any(process.unschedulable for process in processes)


def released(workload: Workload, reason: str, view: View, *, avoids: str = "") -> Action:
    """Return what takes a workload from its seat, to be placed anew; `avoids`: not there."""
    after = replace(workload, claim=None, phase="Pending", reason=reason, since=view.now, avoids=avoids)
    return Action(verb="release", workload=workload, after=after, reason=reason)


def seats_of_owners(view: View) -> Counter[str]:
    """Return how many seats each tenant has to himself."""
    return Counter(seat.owner for claim in view.seen.claims for seat in claim.seats if seat.owner)


def _members(pool: Pool, demand: Demand, view: View, leaving: Container[str]) -> Iterator[Member]:
    """Yield the pool's workers that have no place: those that are missing, and those that wait for one."""
    for workload in view.replicas.get(pool, ()):
        if workload.phase == "Pending" and workload.name not in leaving:
            yield Member(
                pool=pool, name=workload.name, need=workload.need, workload=workload, asked=bool(demand.depth),
                avoids=view.avoided(workload),
            )  # fmt: skip
    for number in range(max(view.num_wanted(pool, demand), int(_completes_a_gang(pool, view)))):
        name = pool.replica_name(number)
        if name not in view.by_name:
            yield Member(pool=pool, name=name, need=view.need(pool), workload=None, asked=bool(demand.depth))


def _completes_a_gang(pool: Pool, view: View) -> bool:
    """Tell whether it is placed without demand of its own: a full run of which nothing has or had a place.

    One that had is waited for alone. Were its partner, which gave way to it, to come with it once more, both would give
    way to each other for ever where there is room for one.
    """
    if not (pool.is_full and view.seen.has_claims):
        return False
    both = [view.replicas.get(Pool(slug=pool.slug, base=pool.base, kind=kind), ()) for kind in KINDS]
    return not any(workload.placed or workload.phase != "Pending" for replicas in both for workload in replicas)


def _ask(group: list[tuple[Member, Demand]]) -> Ask:
    members = sorted((member for member, _ in group), key=lambda member: (member.kind != "trainer", member.name))
    demands = [demand for _, demand in group]
    return Ask(
        members=tuple(members),
        waited_s=max(demand.oldest_s for demand in demands),
        depth=sum({id(demand): demand.depth for demand in demands}.values()),
    )


def _by_wait(ask: Ask) -> tuple[float, int, int, str]:
    """Order asks of one tenant: the longest wait first, then the larger, then by name."""
    host, device = ask.size
    return -ask.waited_s, -host, -device, ask.name
