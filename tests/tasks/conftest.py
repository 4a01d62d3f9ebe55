"""A journal with one session, and workers that come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from openrl.tasks import keys
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import CreateModel
from openrl.tasks.operations import Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store

TENANT = "local"
BASE = "tiny/base"
SLUG = keys.slug(BASE)


def run_all(journal: Journal, lease: Lease) -> list[int]:
    """Execute whatever is ready, until nothing is; return the sequence ids in order."""
    done = []
    while slices := journal.take(SLUG, lease):
        for piece in slices:
            for operation in piece.operations:
                journal.commit(lease, operation, Outcome(), token=piece.token)
                done.append(operation.seq_id)
    return done


@pytest.fixture
def journal(store: Store) -> Journal:
    """A journal on the empty store."""
    return Journal(store)


@pytest.fixture
def registry(store: Store) -> Registry:
    """The registry beside it."""
    return Registry(store)


@pytest.fixture
def futures(store: Store) -> Futures:
    """The promises beside it."""
    return Futures(store)


@pytest.fixture
def session_id(registry: Registry) -> str:
    """The id of an open session of the tenant `local`."""
    return registry.create_session(TENANT).session_id


@pytest.fixture
def new_lease(store: Store) -> Iterator[Callable[..., Lease]]:
    """Take leases by worker id; they end with the test."""
    leases: list[Lease] = []

    def take(worker_id: str, kind: str = "trainer") -> Lease:
        leases.append(Lease(store, worker_id, kind, SLUG))
        return leases[-1]

    yield take
    for lease in leases:
        lease.close()


@pytest.fixture
def kill(store: Store) -> Callable[[Lease], None]:
    """Make a worker look dead: its lease has expired, nothing was handed back."""

    def expire(lease: Lease) -> None:
        store.redis.delete(keys.worker(lease.worker_id))

    return expire


@pytest.fixture
def new_run(journal: Journal, session_id: str) -> Callable[..., str]:
    """Submit the creation of run number `number`; returns its id."""

    def create(number: int = 0, *, tenant: str = TENANT, session: str = session_id) -> str:
        message = CreateModel(base_model=BASE, rank=8, seed=1)
        return journal.create(tenant, session, number, message, slug=SLUG).run_id

    return create


@pytest.fixture
def created(journal: Journal, new_run: Callable[..., str], new_lease: Callable[..., Lease]) -> tuple[str, Lease, int]:
    """A run whose creation is committed: its id, its owner's lease, the token."""
    run_id, lease = new_run(), new_lease("w1")
    (piece,) = journal.take(SLUG, lease)
    journal.commit(lease, piece.operations[0], Outcome(run_fields={"state": "ready"}), token=piece.token)
    return run_id, lease, piece.token
