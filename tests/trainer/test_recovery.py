"""A run that another trainer takes over has the same bits, whatever moment the first one died in."""

import time

import pytest

from openrl.tasks import keys
from openrl.tasks.errors import StaleOwner, StoreUnavailable
from openrl.tasks.messages import LoadWeights, OptimStep, SaveWeights
from openrl.workers.trainer.doubts import Doubts
from openrl.workers.trainer.residency import state_bytes
from openrl.workers.trainer.work import Work
from tests.trainer.bench import forward_backward
from tests.trainer.heirs import assert_an_heir_has_the_same_bits
from tests.trainer.test_device import bits, poisoned


def script(client) -> list:
    """What a client does, one message or refusal after the other; position 0 is the create."""
    return [
        lambda: client.submit(forward_backward(lengths=[40, 70, 11], seed=1)),
        lambda: client.submit(forward_backward("ppo", [20, 20], seed=2)),
        lambda: client.submit(OptimStep(learning_rate=0.01, weight_decay=0.1)),
        lambda: client.submit(forward_backward(seed=3, forward=True)),
        lambda: client.submit(forward_backward(seed=4)),
        lambda: client.submit(SaveWeights(name="half")),
        lambda: client.submit(poisoned()),
        lambda: client.submit(forward_backward(seed=5)),
        lambda: client.submit(OptimStep(learning_rate=0.01)),
        lambda: client.submit(forward_backward("importance_sampling", [9], seed=6)),
        lambda: client.submit(OptimStep(learning_rate=0.02, grad_clip_norm=0.5)),
        lambda: client.refuse("forward_backward"),
        lambda: client.submit(forward_backward(seed=7)),
        lambda: client.submit(OptimStep()),
        lambda: client.submit(forward_backward(seed=8)),
        lambda: client.submit(OptimStep()),
    ]


def undisturbed(service) -> tuple[list[bytes], str]:
    trainer, client = service.trainer(), service.client()
    for act in script(client):
        act()
        trainer.spin()
    result = bits(trainer.resident(client)), client.states()
    trainer.die()
    return result


@pytest.mark.parametrize("graceful", [False, True], ids=["killed", "handed back"])
@pytest.mark.parametrize("deaths", [(1,), (2,), (6,), (8,), (11,), (13,), (16,), (1, 5, 9, 14), tuple(range(17))])
def test_a_run_that_changes_hands_ends_with_the_same_bits(service, deaths, graceful):
    expected = undisturbed(service)
    client, trainer = service.client(), service.trainer()
    for position, act in enumerate(script(client)):
        if position in deaths:
            trainer.spin()
            if graceful:
                trainer.engine.hand_back_all()
            trainer.die()
            trainer = service.trainer()
        act()
    trainer.spin()
    if len(script(client)) in deaths:
        trainer.engine.hand_back_all() if graceful else None
        trainer.die()
        trainer = service.trainer()
        client.submit(forward_backward(seed=1, forward=True))
        trainer.spin()
        assert (bits(trainer.resident(client)), client.states()[:-1]) == expected
    else:
        assert (bits(trainer.resident(client)), client.states()) == expected


def test_a_pass_that_was_not_committed_is_done_once_by_the_next_owner(service):
    expected = undisturbed(service)
    client, trainer = service.client(), service.trainer()
    acts = script(client)
    for act in acts:
        act()
    for _ in range(9):
        trainer.engine.turn()
    slices = service.journal.take("tiny", trainer.lease)
    operation = slices[0].operations[0]
    trainer.device.execute(
        [Work(run=trainer.resident(client), seq_id=operation.seq_id, message=forward_backward(seed=5))]
    )
    trainer.die()
    second = service.trainer()
    second.spin()
    assert (bits(second.resident(client)), client.states()) == expected


def test_the_first_owner_that_wakes_up_late_commits_nothing_and_drops_its_state(service):
    client, first = service.client(), service.trainer()
    first.spin()
    client.submit(forward_backward(seed=1))
    execute = first.device.execute

    def slow(works):
        outcomes = execute(works)
        first.die()
        service.second = service.trainer()
        service.second.spin()
        return outcomes

    first.device.execute = slow
    first.engine.turn()
    assert client.states() == "dd"
    assert len(first.engine._residents) == 0
    client.submit(OptimStep())
    assert first.engine.turn() is False or first.lease.lost
    service.second.spin()
    assert client.states() == "ddd"
    assert service.second.resident(client).moments.step == 1


def test_a_position_that_went_back_makes_the_worker_rebuild(service):
    client, trainer = service.client(), service.trainer()
    client.submit(forward_backward(seed=1))
    trainer.spin()
    run = trainer.resident(client)
    run.applied += 1
    client.submit(OptimStep())
    trainer.spin()
    assert trainer.resident(client) is not run
    assert client.states() == "ddd"


