"""A full run is a pool of its own, and changes hands with the same bits, as a LoRA run does."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from openrl.scheduler.demand import demand
from openrl.scheduler.reconcile import Reconciler
from openrl.scheduler.settings import SchedulerSettings
from openrl.tasks import keys, queues
from openrl.tasks.celery import celery
from openrl.tasks.doorbell import Doorbell
from openrl.tasks.messages import LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.tasks.quotas import Quotas
from openrl.tasks.registry import BaseModel
from openrl.tasks.worker import TenantQueues
from openrl.workers.trainer.full import Masters
from openrl.workers.trainer.runs import Run
from tests.trainer.bench import BASE, forward_backward
from tests.trainer.service import Client, Service, Trainer
from tests.trainer.test_device import bits
from tests.trainer.test_full import broken_in_the_second_pass
from tests.trainer.test_recovery import script

FULL = {"rank": 0, "fine_tuning": "full"}


def undisturbed(service: Service) -> tuple[list[bytes], str]:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    for act in script(client):
        act()
        trainer.spin()
    return bits(trainer.resident(client)), client.states()


@pytest.mark.parametrize("graceful", [False, True], ids=["killed", "handed back"])
@pytest.mark.parametrize("settings", [{}, {"snapshot_operations": 3}], ids=["from the start", "from a snapshot"])
@pytest.mark.parametrize("deaths", [(2,), (6, 11), (1, 5, 9, 14)])
def test_a_full_run_that_changes_hands_ends_with_the_same_bits(
    service: Service, deaths: tuple[int, ...], settings: dict, graceful: bool
) -> None:
    expected = undisturbed(service)
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool, **settings)
    for position, act in enumerate(script(client)):
        if position in deaths:
            trainer.spin()
            if graceful:
                trainer.engine.hand_back_all()
            trainer.die()
            trainer = service.trainer(pool=client.pool, **settings)
        act()
    trainer.spin()
    assert (bits(trainer.resident(client)), client.states()) == expected


def test_after_a_step_the_next_version_of_a_run_that_publishes_each_is_encoded_before_it_is_asked_for(
    service: Service,
) -> None:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    ahead = []
    for number in range(3):
        client.submit(forward_backward(seed=number))
        client.submit(OptimStep(learning_rate=0.01))
        trainer.spin()
        chains = trainer.device._checkpoints._versions._chains
        ahead.append(any(chain.staged for chain in chains.values()))
        saved = client.submit(SaveWeightsForSampler(name=f"v{number}"))
        trainer.spin()
        assert client.answer(saved)["path"].endswith(f"v{number}")
    assert ahead == [False, False, True]


def test_a_step_that_breaks_halfway_counts_as_failed_and_the_run_goes_on_as_a_replay_has_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(client: Client, trainer: Trainer, second: Callable[[], object]) -> Run:
        for number, step in enumerate((lambda: client.submit(OptimStep(learning_rate=0.01)), second) * 2):
            client.submit(forward_backward(seed=number))
            trainer.spin()
            step()
            trainer.spin()
        client.submit(forward_backward(seed=9, forward=True))
        trainer.spin()
        return trainer.resident(client)

    def broken() -> None:
        with monkeypatch.context() as patched:
            broken_in_the_second_pass(patched, len(trainer.resident(client).weights().parameters()))
            client.submit(OptimStep(learning_rate=0.01))
            trainer.spin()

    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    torn = trained(client, trainer, broken)
    assert client.states() == "d" + "dddf" * 2 + "d"
    trainer.die()
    heir = service.trainer(pool=client.pool)
    client.submit(forward_backward(seed=9, forward=True))
    heir.spin()
    other = service.client(**FULL)
    expected = trained(other, service.trainer(pool=other.pool), lambda: other.submit(OptimStep(learning_rate=1e38)))
    assert other.states() == client.states()[:-1]
    assert bits(torn) == bits(heir.resident(client)) == bits(expected)


def test_a_full_run_that_is_taken_up_again_here_has_left_the_device_before(service: Service) -> None:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    _trained(client, trainer)
    run, restore, found = weakref.ref(trainer.resident(client)), trainer.recovery.restore, []

    def restoring(*args: object, **kwargs: object) -> Run:
        found.append(run())
        return restore(*args, **kwargs)

    trainer.recovery.restore = restoring
    run().applied -= 1
    client.submit(forward_backward(seed=9))
    trainer.spin()
    assert found == [None] and client.states()[-1] == "d"


def test_a_full_run_waits_for_its_own_pool_and_nobody_else_takes_it(service: Service) -> None:
    client, other = service.client(**FULL), service.client("u")
    base, mine = service.trainer(), service.trainer(pool=client.pool)
    base.spin()
    assert (client.states(), other.states()) == ("p", "d")
    mine.spin()
    assert client.states() == "d"
    row = service.registry.run(client.tenant, client.run_id)
    assert (row.slug, row.pool, row.fine_tuning, row.is_lora) == (client.pool, client.pool, "full", False)
    assert isinstance(mine.resident(client).trained, Masters)


def test_the_scheduler_sees_a_full_runs_pool_while_it_has_something_to_do(service: Service) -> None:
    client = service.client(**FULL)
    model = BaseModel(
        name=BASE, slug=BASE, path="/m", vocab_size=260, max_context=64, arch="llama", tokenizer_id=BASE,
        hidden_size=8, num_layers=1, tied_embeddings=True,
    )  # fmt: skip
    [pool] = service.journal.pools(BASE)
    assert pool == (client.pool, client.tenant, client.run_id)
    asked = demand(service.journal, [model])
    assert {each.slug: asked[each].depth for each in asked if each.kind == "trainer"} == {BASE: 0, client.pool: 1}
    service.trainer(pool=client.pool).spin()
    assert service.journal.pools(BASE) == []
    [standing] = [each for each in asked if each.kind == "trainer" and each.is_full]
    assert demand(service.journal, [model], [standing])[standing].depth == 0, "its worker may go on being idle"
    assert [each for each in demand(service.journal, [model]) if each.is_full] == []


def test_nothing_but_its_row_is_left_of_a_pool_that_has_nothing_to_do(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(celery.conf, "broker_url", service.store.settings.broker_url)
    client, bell = service.client(**FULL), Doorbell(service.store)
    trainer = service.trainer(pool=client.pool)
    tenant_queues = TenantQueues(service.store, family="train", slug=client.pool)
    client.submit(forward_backward())
    for kind in ("forward_backward", "sample"):
        bell.ring(kind, client.pool, client.tenant, "an id")
        assert not bell.knows(kind, client.pool, client.tenant), "it would grow with each run"
    consumed = tenant_queues.names()
    with celery.connection_for_read() as connection:
        for name in consumed:
            celery.amqp.queues.new_missing(name)(connection.default_channel).declare()
    trainer.spin()
    promise = service.journal.unload(client.tenant, client.run_id)
    assert [pool.slug for pool in service.journal.pools(BASE)] == [client.pool]
    trainer.engine._holdings._unload_at = 0.0
    trainer.engine.turn()
    assert service.futures.get(client.tenant, promise.request_id).state == "done"
    assert service.journal.pools(BASE) == []
    scheduler = Reconciler(service.store, SchedulerSettings())
    scheduler.sweep_queues()
    assert tenant_queues.names() == consumed and len(consumed) == 2, "its worker may go on"
    trainer.die()
    scheduler.sweep_queues()
    assert [key for key in service.store.redis.keys("*") if client.pool.encode() in key] == []
    assert service.store.redis.exists(keys.RUNG) == 0
    assert [name for name in celery.amqp.queues if client.pool in name] == []


def test_the_queues_of_a_pool_go_once_the_broker_answers_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = service.client(**FULL)
    service.trainer(pool=client.pool).spin()
    monkeypatch.setattr(celery.conf, "broker_url", service.store.settings.broker_url)
    Doorbell(service.store).ring("optim_step", client.pool, client.tenant, "an id")
    monkeypatch.setattr(celery.conf, "broker_url", "redis://127.0.0.1:1/0")
    assert queues.forget_idle(service.store) == 0, "its worker is there"
    service.close()
    assert queues.forget_idle(service.store) == 0
    monkeypatch.setattr(celery.conf, "broker_url", service.store.settings.broker_url)
    assert queues.forget_idle(service.store) == 1
    assert [key for key in service.store.redis.keys("*") if client.pool.encode() in key] == []


def _trained(client: Client, trainer: Trainer) -> None:
    for message in (forward_backward(seed=1), OptimStep(learning_rate=0.01)):
        client.submit(message)
    trainer.spin()


def test_a_version_is_registered_with_what_it_is_known_by_and_the_next_leads_on_from_it(service: Service) -> None:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    _trained(client, trainer)
    named = client.submit(SaveWeightsForSampler(name="a"))
    alone = client.submit(SaveWeightsForSampler(sampler_id=f"{client.session_id}:sample:0"))
    trainer.spin()
    client.answer(named)
    checkpoint = service.registry.checkpoint(client.tenant, client.run_id, "sampler_weights/a")
    sampler = service.registry.sampler(client.tenant, client.answer(alone)["sampling_session_id"])
    assert checkpoint.fine_tuning == "full" and len(checkpoint.weights_digest) == len(sampler.weights_digest) == 64
    assert sampler.slug == client.pool and sampler.size_bytes > 0
    assert service.registry.run(client.tenant, client.run_id).last_version == sampler.adapter_dir


def test_a_version_in_the_place_of_another_needs_room_for_both_while_the_other_lies_there(service: Service) -> None:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    first = client.submit(SaveWeightsForSampler(name="a"))
    trainer.spin()
    client.answer(first)
    stored = int(service.store.redis.hget(keys.account(client.tenant), "stored"))
    Quotas(service.store).set(client.tenant, {"stored_bytes": stored + 1})
    second = client.submit(SaveWeightsForSampler(name="a", overwrite=True))
    trainer.spin()
    assert client.future(second).state == "failed" and "stored_bytes" in client.future(second).error
    assert int(service.store.redis.hget(keys.account(client.tenant), "stored")) == stored


def test_a_checkpoint_of_a_full_run_starts_another_which_goes_on_with_the_same_bits(service: Service) -> None:
    client = service.client(**FULL)
    trainer = service.trainer(pool=client.pool)
    _trained(client, trainer)
    client.submit(SaveWeights(name="a"))
    trainer.spin()
    path = service.registry.checkpoint(client.tenant, client.run_id, "weights/a").directory
    heir = service.client(checkpoint_dir=path, checkpoint_path="x", with_optimizer=True, **FULL)
    other = service.trainer(pool=heir.pool)
    other.spin()
    assert bits(other.resident(heir)) == bits(trainer.resident(client))
    client.submit(LoadWeights(checkpoint_dir=path, checkpoint_path="x", with_optimizer=True))
    for each in (client, heir):
        each.submit(forward_backward(seed=5))
        each.submit(OptimStep())
    trainer.spin(), other.spin()
    assert bits(other.resident(heir)) == bits(trainer.resident(client))
    row = service.registry.run(heir.tenant, heir.run_id)
    assert (row.fine_tuning, row.pool) == ("full", heir.pool)


def test_a_pools_slug_says_whose_it_is_and_of_which_base() -> None:
    pool = keys.pool_slug("some-model", "t", "s:train:0")
    assert pool != keys.pool_slug("some-model", "u", "s:train:0") and keys.is_full(pool)
    assert keys.base_slug(pool) == keys.base_slug("some-model") == "some-model" and not keys.is_full("some-model")
    assert len(pool) == len("some-model") + 19
