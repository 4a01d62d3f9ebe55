"""A dead trainer's runs in the next one's hands."""

from tests.trainer.bench import forward_backward
from tests.trainer.test_device import bits


def assert_an_heir_has_the_same_bits(service, client, trainer) -> None:
    """Let `trainer` die; the next one to take up the run of `client` has its very state."""
    before = bits(trainer.resident(client))
    trainer.die()
    second = service.trainer()
    client.submit(forward_backward(seed=1, forward=True))
    second.spin()
    assert bits(second.resident(client)) == before
