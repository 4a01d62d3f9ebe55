"""A journal with clients before it and trainers behind it, without HTTP and Celery."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass

from openrl.tasks import keys
from openrl.tasks.doorbell import Waiter
from openrl.tasks.futures import Completions, Future, Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import CreateModel, Message
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from openrl.workers.model import loading
from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.doubts import Doubts
from openrl.workers.trainer.engine import TrainerEngine
from openrl.workers.trainer.full import FullTuning
from openrl.workers.trainer.reading import Reading
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.residency import Residency
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.snapshots import Snapshots

BASE = "tiny"


class Service:
    """One store and everything that is needed to submit to it and to serve it."""

    def __init__(self, store: Store, loaded: LoadedModel) -> None:
        self.store = store
        self.loaded = loaded
        self.journal = Journal(store)
        self.registry = Registry(store)
        self.futures = Futures(store)
        self.completions = Completions(store)
        self.leases: list[Lease] = []
        self._names = itertools.count()

    def close(self) -> None:
        """End the threads behind leases and the subscription."""
        self.completions.close()
        for lease in self.leases:
            lease.close()

    def trainer(
        self, *, pool: str = BASE, doubts: Doubts | None = None, reading: Reading | None = None, **settings: float
    ) -> Trainer:
        """Start a trainer process, so to say; it works when the test says so. A full run's has its own model."""
        name = f"trainer-{next(self._names)}"
        loaded = loading.load(self.loaded.tokenizer_path) if keys.is_full(pool) else self.loaded
        settings = {"token_budget": 96, "snapshot_share": 1e6, **settings}
        return Trainer(self, name, TrainerSettings(**settings), loaded, pool, doubts, reading)

    def client(self, tenant: str = "t", **options: object) -> Client:
        """Open a session with one run in it, not created yet."""
        session = self.registry.create_session(tenant)
        client = Client(self, tenant, session.session_id)
        client.create(**options)
        return client


class Client:
    """A run's owner: submits, and reads what became of it."""

    def __init__(self, service: Service, tenant: str, session_id: str) -> None:
        self._service = service
        self.tenant = tenant
        self.session_id = session_id
        self.run_id = f"{session_id}:train:0"
        self.seq = 0

    @property
    def pool(self) -> str:
        """The slug of a full run's own pool."""
        return keys.pool_slug(BASE, self.tenant, self.run_id)

    def create(self, **options: object) -> None:
        message = CreateModel(base_model=BASE, **{"rank": 4, "seed": 1, **options})
        self._service.journal.create(self.tenant, self.session_id, 0, message, slug=BASE)

    def submit(self, message: Message, *, seq: int = 0) -> int:
        """Submit under the next number, or under the one given."""
        self.seq = self.seq if seq else self.seq + 1
        self._service.journal.submit(self.tenant, self.run_id, seq or self.seq, message)
        return seq or self.seq

    def refuse(self, kind: str) -> int:
        """Use up a number by a refused submission."""
        self.seq += 1
        self._service.journal.refuse(self.tenant, self.run_id, self.seq, kind, b"x", "no such thing")
        return self.seq

    def future(self, seq: int) -> Future:
        return self._service.futures.get(self.tenant, f"{self.run_id}:{seq}")

    def states(self) -> str:
        """One letter for each promise so far: p(ending), d(one), f(ailed)."""
        return "".join(self.future(seq).state[0] for seq in range(self.seq + 1))

    def answer(self, seq: int) -> dict:
        future = self.future(seq)
        assert future.state == "done", (future.state, future.error)
        return json.loads(future.result)


@dataclass
class Trainer:
    """One engine; `spin` lets it work until it finds nothing."""

    service: Service
    name: str
    settings: TrainerSettings
    loaded: LoadedModel
    pool: str = BASE
    doubts: Doubts | None = None
    reading: Reading | None = None

    def __post_init__(self) -> None:
        service, data_dir, loaded = self.service, self.service.store.settings.data_dir, self.loaded
        where = {"base_model": BASE, "data_dir": data_dir}
        full = FullTuning() if keys.is_full(self.pool) else None
        residency = Residency(loaded.device, most_runs=self.settings.device_runs, most_bytes=self.settings.device_bytes)
        checkpoints = Checkpoints(loaded, slug=self.pool, registry=service.registry, full=full, **where)
        self.device = Device(loaded, checkpoints, token_budget=self.settings.token_budget, residency=residency)
        self.recovery = Recovery(loaded, self.device, service.journal, full=full, **where)
        at_once = self.settings.snapshots_at_once
        self.snapshots = Snapshots(loaded, service.journal, at_once=at_once, **where)
        self.engine = TrainerEngine(
            slug=self.pool,
            journal=service.journal,
            lease=self.new_lease(),
            new_lease=self.new_lease,
            device=self.device,
            recovery=self.recovery,
            snapshots=self.snapshots,
            waiter=Waiter(service.store, worker_id=lambda: self.name),
            settings=self.settings,
            doubts=self.doubts,
            reading=self.reading,
        )

    def new_lease(self) -> Lease:
        self.lease = Lease(self.service.store, self.name, "trainer", self.pool)
        self.service.leases.append(self.lease)
        return self.lease

    def spin(self) -> int:
        """Work until nothing is left, not even a snapshot in the making; return the number of passes."""
        turns = 0
        while self.engine.turn():
            turns += 1
        for key in list(self.snapshots._writers):
            self.snapshots.settle(key)
        return turns

    def resident(self, client: Client) -> Run:
        run = self.engine._residents.get((client.tenant, client.run_id))
        assert run is not None
        return run

    def die(self) -> None:
        """Disappear without a word, as after SIGKILL and the end of the lease."""
        self.lease.close()
