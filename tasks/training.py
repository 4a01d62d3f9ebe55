"""The trainer's Celery tasks: one name for each kind of operation, so that operators see them apart.

Ids in, nothing out. A message may be lost, doubled or late: the journal alone decides what runs, and when.
"""

from __future__ import annotations

from openrl.tasks.accelerator import AcceleratorTask
from openrl.tasks.celery import celery


@celery.task(bind=True, base=AcceleratorTask, name="trainer.create_model")
def create_model(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for the creation of a run and wait until it exists."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.forward_backward")
def forward_backward(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one forward_backward and wait until its gradient is accumulated."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.forward")
def forward(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one forward pass that leaves no gradient and wait for its result."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.optim_step")
def optim_step(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one optimizer step and wait until it is applied."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.save_weights")
def save_weights(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one training checkpoint and wait until it is on disk."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.save_weights_for_sampler")
def save_weights_for_sampler(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one version of the weights for sampling and wait until it is on disk."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.save_weights_external")
def save_weights_external(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one adapter in PEFT's format and wait until it is on disk."""
    self.ring(tenant, request_id)


@celery.task(bind=True, base=AcceleratorTask, name="trainer.load_weights")
def load_weights(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for loading a checkpoint into a run and wait until it is loaded."""
    self.ring(tenant, request_id)


@celery.task(name="trainer.notice")
def notice() -> None:
    """Do nothing: the message only ends a blocking read, so that the worker sees a new tenant's queue."""
