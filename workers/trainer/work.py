"""What the engine asks the device to do, and how failures become outcomes.

Contract only: an operation of a resident run in, an outcome out. Knows neither torch nor the store.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from openrl.tasks import disk
from openrl.tasks.errors import DiskRefusal, OpenRLError, StoreFault
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import Message
from openrl.workers.trainer.passes import FORWARDS
from openrl.workers.trainer.runs import Run

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One operation of one run."""

    run: Run
    seq_id: int
    message: Message
    is_repeated: bool = False
    """Whether it took effect once, and is done again to rebuild its run: then only its record counts."""

    @property
    def kind(self) -> str:
        """The operation's name."""
        return self.message.kind

    @property
    def packed(self) -> bool:
        """Whether it shares a forward with others."""
        return self.kind in FORWARDS

    def __str__(self) -> str:
        return f"{self.kind} {self.run.run_id}:{self.seq_id}"


def failed(what: object, error: Exception) -> Outcome:
    """Turn an exception into a failed outcome: the caller's mistake in full, ours as an id and a line in the log."""
    refusal = error.__cause__ if isinstance(error, DiskRefusal) else error
    if isinstance(refusal, OSError) and refusal.errno in disk.REFUSALS:
        return broken(what, error, f"{disk.REFUSALS[refusal.errno]}; ask for it again when the operator has made room")
    if isinstance(error, OpenRLError) and not isinstance(error, StoreFault):
        return Outcome(error=str(error), category="user")
    return broken(what, error, (isinstance(error, OSError) and error.strerror) or "internal error")


def broken(what: object, error: Exception, cause: str) -> Outcome:
    """Return an outcome that is our fault: the cause in words that a client may read, the rest in the log."""
    error_id = secrets.token_hex(4)
    log.error("error %s in %s", error_id, what, exc_info=error)
    return Outcome(error=f"{cause} (error id {error_id}); an operator finds it in the trainer's log", category="server")
