"""The trainer's engine: one thread between the journal and the device.

Takes what the journal says is next, plans a pass, has it carried out, commits each outcome at once. Woken by
doorbells, else it looks every quarter of a second: progress depends on no message. Holds no policy (`passes`)
and no arithmetic (`device`). Whatever goes wrong with the store or a lease costs memory, never order: a run
whose state is in doubt is dropped and rebuilt from the journal.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import InvalidRequest, OpenRLError, StaleOwner, StoreUnavailable
from openrl.tasks.journal import Journal, Operation, Outcome, Slice
from openrl.tasks.messages import CreateModel, ForwardBackward, LoadWeights, Message, OptimStep, decode
from openrl.tasks.operations import MISSING, REFUSED
from openrl.tasks.ownership import Lease
from openrl.workers.trainer.batch import num_tokens
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.passes import Chosen, Pending, Planner, Queue
from openrl.workers.trainer.recovery import Recovery, RecoveryFailed
from openrl.workers.trainer.residents import Key, Residents
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.work import Work, failed

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before asking again a store that didn't answer."""
DOUBT_S = 5.0
"""Pause before rebuilding again a run that couldn't be rebuilt."""


class TrainerEngine:
    """Serves the runs of one base model that this worker owns. Satisfies `openrl.tasks.worker.Engine`."""

    def __init__(
        self,
        *,
        slug: str,
        journal: Journal,
        lease: Lease,
        new_lease: Callable[[], Lease],
        device: Device,
        recovery: Recovery,
        waiter: Waiter,
        settings: TrainerSettings,
    ) -> None:
        self._slug = slug
        self._journal = journal
        self._new_lease = new_lease
        self._lease = lease
        self._state = ""
        self._device = device
        self._recovery = recovery
        self._waiter = waiter
        self._settings = settings
        self._planner = Planner(token_budget=settings.token_budget)
        self._residents = Residents(settings)
        self._messages: dict[tuple[Key, int], Message] = {}
        self._doubtful: dict[Key, float] = {}
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._store_is_down = False
        self._thread = threading.Thread(target=self._loop, name="trainer-engine", daemon=True)

    def start(self) -> None:
        """Begin to look for operations."""
        self._say("ready")
        self._thread.start()

    def wake(self) -> None:
        """Look now: something was submitted."""
        self._bell.set()

    def wait_for(self, tenant: str, request_id: str) -> None:
        """Wait until the operation has taken effect, as long as that costs nobody anything."""
        self._waiter.wait_for(tenant, request_id)

    def release_waiters(self) -> None:
        """Let every `wait_for` return."""
        self._waiter.release()

    def stop(self) -> None:
        """Finish the current pass and hand back every run; return within the bound, whatever is left."""
        self._stopping.set()
        self._bell.set()
        if self._thread.is_alive():
            self._say("stopping")
            self._thread.join(self._settings.stop_s)
        self._lease.close()

    # the loop

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._bell.clear()
            if not self._guarded(self.turn):
                self._say("ready")
                self._bell.wait(self._settings.poll_s)
        self._guarded(self.hand_back_all)

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """Take one step of the loop; nothing that a step raises may end the thread."""
        try:
            progressed = step()
            if self._store_is_down:
                log.info("the store answers again")
            self._store_is_down = False
            return progressed
        except StoreUnavailable as error:
            self._note_store_down(error)
        except StaleOwner as error:
            self._start_over(error)
        except Exception:
            log.exception("the engine's step failed; going on")
        self._stopping.wait(RETRY_S)
        return False

    def turn(self) -> bool:
        """Look once, and carry out one pass if there is something to do. Tells whether anything took effect."""
        if self._lease.lost:
            raise StaleOwner("the lease was lost")
        slices = self._journal.take(
            self._slug,
            self._lease,
            max_runs=self._settings.max_runs,
            max_ops_per_run=self._settings.max_operations,
            max_bytes=self._settings.max_bytes,
        )
        progressed = False
        operations: dict[Key, dict[int, Operation]] = {}
        queues: list[Queue] = []
        for each in slices:
            run = self._resident(each)
            if run is None:
                continue
            rest = self._skip_void(run, each.operations)
            progressed |= len(rest) < len(each.operations)
            queue = self._queue(run, rest)
            if queue.pending:
                queues.append(queue)
                operations[run.key] = {operation.seq_id: operation for operation in rest}
        progressed |= self._carry_out(queues, operations)
        self._make_room({each.key for each in queues})
        return progressed

    def _carry_out(self, queues: list[Queue], operations: dict[Key, dict[int, Operation]]) -> bool:
        plan = self._planner.plan(queues)
        # Each single is committed before the next begins: only then may a store that fails be asked again.
        groups = [[chosen] for chosen in plan.singles] + ([list(plan.packed)] if plan.packed else [])
        if groups:
            self._say("busy")
        for group in groups:
            if self._stopping.is_set():
                break
            self._pass([operations[chosen.tenant, chosen.run_id][chosen.seq_id] for chosen in self._still_here(group)])
        if groups:
            self._lease.touch_busy()
        return bool(groups)

    def _still_here(self, group: list[Chosen]) -> list[Chosen]:
        """Leave out what an earlier group of this plan has thrown over: its run was dropped."""
        runs = [self._residents.get((chosen.tenant, chosen.run_id)) for chosen in group]
        return [chosen for chosen, run in zip(group, runs, strict=True) if run and run.applied < chosen.seq_id]

    def _pass(self, operations: Sequence[Operation]) -> None:
        """Carry out the operations together and commit each outcome."""
        works = [self._work(operation) for operation in operations]
        if not works:
            return
        began = time.monotonic()
        try:
            outcomes = self._device.execute(works)
        except StoreUnavailable:
            raise
        except Exception as error:
            outcomes = [self._broken(work, error) for work in works]
        seconds = time.monotonic() - began
        committed = self._commit_all(works, operations, outcomes)
        tokens = sum(num_tokens(work.message.data) for work in works if isinstance(work.message, ForwardBackward))
        log.info(
            "pass: %d runs, %d operations (%s), %d tokens, %.0f ms",
            len({work.run.key for work in works}),
            len(works),
            ", ".join(sorted({work.kind for work in works})),
            tokens,
            seconds * 1e3,
        )
        for work, outcome in committed:
            self._after(work, outcome)

    def _commit_all(
        self, works: Sequence[Work], operations: Sequence[Operation], outcomes: Sequence[Outcome]
    ) -> list[tuple[Work, Outcome]]:
        """Commit what was carried out; return what is. A run with an operation that isn't is dropped.

        Such a run is ahead of its journal: served on, it would do the operation a second time.
        """
        committed = []
        try:
            for work, operation, outcome in zip(works, operations, outcomes, strict=True):
                if self._residents.holds(work.run) and self._commit(work.run, operation, outcome):
                    committed.append((work, outcome))
        finally:
            for work in works[len(committed) :]:
                if work.run.applied < work.seq_id and self._residents.holds(work.run):
                    self._forget(work.run.key)
        return committed

    def _work(self, operation: Operation) -> Work:
        key = (operation.tenant, operation.run_id)
        run = self._residents.get(key)
        assert run is not None, "a run in the plan is resident"
        return Work(run=run, seq_id=operation.seq_id, message=self._messages[key, operation.seq_id])

    def _broken(self, work: Work, error: Exception) -> Outcome:
        """Fail an operation after the device broke in a way that it couldn't pin on one of them."""
        outcome = failed(work, error)
        _void(work.run, work.kind, work.seq_id, outcome.error or "")
        return outcome

    # one run

    def _resident(self, each: Slice) -> Run | None:
        """Return the run of a slice as the journal has it, rebuilt if need be; None if that isn't possible now."""
        key = (each.tenant, each.run_id)
        run = self._residents.get(key)
        if run is not None and (run.token, run.applied) == (each.token, each.applied):
            return run
        if run is not None:
            log.warning("run %s is at %d here and at %d in the store", each.run_id, run.applied, each.applied)
            self._forget(key)
        if self._doubtful.get(key, 0.0) > time.monotonic():
            return None
        try:
            run = self._recovery.restore(each.tenant, each.run_id, token=each.token, applied=each.applied)
        except (RecoveryFailed, OSError):
            log.exception("run %s can't be rebuilt; trying again in %.0f s", each.run_id, DOUBT_S)
            self._doubtful[key] = time.monotonic() + DOUBT_S
            return None
        self._doubtful.pop(key, None)
        self._residents.add(run)
        return run

    def _skip_void(self, run: Run, operations: Sequence[Operation]) -> list[Operation]:
        """Commit leading operations that can't be carried out; return the rest, up to the next such one."""
        rest: list[Operation] = []
        for operation in operations:
            problem = self._problem(run, operation)
            if problem is None:
                rest.append(operation)
                continue
            if rest:
                break
            outcome = failed(f"{operation.kind} {operation.request_id}", problem)
            if operation.kind == CreateModel.kind:
                outcome = replace(outcome, run_fields={"state": "failed"})
            _void(run, operation.kind, operation.seq_id, outcome.error or "", voids=operation.voids)
            if not self._commit(run, operation, outcome):
                break
        return rest

    def _problem(self, run: Run, operation: Operation) -> Exception | None:
        """Say why an operation can't be carried out: it was refused, never arrived, or can't be read."""
        if operation.kind in (REFUSED, MISSING):
            return InvalidRequest(operation.error)
        key = (run.key, operation.seq_id)
        if key not in self._messages:
            try:
                self._messages[key] = decode(operation.kind, operation.body)
            except Exception as error:  # whatever a broken body makes the decoder raise, it costs this operation alone
                return ValueError(f"unreadable body: {error!r}")
        return None

    def _queue(self, run: Run, operations: Sequence[Operation]) -> Queue:
        pending = []
        for operation in operations:
            message = self._messages[run.key, operation.seq_id]
            tokens = num_tokens(message.data) if isinstance(message, ForwardBackward) else 0
            pending.append(Pending(kind=message.kind, seq_id=operation.seq_id, tokens=tokens))
        return Queue(tenant=run.tenant, run_id=run.run_id, pending=tuple(pending))

    def _commit(self, run: Run, operation: Operation, outcome: Outcome) -> bool:
        """Write an outcome; keep trying while the store is down. False: the run is no longer ours, and dropped."""
        while True:
            try:
                self._journal.commit(self._lease, operation, outcome, token=run.token)
                break
            except StoreUnavailable as error:
                self._note_store_down(error)
                if self._stopping.wait(RETRY_S) or self._lease.lost:
                    self._forget(run.key)
                    return False
            except StaleOwner:
                log.warning("run %s has passed to another worker; dropped", run.run_id)
                self._forget(run.key)
                return False
            except OSError as error:  # no room for the result's file
                if outcome.error is not None:
                    raise
                outcome = failed(f"storing the result of {operation.request_id}", error)
                _void(run, operation.kind, operation.seq_id, outcome.error or "")
        run.applied = operation.seq_id
        self._messages.pop((run.key, operation.seq_id), None)
        self._residents.note(run, len(operation.body))
        return True

    def _after(self, work: Work, outcome: Outcome) -> None:
        """Write a recovery snapshot where one is due: after a load, and after a step when enough has built up."""
        message, run = work.message, work.run
        if outcome.error is not None:
            return
        loaded = isinstance(message, LoadWeights) or (isinstance(message, CreateModel) and bool(message.checkpoint_dir))
        if loaded or (isinstance(message, OptimStep) and self._residents.snapshot_due(run)):
            self._snapshot(run)

    def _snapshot(self, run: Run) -> bool:
        """Write a recovery snapshot. False: the disk refused or the run is another's; the journal still has all."""
        try:
            self._recovery.snapshot(run, self._lease)
        except StoreUnavailable:
            raise
        except (OpenRLError, OSError) as error:
            log.error("no recovery snapshot of run %s: %s", run.run_id, error)
            return False
        finally:
            if self._residents.holds(run):
                self._residents.note_saved(run)
        return True

    # letting go

    def hand_back_all(self) -> bool:
        """Write out and release every run, as many as the time for stopping allows."""
        deadline = time.monotonic() + self._settings.stop_s
        for run in self._residents:
            if time.monotonic() > deadline:
                log.warning("no time to hand back %d runs; takeover rebuilds them", len(self._residents))
                break
            self._hand_back(run)
        return False

    def _hand_back(self, run: Run) -> None:
        if not run.changed or self._snapshot(run):
            self._journal.release(self._lease, run.tenant, run.run_id, run.token)
        self._forget(run.key)

    def _make_room(self, waiting: set[Key]) -> None:
        for run in self._residents.surplus(waiting):
            log.info("handing back run %s: idle", run.run_id)
            self._hand_back(run)

    def _forget(self, key: Key) -> None:
        """Drop a run's device state and what was decoded for it."""
        self._residents.drop(key)
        self._messages = {name: message for name, message in self._messages.items() if name[0] != key}

    def _start_over(self, reason: StaleOwner) -> None:
        """Drop every run: this process owned nothing for a while. A new lease is a new owner."""
        log.warning("%s; dropping %d runs and starting over", reason, len(self._residents))
        self._residents.clear()
        self._messages.clear()
        if not self._stopping.is_set():
            self._guarded(self._renew)

    def _renew(self) -> bool:
        self._lease.close()
        self._lease = self._new_lease()
        self._state = ""
        return False

    def _say(self, state: str) -> None:
        """Tell the store what this worker is doing, if that is news."""
        if self._state not in (state, "stopping"):
            self._state = state
            self._lease.set_state(state)

    def _note_store_down(self, error: StoreUnavailable) -> None:
        if not self._store_is_down:
            log.error("%s; waiting for it", error)
        self._store_is_down = True


def _void(run: Run, kind: str, seq_id: int, error: str, *, voids: bool = False) -> None:
    """Apply the rule of the void gradient to an operation that failed outside the device."""
    if voids or kind == ForwardBackward.kind:
        run.make_void(seq_id, error)
    elif kind == OptimStep.kind:
        run.drop_gradient()
    elif kind == CreateModel.kind:
        run.failure = error
