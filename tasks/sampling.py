"""The sampler's Celery tasks. Ids in, nothing out; the waiting set in the journal decides what runs."""

from __future__ import annotations

from openrl.tasks.accelerator import AcceleratorTask
from openrl.tasks.celery import celery


@celery.task(bind=True, base=AcceleratorTask, name="sampler.sample")
def sample(self: AcceleratorTask, tenant: str, request_id: str) -> None:
    """Ring for one sampling request and wait until all its sequences are drawn."""
    self.ring(tenant, request_id)


@celery.task(name="sampler.notice")
def notice() -> None:
    """Do nothing: the message only ends a blocking read, so that the worker sees a new tenant's queue."""