def test_a_snapshot_follows_a_step_when_enough_has_built_up_and_trims_the_journal(service):
    client, trainer = service.client(), service.trainer(snapshot_operations=5)
    for number in range(3):
        client.submit(forward_backward(seed=number))
        client.submit(OptimStep())
    trainer.spin()
    directory, applied = service.journal.snapshot("t", client.run_id)
    assert applied == 4
    history = list(service.journal.history("t", client.run_id, after=-1, upto=6))
    assert [bool(operation.body) for operation in history] == [False] * 5 + [True] * 2
    for number in range(3):
        client.submit(forward_backward(seed=number))
        client.submit(OptimStep())
    trainer.spin()
    assert service.journal.snapshot("t", client.run_id)[1] > applied
    assert not (service.store.settings.data_dir / directory).exists()
    assert_an_heir_has_the_same_bits(service, client, trainer)


def test_a_load_is_covered_by_a_snapshot_at_once(service):
    client, trainer = service.client(), service.trainer()
    client.submit(SaveWeights(name="start"))
    trainer.spin()
    checkpoint = service.registry.checkpoint("t", client.run_id, "weights/start")
    client.submit(
        LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=False)
    )
    trainer.spin()
    assert service.journal.snapshot("t", client.run_id)[1] == 2
    for path in (service.store.settings.data_dir / checkpoint.directory).iterdir():
        path.unlink()
    assert_an_heir_has_the_same_bits(service, client, trainer)


def test_a_run_that_only_was_created_leaves_no_files_when_handed_back(service):
    client, trainer = service.client(), service.trainer()
    trainer.spin()
    trainer.engine.hand_back_all()
    assert not list(service.store.settings.data_dir.rglob("*.safetensors"))
    client.submit(forward_backward(seed=1))
    trainer.spin()
    assert client.states() == "dd"


def test_a_run_that_can_not_be_rebuilt_waits_and_leaves_the_others_alone(service, caplog):
    now = [0.0]
    trainer = service.trainer(doubts=Doubts(1, clock=lambda: now[0]))
    broken, other = service.client("a"), service.client("b")
    for client in (broken, other):
        client.submit(forward_backward(seed=1))
    trainer.spin()
    trainer.engine.hand_back_all()
    directory, _ = service.journal.snapshot("a", broken.run_id)
    file = service.store.settings.data_dir / directory / "adapter_model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + b"x")
    for client in (broken, other):
        client.submit(OptimStep())
    trainer.spin()
    assert (broken.states(), other.states()) == ("ddp", "ddd")
    assert "adapter_model.safetensors" in caplog.text
    file.write_bytes(good)
    now[0] += 1
    trainer.spin()
    assert broken.states() == "ddd"


def test_a_snapshot_by_a_stale_owner_does_not_count(service):
    client, first = service.client(), service.trainer()
    client.submit(forward_backward(seed=1))
    first.spin()
    run = first.resident(client)
    first.die()
    client.submit(OptimStep())
    second = service.trainer()
    second.spin()
    with pytest.raises(StaleOwner):
        first.snapshots.write(run, first.lease)
    assert service.journal.snapshot("t", client.run_id) is None
    assert not list(service.store.settings.data_dir.rglob("*.safetensors"))


class Unsure:
    """Registers a snapshot, and the answer is lost."""

    def __init__(self, journal) -> None:
        self._journal = journal

    def __getattr__(self, name):
        return getattr(self._journal, name)

    def record_snapshot(self, *args) -> None:
        self._journal.record_snapshot(*args)
        raise StoreUnavailable("the store does not answer")


def test_a_snapshot_whose_registration_was_not_answered_stays_and_gives_the_run_back(service):
    client, trainer = service.client(), service.trainer()
    client.submit(forward_backward(seed=1))
    client.submit(OptimStep(learning_rate=0.01))
    trainer.spin()
    before = bits(trainer.resident(client))
    trainer.snapshots._journal = Unsure(service.journal)
    with pytest.raises(StoreUnavailable):
        trainer.snapshots.write(trainer.resident(client), trainer.lease)
    trainer.die()
    second = service.trainer()
    client.submit(forward_backward(seed=1, forward=True))
    second.spin()
    assert client.states() == "dddd"
    assert bits(second.resident(client)) == before


