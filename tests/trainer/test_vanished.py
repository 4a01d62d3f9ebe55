"""A client that vanishes leaves the trainer's memory, and finds its run again, to the bit, when it returns."""

from __future__ import annotations

import dataclasses

import pytest

from openrl.tasks import keys
from openrl.tasks.messages import OptimStep
from openrl.tasks.store import Store
from tests.trainer.bench import forward_backward, told
from tests.trainer.service import Service
from tests.trainer.test_device import bits

GRACE_S = 60.0
ALL = (forward_backward(seed=1), OptimStep(learning_rate=0.01), forward_backward(seed=2), OptimStep(learning_rate=0.01))


@pytest.fixture
def service(store, loaded):
    made = Service(Store(store.redis, dataclasses.replace(store.settings, session_grace_s=GRACE_S)), loaded)
    yield made
    made.close()


def fall_silent(service, client, seconds: float) -> None:
    """Let the session's last sign of life be so long ago."""
    key = keys.session(client.tenant, client.session_id)
    service.store.redis.hset(key, "last_seen", service.store.now() - seconds)


def is_resident(trainer, client) -> bool:
    return trainer.engine._residents.get((client.tenant, client.run_id)) is not None


def look(trainer) -> None:
    trainer.engine._holdings._vanished_at = 0.0
    trainer.spin()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_whose_client_vanished_is_out_of_memory_and_goes_on_bit_by_bit_wherever_it_was_left(service, steps):
    trainer, heir = service.trainer(), service.trainer()
    steady, vanishing = service.client(), service.client()
    for message in ALL[:steps]:
        for client in (steady, vanishing):
            client.submit(message)
            trainer.spin()
    fall_silent(service, vanishing, GRACE_S - 5)
    look(trainer)
    assert is_resident(trainer, vanishing)
    fall_silent(service, vanishing, GRACE_S + 1)
    look(trainer)
    assert not is_resident(trainer, vanishing) and is_resident(trainer, steady)
    # It returns, and not even to the same process.
    service.registry.heartbeat(vanishing.tenant, vanishing.session_id)
    for message in ALL[steps:]:
        vanishing.submit(message)
        heir.spin()
        steady.submit(message)
        trainer.spin()
    assert vanishing.states() == steady.states() == "d" * (len(ALL) + 1)
    assert bits(heir.resident(vanishing)) == bits(trainer.resident(steady))
    for seq in range(1, 5):
        assert told(vanishing.future(seq).result) == told(steady.future(seq).result)


def test_what_a_vanished_client_has_submitted_is_carried_out_before_its_run_leaves(service):
    trainer, client = service.trainer(), service.client()
    for message in ALL:
        client.submit(message)
    fall_silent(service, client, GRACE_S + 1)
    look(trainer)
    assert client.states() == "ddddd"
    look(trainer)
    assert not is_resident(trainer, client)


def test_the_runs_of_a_finished_session_leave_at_once(service):
    trainer, client, other = service.trainer(), service.client(), service.client()
    trainer.spin()
    service.registry.finish_session(client.tenant, client.session_id, "done")
    look(trainer)
    assert not is_resident(trainer, client) and is_resident(trainer, other)
