"""A run that its client unloads leaves memory and goes on with the same bits; others' weights are loaded like own."""

import json
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest

from openrl.scheduler.retention import retain
from openrl.scheduler.settings import SchedulerSettings
from openrl.scheduler.sweep import sweep_dropped
from openrl.tasks.errors import NotFound, StaleOwner
from openrl.tasks.messages import CreateModel, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.timeslice.errors import NotGranted
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.trainer import states
from openrl.workers.weights import layout
from tests.trainer.bench import forward_backward
from tests.trainer.test_device import bits

TRAINING = (forward_backward(seed=1), OptimStep(learning_rate=0.01), forward_backward(seed=2))


def result(service, trainer, client, promise) -> dict:
    """Let the trainer work until the promise is kept."""
    while (future := service.futures.get(client.tenant, promise.request_id)).state == "pending":
        trainer.spin()
    return json.loads(future.result)


def test_an_unloaded_run_is_out_of_memory_and_goes_on_bit_by_bit_with_its_pending_gradient(service):
    trainer = service.trainer(poll_s=0.001)
    steady, unloaded = service.client(), service.client()
    for client in (steady, unloaded):
        for message in TRAINING:
            client.submit(message)
            trainer.spin()
    promise = service.journal.unload("t", unloaded.run_id)
    assert result(service, trainer, unloaded, promise) == {"type": "unload_model", "model_id": unloaded.run_id}
    with pytest.raises(AssertionError):
        trainer.resident(unloaded)
    assert trainer.resident(steady) is not None
    for client in (steady, unloaded):
        client.submit(OptimStep(learning_rate=0.01))
        trainer.spin()
    assert unloaded.states() == "ddddd"
    assert bits(trainer.resident(unloaded)) == bits(trainer.resident(steady))


def test_what_waits_is_done_before_a_run_is_unloaded(service):
    trainer, client = service.trainer(poll_s=0.001), service.client()
    trainer.spin()
    promise = service.journal.unload(client.tenant, client.run_id)
    for message in TRAINING:
        client.submit(message)
    assert result(service, trainer, client, promise)["model_id"] == client.run_id
    assert client.states() == "dddd"


def test_a_run_of_one_tenant_starts_from_the_directory_of_another(service):
    trainer, owner, reader = service.trainer(), service.client("a"), service.client("b")
    for message in (*TRAINING[:2], SaveWeights(name="ck")):
        owner.submit(message)
    trainer.spin()
    saved = service.registry.checkpoint("a", owner.run_id, "weights/ck")
    copied = layout.copy_dir("b", f"{reader.session_id}:train:9", "weights/ck", 1)
    data_dir = service.store.settings.data_dir
    layout.link(layout.existing(data_dir, saved.directory), layout.resolve(data_dir, copied))
    service.registry.delete_checkpoint("a", owner.run_id, "weights/ck")
    load = LoadWeights(checkpoint_path=saved.uri, checkpoint_dir=saved.directory, with_optimizer=True)
    reader.submit(load)
    assert sweep_dropped(service.store, grace_s=-1) == 0, "a load that waits needs it"
    trainer.spin()
    assert reader.states() == "dd"
    assert sweep_dropped(service.store, grace_s=-1) == 1
    message = CreateModel(
        base_model="tiny", rank=4, seed=1, checkpoint_path="tinker://x", checkpoint_dir=copied, with_optimizer=True
    )
    service.journal.create("b", reader.session_id, 1, message, slug="tiny")
    trainer.spin()
    assert service.futures.get("b", f"{reader.session_id}:train:1:0").state == "done"
    expected = bits(trainer.resident(owner))
    assert bits(trainer.resident(reader)) == expected


def test_versions_of_a_real_trainer_are_kept_as_the_settings_say(service):
    trainer, client = service.trainer(), service.client()
    for number in range(6):
        client.submit(SaveWeightsForSampler(sampler_id=f"{client.session_id}:sample:{number}"))
    trainer.spin()
    size = service.registry.sampler("t", f"{client.session_id}:sample:0").size_bytes
    assert size > 0
    assert retain(service.store, SchedulerSettings(version_last=2, version_bytes=4 * size)) == 2
    assert sweep_dropped(service.store, grace_s=-1) == 2
    kept = layout.versions(service.store.settings.data_dir, "t", client.run_id)
    assert [path.name.partition(".")[0] for path in kept] == ["@2", "@3", "@4", "@5"]
    with pytest.raises(NotFound, match="OPENRL_VERSION_LAST"):
        service.registry.sampler("t", f"{client.session_id}:sample:1")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_five_hundred_real_saves_leave_a_bounded_disk(service):
    trainer, client = service.trainer(), service.client()
    settings, began = SchedulerSettings(version_last=4, version_bytes=0), time.monotonic()
    for number in range(500):
        client.submit(SaveWeightsForSampler(sampler_id=f"{client.session_id}:sample:{number}"))
        if number % 50 == 49:
            trainer.spin()
            retain(service.store, settings)
            sweep_dropped(service.store, grace_s=-1)
            there = [path.parent.name for path in layout.versions(service.store.settings.data_dir, "t", client.run_id)]
            assert there.count("sampler_weights") == 4
            assert len(there) <= 4 + 2, "a recovery snapshot and its successor at most"
    print(f"500 saves in {time.monotonic() - began:.0f} s")


