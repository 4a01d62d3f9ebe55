"""A scheduler on the emulated cluster: the real `decide`, the real driver, workers that do as theirs do.

Time is the emulator's. After every step of anything `check` holds the promises: no accelerator has a worker that has no
seat there, no workload has two workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from openrl.scheduler.clusters.kube_api import ApiError, KubeApi
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.clusters.kubernetes import KubernetesCluster
from openrl.scheduler.decide import decide
from openrl.scheduler.resources import Decision, Demand, Need, Policy, Pool, Snapshot, Worker
from openrl.tasks.assignment import Assignment, Assignments
from openrl.tasks.store import Store
from tests.kube.conftest import connect
from tests.kube.machines import Machines, environment
from tests.kube.objects import Obj

GIB = 1 << 30
SETTINGS = KubeSettings(trainer_image="trainer:1", sampler_image="sampler:1")
POLICY = Policy(
    idle_timeout_s=60.0,
    drop_s=10.0,
    patience_s=60.0,
    preempt_idle_s=10.0,
    migrate_idle_s=30.0,
    version=SETTINGS.version,
)
TRAINER = Pool(slug="tiny", kind="trainer", base="Org/Tiny")
SAMPLER = Pool(slug="tiny", kind="sampler", base="Org/Tiny")


def full(number: int, kind: Any = "trainer") -> Pool:
    """Return the pool of a run that is fine-tuned in full."""
    return Pool(slug=f"tiny.f-{number:016x}", kind=kind, base="Org/Tiny")


class World:
    """One cluster, what is asked of it, and any number of schedulers."""

    def __init__(self, machines: Machines, store: Store, *, policy: Policy = POLICY) -> None:
        self.machines = machines
        self.store = store
        self.policy = policy
        self.demand: dict[Pool, Demand] = {}
        self.needs: dict[Pool, Need] = {}
        self.settings = SETTINGS
        self._busy: dict[str, float] = {}
        self._started: dict[str, float] = {}
        self._at_work: set[str] = set()
        """Pods, by uid, whose worker has read that its place is its own, and may have touched the accelerator."""
        self._apis: list[KubeApi] = []
        self.scheduler = self.new_scheduler()

    def new_scheduler(self) -> KubernetesCluster:
        """Start a scheduler that knows nothing but what the API server tells it."""
        self._apis.append(connect(self.machines))
        return KubernetesCluster(
            self._apis[-1], self.settings, Assignments(self.store), clock=lambda: self.machines.clock_s
        )

    def close(self) -> None:
        """Close the schedulers' connections."""
        for api in self._apis:
            api.close()

    def ask(self, pool: Pool, depth: int = 1, **need: Any) -> None:
        """Let a pool have so many operations before it; `need`: what its worker takes."""
        self.demand[pool] = Demand(depth=depth, oldest_s=float(depth))
        self.needs[pool] = Need(**{"device_bytes": 30 * GIB, "host_bytes": 40 * GIB, **need})

    def rest(self) -> None:
        """Let nobody ask for anything any more."""
        self.demand = dict.fromkeys(self.demand, Demand())

    def decide(self, scheduler: KubernetesCluster) -> Decision:
        """Look, and decide."""
        snapshot = Snapshot(
            now=self.machines.clock_s,
            demand=self.demand,
            seen=scheduler.observe(),
            needs=self.needs,
            workers=self._workers(),
            watched_since=0.0,
            policy=self.policy,
        )
        return decide(snapshot)

    def reconcile(self, scheduler: KubernetesCluster | None = None) -> bool:
        """Do one pass of a scheduler, as the beat does; tell whether it came to its end."""
        scheduler = scheduler or self.scheduler
        try:
            scheduler.apply(self.decide(scheduler).actions)
        except ApiError:
            return False
        return True

    def tick(self, seconds: float = 1.0, *, times: int = 1) -> None:
        """Let the cluster and the scheduler go on."""
        for _ in range(times):
            self.step(seconds)
            self.reconcile()
            self.check()

    def step(self, seconds: float = 1.0) -> None:
        """Let the cluster go on alone; workers whose place isn't theirs end, as `assignment.keep` has them do."""
        for name, assignment in self.machines.running().items():
            if Assignment(self.store, assignment).state() != "current":
                self.machines.exit(name, 1)
        self.machines.step(seconds)
        self.check()

    def until(self, is_so: Callable[[], bool], *, ticks: int = 90, seconds: float = 1.0) -> None:
        """Go on until something is so."""
        for _ in range(ticks):
            if is_so():
                return
            self.tick(seconds)
        raise AssertionError(f"not so after {ticks} ticks:\n{self.words()}")

    def serves(self, *pools: Pool) -> bool:
        """Tell whether exactly these pools have one running worker each, each in its seat, and nothing is left over."""
        pods = self.all("pods")
        names = sorted(pod["metadata"]["annotations"]["openrl.io/name"] for pod in pods)
        running = self.machines.running()
        return (
            names == sorted(pool.workload_name for pool in pools)
            and len(running) == len(pods)
            and sorted(running.values()) == sorted(self.seats())
            and sorted(running.values()) == sorted(self.assignments())
            and self.claims() == {pod["metadata"]["labels"]["openrl.io/claim"] for pod in pods}
            and {each["metadata"]["name"] for each in self.all("claimledgers")} == self.claims()
        )

    def is_empty(self) -> bool:
        """Tell whether nothing is left of anything."""
        return not any(self.all(plural) for plural in ("pods", "workloads", "claimledgers", "resourceclaims"))

    def seats(self) -> list[str]:
        """Return the assignment ids of all seats."""
        return [seat["assignmentID"] for ledger in self.all("claimledgers") for seat in ledger["spec"]["seats"]]

    def assignments(self) -> list[str]:
        """Return the assignment ids that workloads have."""
        given = [each.get("status", {}).get("assignmentID", "") for each in self.all("workloads")]
        return [each for each in given if each]

    def claims(self) -> set[str]:
        """Return the names of the claims."""
        return {claim["metadata"]["name"] for claim in self.all("resourceclaims")}

    def all(self, plural: str) -> list[Obj]:
        """Return all objects of a kind."""
        return self.machines.objects.all(plural)

    def check(self) -> None:
        """Hold the promises of this moment."""
        seats = {
            seat["assignmentID"]: ledger["metadata"]["name"]
            for ledger in self.all("claimledgers")
            for seat in ledger["spec"]["seats"]
        }
        owners: list[str] = []
        for uid, pod in self.machines.containers.items():
            name, said = pod["metadata"]["name"], environment(pod)
            if Assignment(self.store, said["OPENRL_ASSIGNMENT_ID"]).state() == "current":
                self._at_work.add(uid)
            if uid not in self._at_work:
                continue  # it has read that its place is another's, and leaves
            claim = pod["metadata"]["labels"]["openrl.io/claim"]
            is_in_seat = seats.get(said["OPENRL_ASSIGNMENT_ID"]) == claim
            assert is_in_seat, f"{name} works at {claim} without a seat\n{self.words()}"
            assert not self.store.redis.exists(f"openrl:pod-ended:{uid}"), f"{name} works and is said to have ended"
            owners.append(pod["metadata"]["labels"]["openrl.io/workload"])
        assert len(set(owners)) == len(owners), f"two workers of one workload: {owners}\n{self.words()}"

    def words(self) -> str:
        """Say how everything is, for a test that fails."""
        lines = []
        for plural in ("workloads", "claimledgers", "resourceclaims", "pods"):
            for each in self.all(plural):
                meta = {k: v for k, v in each["metadata"].items() if k in ("deletionTimestamp", "finalizers")}
                spec = each["spec"].get("seats", each["spec"].get("nodeName", ""))
                lines.append(f"{plural} {each['metadata']['name']} {meta} {spec} {each.get('status')}")
        return "\n".join(lines)

    def _workers(self) -> tuple[Worker, ...]:
        now, rows = self.machines.clock_s, []
        running = self.machines.running()
        for pod in self.all("pods"):
            if pod["metadata"]["name"] not in running:
                continue
            name = pod["metadata"]["annotations"]["openrl.io/name"]
            pool = next(pool for pool in self.demand if pool.workload_name == name)
            if self.demand[pool].depth:
                self._busy[name] = now
            rows.append(
                Worker(
                    worker_id=name,
                    kind=pool.kind,
                    slug=pool.slug,
                    state="busy" if self.demand[pool].depth else "ready",
                    started=self._started.setdefault(pod["metadata"]["uid"], now),
                    last_busy=self._busy.get(name, 0.0),
                )
            )
        return tuple(rows)
