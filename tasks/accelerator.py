"""Tasks whose operations are done on an accelerator, which their worker may have to wait for."""

from __future__ import annotations

from typing import ClassVar

from openrl.tasks.worker import EngineTask


class AcceleratorTask(EngineTask):
    """A task that needs its worker's turn on an accelerator: the engine takes it, and this task waits with it.

    How long, `openrl accelerators` tells by owner; grants, parks and restores come as Celery events (`turn_events`).
    """

    abstract = True
    accelerator: ClassVar[str] = ""
    """Where this process takes turns; empty: its device is its own, and nothing is waited for. `celery inspect
    registered accelerator` shows it for each task of each worker."""