def test_a_snapshot_that_was_not_answered_is_found_by_the_second_try(service):
    client, trainer = service.client(), service.trainer()
    client.submit(forward_backward(seed=1))
    trainer.spin()
    run, journal = trainer.resident(client), trainer.snapshots._journal
    trainer.snapshots._journal = Unsure(service.journal)
    with pytest.raises(StoreUnavailable):
        trainer.snapshots.write(run, trainer.lease)
    trainer.snapshots._journal = journal
    directory, _ = service.journal.snapshot("t", client.run_id)
    written = (service.store.settings.data_dir / directory / "manifest.json").stat().st_mtime_ns
    trainer.snapshots.write(run, trainer.lease)
    assert not run.changed
    assert service.journal.snapshot("t", client.run_id) == (directory, 1)
    assert (service.store.settings.data_dir / directory / "manifest.json").stat().st_mtime_ns == written


def test_a_run_of_nothing_but_forwards_is_trimmed_without_writing_it_again(service):
    client, trainer = service.client(), service.trainer(snapshot_operations=4)
    for number in range(11):
        client.submit(forward_backward(seed=number, forward=True))
        trainer.spin()  # the next snapshot is begun once the one before it is written
    directory, applied = service.journal.snapshot("t", client.run_id)
    assert applied >= 8
    assert service.store.redis.hlen(keys.bodies("t", client.run_id)) == 11 - applied
    assert len(list(service.store.settings.data_dir.rglob("manifest.json"))) == 1
    assert_an_heir_has_the_same_bits(service, client, trainer)
    assert (service.store.settings.data_dir / directory).exists()


def spoil_body(service, client) -> None:
    service.store.redis.hset(keys.bodies(client.tenant, client.run_id), "1", b"=\xff\xff")


def spoil_manifest(service, client) -> None:
    directory, _ = service.journal.snapshot(client.tenant, client.run_id)
    path = service.store.settings.data_dir / directory / "manifest.json"
    path.write_text(path.read_text().replace('"void"', '"avoid"'))


@pytest.mark.parametrize("spoil", [spoil_body, spoil_manifest])
def test_whatever_keeps_a_run_from_being_rebuilt_others_go_on_and_its_client_gets_an_answer(service, spoil):
    broken, other, trainer = service.client("a"), service.client("b"), service.trainer()
    for client in (broken, other):
        client.submit(forward_backward(seed=1))
    trainer.spin()
    if spoil is spoil_manifest:
        trainer.engine.hand_back_all()
    trainer.die()
    spoil(service, broken)
    second = service.trainer(doubt_s=0.001)
    for client in (broken, other):
        client.submit(OptimStep())
    second.spin()
    assert (broken.states(), other.states()) == ("ddp", "ddd")
    deadline = time.monotonic() + 60
    while broken.states() == "ddp" and time.monotonic() < deadline:
        second.spin()
    future = broken.future(2)
    assert (future.state, future.category) == ("failed", "server")
    assert "error id" in future.error and "KeyError" not in future.error
    assert service.registry.run("a", broken.run_id).applied == 2


@pytest.mark.parametrize("how", ["created", "created from a checkpoint", "loaded"])
def test_a_run_lives_on_where_the_next_trainer_has_no_room_for_one_like_it(service, how):
    trainer, origin = service.trainer(), service.client()
    origin.submit(SaveWeights(name="base"))
    trainer.spin()
    saved = service.registry.checkpoint("t", origin.run_id, "weights/base")
    source = {"checkpoint_dir": saved.directory, "checkpoint_path": saved.uri, "with_optimizer": False}
    trainer.snapshots.begin = trainer.snapshots.write = lambda *_: False  # it dies before its first one
    client = service.client(**(source if how == "created from a checkpoint" else {}))
    if how == "loaded":
        client.submit(LoadWeights(**source))
    client.submit(forward_backward(seed=1))
    trainer.spin()
    assert service.journal.snapshot("t", client.run_id) is None
    before, room = bits(trainer.resident(client)), state_bytes(trainer.resident(client).trained) - 1
    trainer.die()
    second, late = service.trainer(device_bytes=room), service.client()
    client.submit(forward_backward(seed=2, forward=True))
    second.spin()
    assert client.states() == "d" * (client.seq + 1) and bits(second.resident(client)) == before
    assert late.states() == "f", "what was not accepted yet is refused"


def test_a_body_that_is_lost_is_never_skipped_in_silence(service):
    client, trainer = service.client(), service.trainer()
    client.submit(forward_backward(lengths=[90], seed=1))
    trainer.spin()
    trainer.die()
    spool = service.store.settings.data_dir / "spool"
    spool.rename(spool.with_name("away"))
    client.submit(OptimStep())
    now = [0.0]
    second = service.trainer(doubts=Doubts(1, clock=lambda: now[0]))
    second.spin()
    assert service.futures.get("t", f"{client.run_id}:2").state == "pending"
    spool.with_name("away").rename(spool)
    now[0] += 1
    second.spin()
    assert client.states() == "ddd"
