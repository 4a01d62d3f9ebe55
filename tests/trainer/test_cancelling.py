"""Operations cancelled while a trainer is at work: what it has in hand is finished, what waits is never done."""

from __future__ import annotations

from openrl.tasks.cancelling import Cancelling
from openrl.tasks.messages import OptimStep
from tests.trainer.bench import forward_backward
from tests.trainer.test_device import bits


def cancel_during_the_next_pass(service, trainer, client, *seqs: int) -> None:
    """Have a pass begin with these numbers cancelled, as by another process."""
    execute = trainer.device.execute

    def carry_out(works):
        trainer.device.execute = execute
        for seq in seqs:
            assert Cancelling(service.store).cancel("t", f"{client.run_id}:{seq}") == "asked"
        return execute(works)

    trainer.device.execute = carry_out


def test_what_is_in_hand_is_finished_and_what_waits_is_cancelled_and_voids(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    for seed in (1, 2):
        client.submit(forward_backward(seed=seed))
    client.submit(OptimStep())
    cancel_during_the_next_pass(service, trainer, client, 1, 2)
    trainer.spin()
    assert client.states() == "ddff"
    assert client.future(2).error == "cancelled by its client"
    assert "operation 2 failed (cancelled by its client)" in client.future(3).error
    client.submit(forward_backward(seed=3))
    client.submit(OptimStep())
    trainer.spin()
    assert client.states() == "ddffdd"
    assert service.journal.depth("tiny")["train"] == {}


def test_a_cancelled_step_leaves_the_gradient_for_the_next_one(service):
    trainer, client = service.trainer(), service.client()
    trainer.spin()
    client.submit(forward_backward(seed=1))
    for rate in (0.5, 0.01):
        client.submit(OptimStep(learning_rate=rate))
    cancel_during_the_next_pass(service, trainer, client, 2)
    trainer.spin()
    assert client.states() == "ddfd"
    assert client.answer(3)["metrics"]["learning_rate"] == 0.01


def test_a_run_is_rebuilt_after_a_kill_as_if_the_cancelled_operations_had_never_been(service):
    trainer, client, undisturbed = service.trainer(), service.client(), service.client()
    trainer.spin()
    for one in (client, undisturbed):
        one.submit(forward_backward(seed=1))
        one.submit(OptimStep(learning_rate=0.01))
        trainer.spin()
    client.submit(forward_backward(seed=7))
    client.submit(forward_backward(seed=8))
    client.submit(OptimStep(learning_rate=0.5))
    cancel_during_the_next_pass(service, trainer, client, 4, 5)
    trainer.spin()
    assert client.states() == "ddddff"
    trainer.die()
    successor = service.trainer()
    for one in (client, undisturbed):
        one.submit(OptimStep(learning_rate=0.3))
        one.submit(forward_backward(seed=2))
        one.submit(OptimStep(learning_rate=0.01))
        successor.spin()
    assert client.states() == "ddddfffdd" and undisturbed.states() == "dddfdd"
    assert bits(successor.resident(client)) == bits(successor.resident(undisturbed))
