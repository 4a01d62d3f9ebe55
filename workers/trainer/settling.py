"""What was carried out becomes what is recorded: outcomes on their way into the journal, and what a refusal costs.

A run whose journal doesn't have what it did is dropped, to be rebuilt from there: whatever goes wrong with the store
or a lease costs memory, never order. What keeps failing is answered as failed, so that neither its client nor anybody
else waits for ever. Knows neither passes nor arithmetic.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import DiskRefusal, InvalidRequest, QuotaExceeded, StaleOwner, StoreFault, StoreUnavailable
from openrl.tasks.journal import Committal, Journal, Operation, Outcome, Slice, Taking
from openrl.tasks.messages import CreateModel, ForwardBackward, OptimStep
from openrl.tasks.operations import MISSING, REFUSED
from openrl.tasks.ownership import Lease
from openrl.workers.trainer.bell import Bell
from openrl.workers.trainer.doubts import Doubts
from openrl.workers.trainer.holdings import Holdings
from openrl.workers.trainer.outage import Outage
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work, broken, failed

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before asking again a store that didn't answer."""


class Settling:
    """Settles what one engine's runs have done. Its methods are for one thread, the engine's."""

    def __init__(
        self,
        *,
        journal: Journal,
        lease: Callable[[], Lease],
        holdings: Holdings,
        doubts: Doubts,
        waiter: Waiter,
        outage: Outage,
        taking: Taking,
        bell: Bell,
        stopping: threading.Event,
        discard: Callable[[Outcome], None],
    ) -> None:
        """`discard` deletes what an operation wrote that can't be registered; `bell` rings when something came."""
        self._journal = journal
        self._lease = lease
        self._holdings = holdings
        self._residents = holdings.residents
        self._doubts = doubts
        self._waiter = waiter
        self._outage = outage
        self._taking = taking
        self._bell = bell
        self._stopping = stopping
        self._discard = discard
        self.taken: list[Slice] | None = None
        """What the last commit has brought along of what is next; None: nothing was asked for."""

    # what was carried out together

    def commit_all(
        self, works: Sequence[Work], operations: Sequence[Operation], outcomes: Sequence[Outcome], *, looks: bool
    ) -> list[tuple[Work, Outcome]]:
        """Commit what was carried out; return what is. A run with an operation that isn't is dropped.

        Such a run is ahead of its journal: served on, it would do the operation a second time. What was submitted
        meanwhile is taken on the same trip if `looks`.
        """
        committed = []
        tokens = [work.run.token for work in works]
        sent = [Committal(*each) for each in zip(operations, outcomes, tokens, strict=True)]
        try:
            refusals = self._send(sent, looks=looks and self._bell.is_set())
            for number, (work, operation, outcome) in enumerate(zip(works, operations, outcomes, strict=True)):
                refusal = refusals[number]
                if self._residents.holds(work.run) and self._settle(work.run, operation, outcome, refusal):
                    committed.append((work, outcome))
                if isinstance(refusal, StoreUnavailable) and sent[number + 1 :]:
                    # The store answers again by now, or has ended us.
                    refusals[number + 1 :] = self._send(sent[number + 1 :])
        finally:
            for work in works[len(committed) :]:
                if work.run.applied < work.seq_id and self._residents.holds(work.run):
                    self._holdings.drop(work.run.key)
        return committed

    # one operation

    def fail(self, run: Run, operation: Operation, outcome: Outcome) -> bool:
        """Commit a failure that happened outside the device. False: the run was dropped."""
        void(run, operation.kind, operation.seq_id, outcome.error or "", voids=operation.voids)
        return self._commit(run, operation, _told(operation, outcome))

    def skip_void(self, run: Run, operations: Sequence[Operation]) -> list[Operation]:
        """Commit leading operations that were refused or never arrived; return the rest, up to the next such one."""
        rest: list[Operation] = []
        for operation in operations:
            if operation.kind not in (REFUSED, MISSING):
                rest.append(operation)
                continue
            if rest:
                break
            outcome = failed(f"{operation.kind} {operation.request_id}", InvalidRequest(operation.error))
            if not self.fail(run, operation, outcome):
                break
        return rest

    def give_up(self, operation: Operation, token: int, outcome: Outcome) -> bool:
        """Fail the next operation of a run without its state, which is rebuilt as recorded when it is needed."""
        self._holdings.drop((operation.tenant, operation.run_id))
        try:
            self._journal.commit(self._lease(), operation, _told(operation, outcome), token=token)
        except (StaleOwner, StoreFault) as refusal:
            log.error("%s could not be failed: %s", operation.request_id, refusal)
            return False
        self._waiter.ended(operation.tenant, operation.request_id, outcome.error or "")
        log.error("%s was given up: %s", operation.request_id, outcome.error)
        return True

    def doubt(self, operation: Operation, token: int, error: Exception) -> None:
        """Drop a run that can't be served as it is and leave it alone for a while.

        After some tries its next operation is failed; so is one more with each further try.
        """
        key = (operation.tenant, operation.run_id)
        self._holdings.drop(key)
        doubt, pause_s = self._doubts.add(key)
        if doubt.is_hopeless:
            cause = "the run's state can't be rebuilt on the server now"
            self.give_up(operation, token, broken(operation.request_id, error, cause))
        else:
            log.error("run %s can't be served; trying again in %.0f s", operation.run_id, pause_s, exc_info=error)

    # into the journal

    def _send(self, committals: Sequence[Committal], *, looks: bool = False) -> list[Exception | None]:
        """Send outcomes to the journal; return what is in the way of each. `looks`: take what is next as well."""
        if not looks:
            return self._journal.commit_all(self._lease(), committals)[0]
        self._bell.forget()
        refusals, taken = self._journal.commit_all(self._lease(), committals, then=self._taking)
        if taken is None:
            self._bell.tell(b"")
        self.taken = taken or None
        return refusals

    def _commit(self, run: Run, operation: Operation, outcome: Outcome) -> bool:
        """Write an outcome. False: the run was dropped."""
        [refusal] = self._send([Committal(operation, outcome, run.token)])
        return self._settle(run, operation, outcome, refusal)

    def _settle(self, run: Run, operation: Operation, outcome: Outcome, refusal: Exception | None) -> bool:
        """See to an outcome that was sent; keep trying while the store is down. False: the run was dropped.

        It is dropped when it is no longer ours, when what is recorded is not what took effect, and when an operation
        that is recorded as failed broke halfway.
        """
        as_recorded = not run.torn
        while refusal is not None:
            match refusal:
                case DiskRefusal() | OSError() if outcome.error is None:  # no room for the result's file
                    outcome = _told(operation, failed(f"storing the result of {operation.request_id}", refusal))
                    as_recorded = False
                case StoreUnavailable():
                    self._outage.note(refusal)
                    if self._stopping.wait(RETRY_S) or self._lease().lost:
                        self._holdings.drop(run.key)
                        return False
                case StaleOwner():
                    log.warning("run %s has passed to another worker; dropped", run.run_id)
                    self._holdings.drop(run.key)
                    return False
                case StoreFault():
                    self.doubt(operation, run.token, refusal)
                    return False
                case QuotaExceeded():  # a save, which leaves the run as it was
                    self._discard(outcome)
                    outcome = failed(operation.request_id, refusal)
                case _:
                    raise refusal
            [refusal] = self._send([Committal(operation, outcome, run.token)])
        run.applied = operation.seq_id
        self._waiter.ended(operation.tenant, operation.request_id, outcome.error or "")
        self._doubts.end(run.key)
        self._residents.note(run, operation.size, outcome.usage.seconds)
        if not as_recorded:
            self._holdings.drop(run.key)
        return as_recorded


def void(run: Run, kind: str, seq_id: int, error: str, *, voids: bool = False) -> None:
    """Apply the rule of the void gradient to an operation that failed outside the device."""
    if voids or kind == ForwardBackward.kind:
        run.make_void(seq_id, error)
    elif kind == OptimStep.kind:
        run.drop_gradient()
    elif kind == CreateModel.kind:
        run.failure = error


def _told(operation: Operation, outcome: Outcome) -> Outcome:
    """Let the failure of a creation show in the run's record."""
    return replace(outcome, run_fields={"state": "failed"}) if operation.kind == CreateModel.kind else outcome
