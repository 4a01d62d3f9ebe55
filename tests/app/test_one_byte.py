"""The chunks of one call as the SDK sends them, the first one when all others are taken, over a tenant's bytes."""

from __future__ import annotations

from dataclasses import replace

from openrl.app.context import EXTENSION
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.store import Store
from tests.app.conftest import Api, Worker


def test_a_call_of_five_chunks_is_taken_whole_although_the_tenant_may_queue_one_byte(
    store: Store, app: object, worker: Worker
) -> None:
    small = create_app(AppSettings(), store=Store(store.redis, replace(store.settings, tenant_bytes=1)))
    api = Api(small.test_client(), small.extensions[EXTENSION])
    run = api.run()
    worker.step()
    for seq in (2, 3, 4, 5, 1):
        api.ok(api.forward_backward(run, seq))
    assert api.forward_backward(run, 6).status_code == 429
    assert [operation.seq_id for operation in worker.step()] == [1, 2, 3, 4, 5]
    api.ok(api.forward_backward(run, 6))
    api.services.close()