def test_what_was_refused_on_a_run_that_holds_a_copy_takes_its_turn_and_harms_nothing(service):
    trainer, owner = service.trainer(), service.client()
    owner.submit(SaveWeights(name="ck"))
    trainer.spin()
    saved = service.registry.checkpoint("t", owner.run_id, "weights/ck")
    run = replace(service.registry.run("t", owner.run_id), run_id=f"{owner.session_id}:train:5", state="copied")
    made = replace(saved, run_id=run.run_id, directory=layout.copy_dir("t", run.run_id, "weights/ck", 1))
    service.registry.register_copy("t", run, made, None, idempotency_key="", digest="d")
    service.journal.refuse("t", run.run_id, 1, "optim_step", b"x", "can't be trained on")
    trainer.spin()
    future = service.futures.get("t", f"{run.run_id}:1")
    assert (future.state, future.error) == ("failed", "can't be trained on")
    assert service.registry.run("t", run.run_id).applied == 1
    assert service.journal.depth("tiny")["train"] == {}


class Occupied(Accelerator):
    """An accelerator that somebody else has, until it is free; counts how often it was asked for."""

    shared = True

    def __init__(self) -> None:
        self.free, self.asked, self.taken = True, 0, 0

    @contextmanager
    def turn(self, *, patience_s=None, gives_up=lambda: False):
        self.asked += 1
        assert self.free or patience_s is not None
        if not self.free:
            raise NotGranted("somebody else has it")
        self.taken += 1
        yield


def occupied(service, **settings):
    trainer = service.trainer(**settings)
    accelerator = trainer.engine._accelerator = trainer.engine._holdings._accelerator = Occupied()
    return trainer, accelerator


def test_idle_runs_share_one_turn_and_stay_until_there_is_one(service):
    trainer, accelerator = occupied(service, idle_s=0.001)
    clients, residents = [service.client() for _ in range(3)], trainer.engine._residents
    trainer.engine._holdings.let_go, let_go = lambda *args, **kwargs: None, trainer.engine._holdings.let_go
    for client in clients:
        for message in TRAINING:
            client.submit(message)
    trainer.spin()
    accelerator.free, accelerator.asked, accelerator.taken = False, 0, 0
    time.sleep(0.002)
    let_go(set(), trainer.lease)
    assert (accelerator.asked, len(residents)) == (1, 3), "one wait for all, and none was dropped unsaved"
    expected = [bits(trainer.resident(client)) for client in clients]
    accelerator.free = True
    let_go(set(), trainer.lease)
    assert (accelerator.taken, len(residents)) == (1, 0)
    assert all(service.journal.snapshot("t", client.run_id) for client in clients)
    for client in clients:
        client.submit(OptimStep(learning_rate=0.01))
    trainer.spin()
    assert [client.states() for client in clients] == ["ddddd"] * 3
    assert [bits(trainer.resident(client)) for client in clients] != expected


def test_a_run_in_host_memory_is_handed_back_without_a_turn(service):
    trainer, accelerator = occupied(service, device_runs=1)
    first, second = service.client(), service.client()
    for client in (first, second):
        for message in TRAINING:
            client.submit(message)
        trainer.spin()
    accelerator.free = False
    trainer.engine._residents.surplus = lambda waiting: list(trainer.engine._residents)
    trainer.engine._holdings.let_go(set(), trainer.lease)
    assert service.journal.snapshot("t", first.run_id) and trainer.resident(second) is not None
    with pytest.raises(AssertionError):
        trainer.resident(first)


def test_an_idle_run_that_can_not_be_saved_stays_and_is_not_tried_all_the_time(service, monkeypatch):
    trainer, client = service.trainer(idle_s=0.001), service.client()
    tries = []

    def refuses(*args, **kwargs):
        tries.append(1)
        raise OSError("No space left on device")

    monkeypatch.setattr(states, "write", refuses)
    client.submit(TRAINING[0])
    trainer.spin()
    time.sleep(0.002)
    for _ in range(5):
        trainer.engine.turn()
    assert trainer.resident(client) is not None and len(tries) == 1


def test_a_run_that_was_dropped_in_an_error_has_left_the_device_before_the_turn_ends(service):
    trainer, accelerator = occupied(service)
    client, left = service.client(), []
    trainer.spin()
    run = weakref.ref(trainer.resident(client))

    @contextmanager
    def turn(**options):
        try:
            yield
        finally:
            left.append(run() is None)

    def passed_on(*args, **kwargs):
        raise StaleOwner("the lease was lost")

    accelerator.turn, trainer.engine._settling._send = turn, passed_on
    client.submit(TRAINING[0])
    with pytest.raises(StaleOwner):
        trainer.engine.turn()
    assert left == [True]
