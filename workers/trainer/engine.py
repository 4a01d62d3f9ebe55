"""The trainer's engine: one thread between the journal and the device.

Takes what the journal says is next, plans a pass, reads what was chosen, has it carried out, commits each
outcome at once. Woken by doorbells, else it looks every quarter of a second: progress depends on no message.
Holds no policy (`passes`) and no arithmetic (`device`). Whatever goes wrong with the store or a lease costs
memory, never order: a run whose state is in doubt is dropped and rebuilt from the journal. What keeps failing, or
keeps killing workers, is answered as failed, so that neither its client nor anybody else waits for ever.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import DiskRefusal, InvalidRequest, QuotaExceeded, StaleOwner, StoreFault, StoreUnavailable
from openrl.tasks.journal import Committal, Journal, Operation, Outcome, Slice, Taking
from openrl.tasks.messages import CreateModel, ForwardBackward, LoadWeights, Message, OptimStep, decode
from openrl.tasks.operations import MISSING, REFUSED, Usage
from openrl.tasks.ownership import Lease
from openrl.tasks.process import Streak
from openrl.timeslice.errors import NotGranted
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.holdings import Holdings
from openrl.workers.trainer.passes import Chosen, Pending, Planner, Queue
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.residents import Key
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.snapshots import Snapshots
from openrl.workers.trainer.work import Work, broken, failed

log = logging.getLogger(__name__)

RETRY_S = 0.5
"""Pause before asking again a store that didn't answer."""
MOST_TRIES = 5
"""After so many tries to rebuild a run its next operation fails, so that its client gets an answer."""
MOST_CRASHES = 3
"""An operation that so many workers died of is failed, not tried again."""

Messages = dict[tuple[Key, int], Message]


@dataclass(slots=True)
class Doubt:
    """How often a run could not be rebuilt since its last operation took effect; not tried again `until` then."""

    tries: int = 0
    until: float = 0.0


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
        snapshots: Snapshots,
        waiter: Waiter,
        settings: TrainerSettings,
        streak: Streak | None = None,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Serve what the lease's worker may; no `accelerator`: the device is this process's own."""
        self._slug = slug
        self._accelerator = accelerator or Accelerator()
        self._journal = journal
        self._new_lease = new_lease
        self._lease = lease
        self._state = ""
        self._device = device
        self._waiter = waiter
        self._settings = settings
        self._streak = streak or Streak()
        self._planner = Planner(token_budget=settings.token_budget, runs_per_pass=settings.most_runs_of_a_pass)
        self._holdings = Holdings(
            slug=slug,
            journal=journal,
            recovery=recovery,
            snapshots=snapshots,
            settings=settings,
            accelerator=self._accelerator,
            lies_in_host=device.residency.lies_in_host,
        )
        self._residents = self._holdings.residents
        self._accelerator.hold(lambda: device.residency.tensors(self._residents))
        self._doubtful: dict[Key, Doubt] = {}
        self._taking = Taking(slug, settings.max_runs, settings.max_operations, settings.max_runs)
        self._taken: list[Slice] | None = None
        """What the last commit has brought along of what is next; None: nothing was asked for."""
        self._bell = threading.Event()
        self._stopping = threading.Event()
        self._store_is_down = False
        self._has_more = False
        """Whether the last turn left something, so that another has to follow it. What comes later rings."""
        self._thread = threading.Thread(target=self._loop, name="trainer-engine", daemon=True)

    def start(self) -> None:
        """Begin to look for operations."""
        self._say("ready")
        self._thread.start()

    def wake(self) -> None:
        """Look now: something was submitted."""
        self._bell.set()

    def knows(self, tenant: str, request_id: str) -> bool:
        """Tell whether the journal has already offered the operation here."""
        run_id, _, seq = request_id.rpartition(":")
        return self._holdings.knows((tenant, run_id), int(seq))

    def wait_for(self, tenant: str, request_id: str) -> None:
        """Wait until the operation has taken effect, as long as that costs nobody anything."""
        self._waiter.wait_for(tenant, request_id, is_next=self.knows(tenant, request_id))

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
        if not self._thread.is_alive():
            self._accelerator.close()
        self._lease.close()

    # the loop

    def _loop(self) -> None:
        while not self._stopping.is_set():
            if self._taken is None:
                self._bell.clear()
            if not (self._guarded(self.turn) and (self._has_more or self._taken)):
                self._say("ready")
                self._bell.wait(self._settings.poll_s)
        self._guarded(self.hand_back_all)

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """Take one step of the loop; nothing that a step raises may end the thread alone."""
        try:
            progressed = step()
            if self._store_is_down:
                log.info("the store answers again")
            self._store_is_down = False
            self._streak.end()
            return progressed
        except StoreUnavailable as error:
            self._note_store_down(error)
        except StaleOwner as error:
            self._start_over(error)
        except NotGranted:  # nobody waits for a turn who is asked to stop
            return False
        except Exception as error:
            log.exception("the engine's step failed; going on")
            self._streak.add(error)
        self._stopping.wait(RETRY_S)
        return False

    def turn(self) -> bool:
        """Look once, and carry out one pass if there is something to do. Tells whether anything took effect."""
        if self._lease.lost:
            raise StaleOwner("the lease was lost")
        slices, self._taken = self._taken, None
        is_brought = slices is not None
        if slices is None:
            slices = self._journal.take_next(self._lease, self._taking)
        self._holdings.note_offered(slices)
        ready = [each for each in slices if not self._pauses(each)]
        # What was brought along isn't followed by more of that: to cancel something takes a look with empty hands.
        progressed = bool(ready) and self._in_turn(ready, looks=not is_brought)
        waiting = {(each.tenant, each.run_id) for each in (*slices, *(self._taken or ()))}
        self._has_more = len(slices) == self._settings.max_runs or any(self._left(each) for each in ready)
        self._holdings.let_go(waiting, self._lease, gives_up=lambda: self._stopping.is_set() or self._bell.is_set())
        return progressed

    def _in_turn(self, ready: Sequence[Slice], *, looks: bool) -> bool:
        """Carry out what is ready, once the accelerator is ours. Tells whether anything took effect."""
        with self._accelerator.turn(gives_up=self._stopping.is_set):
            try:
                progressed = any(self._alone(each) for each in ready if each.crashes)  # one of them in each turn
                return self._serve([each for each in ready if not each.crashes], looks=looks) or progressed
            except Exception as error:
                _let_go_of_frames(error)
                raise

    def _left(self, each: Slice) -> bool:
        """Tell whether a slice, or what may have been cut off behind it, is still to be carried out."""
        run = self._residents.get((each.tenant, each.run_id))
        last = each.operations[-1].seq_id
        return run is None or run.applied < last or len(each.operations) == self._settings.max_operations

    def _alone(self, each: Slice) -> bool:
        """Carry out the first operation of a run whose owner died, by itself: if it kills again, it is the guilty one.

        Rebuilding the run counts as a part of it. One that has killed too often is failed.
        """
        first = each.operations[0]
        if each.crashes >= MOST_CRASHES:
            cause = f"the worker died {each.crashes} times while running it; it was not tried again"
            return self._give_up(first, each.token, Outcome(error=cause, category="server"))
        if not self._journal.begin(self._lease, each):
            return False
        return self._serve([replace(each, operations=(first,))])

    def _serve(self, slices: Sequence[Slice], *, looks: bool = False) -> bool:
        """Carry out one pass over these runs. Tells whether anything took effect.

        `looks`: nothing else is carried out in this turn, so that the last commit may bring what is next.
        """
        progressed = False
        operations: dict[tuple[Key, int], Operation] = {}
        queues: list[Queue] = []
        for each in slices:
            run = self._resident(each)
            if run is None:
                continue
            rest = self._skip_void(run, each.operations)
            progressed |= len(rest) < len(each.operations)
            if rest:
                queues.append(_queue(run, rest))
                operations |= {(run.key, operation.seq_id): operation for operation in rest}
        return self._carry_out(queues, operations, looks=looks) or progressed

    def _carry_out(self, queues: list[Queue], operations: dict[tuple[Key, int], Operation], *, looks: bool) -> bool:
        groups = self._planner.plan(queues).groups()
        if not groups:
            return False
        self._say("busy")
        messages = self._read([operations[_name(chosen)] for group in groups for chosen in group])
        for group in groups:
            if self._stopping.is_set():
                break
            names = [_name(chosen) for chosen in self._still_here(group)]
            batch = [(operations[name], messages[name]) for name in names if name in messages]
            self._pass(batch, looks=looks and group is groups[-1])
        self._lease.touch_busy()
        return True

    def _read(self, operations: Sequence[Operation]) -> Messages:
        """Read the chosen operations, in one trip. A run goes as far as its first one that can't be read.

        That one is failed when it is the run's next; one that may be read later leaves its run in doubt.
        """
        messages: Messages = {}
        ended: set[Key] = set()
        for operation, body in zip(operations, self._journal.bodies(operations), strict=True):
            key = (operation.tenant, operation.run_id)
            if key in ended:
                continue
            try:
                messages[key, operation.seq_id] = _decoded(operation, body)
            except Exception as error:  # whatever a broken body makes the decoder raise, it costs this run alone
                ended.add(key)
                self._unreadable(operation, error)
        return messages

    def _unreadable(self, operation: Operation, error: Exception) -> None:
        run = self._residents.get((operation.tenant, operation.run_id))
        if run is None or run.applied + 1 != operation.seq_id:
            return
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self._doubt(operation, run.token, error)
            return
        self._fail(run, operation, broken(operation.request_id, error, "the operation's body can't be read any more"))

    def _still_here(self, group: list[Chosen]) -> list[Chosen]:
        """Leave out what an earlier group of this plan has thrown over: its run was dropped."""
        runs = [self._residents.get((chosen.tenant, chosen.run_id)) for chosen in group]
        return [chosen for chosen, run in zip(group, runs, strict=True) if run and run.applied < chosen.seq_id]

    def _pass(self, batch: Sequence[tuple[Operation, Message]], *, looks: bool) -> None:
        """Carry out the operations together and commit each outcome."""
        operations = [operation for operation, _ in batch]
        works = [self._work(operation, message) for operation, message in batch]
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
        committed = self._commit_all(works, operations, _measured(operations, outcomes, seconds), looks=looks)
        log.info(
            "pass: %d runs, %d operations (%s), %d tokens, %.0f ms",
            len({work.run.key for work in works}),
            len(works),
            ", ".join(sorted({work.kind for work in works})),
            sum(operation.tokens for operation in operations),
            seconds * 1e3,
        )
        for work, outcome in committed:
            self._after(work, outcome)

    def _commit_all(
        self, works: Sequence[Work], operations: Sequence[Operation], outcomes: Sequence[Outcome], *, looks: bool
    ) -> list[tuple[Work, Outcome]]:
        """Commit what was carried out; return what is. A run with an operation that isn't is dropped.

        Such a run is ahead of its journal: served on, it would do the operation a second time. What was submitted
        meanwhile is taken on the same trip.
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
                if (
                    isinstance(refusal, StoreUnavailable) and sent[number + 1 :]
                ):  # it answers again by now, or has ended us
                    refusals[number + 1 :] = self._send(sent[number + 1 :])
        finally:
            for work in works[len(committed) :]:
                if work.run.applied < work.seq_id and self._residents.holds(work.run):
                    self._holdings.drop(work.run.key)
        return committed

    def _work(self, operation: Operation, message: Message) -> Work:
        run = self._residents.get((operation.tenant, operation.run_id))
        assert run is not None, "a run in the plan is resident"
        return Work(run=run, seq_id=operation.seq_id, message=message)

    def _broken(self, work: Work, error: Exception) -> Outcome:
        """Fail an operation after the device broke in a way that it couldn't pin on one of them."""
        outcome = failed(work, error)
        _void(work.run, work.kind, work.seq_id, outcome.error or "")
        return outcome

    # one run

    def _resident(self, each: Slice) -> Run | None:
        """Return the run of a slice as the journal has it, rebuilt if need be; None if that isn't possible now."""
        try:
            return self._holdings.take_up(each)
        except (StoreUnavailable, StaleOwner):
            raise
        except Exception as error:  # it costs this run alone, whatever it is
            self._doubt(each.operations[0], each.token, error)
            return None

    def _pauses(self, each: Slice) -> bool:
        """Tell whether a run is left alone for now, because it could not be rebuilt."""
        doubt = self._doubtful.get((each.tenant, each.run_id))
        return doubt is not None and doubt.until > time.monotonic()

    def _doubt(self, operation: Operation, token: int, error: Exception) -> None:
        """Drop a run that can't be served as it is and leave it alone for a while.

        After some tries its next operation is failed; so is one more with each further try.
        """
        key = (operation.tenant, operation.run_id)
        self._holdings.drop(key)
        doubt = self._doubtful.setdefault(key, Doubt())
        pause_s = self._settings.doubt_s * 2 ** min(doubt.tries, 4)
        doubt.tries, doubt.until = doubt.tries + 1, time.monotonic() + pause_s
        if doubt.tries >= MOST_TRIES:
            cause = "the run's state can't be rebuilt on the server now"
            self._give_up(operation, token, broken(operation.request_id, error, cause))
        else:
            log.error("run %s can't be served; trying again in %.0f s", operation.run_id, pause_s, exc_info=error)

    def _give_up(self, operation: Operation, token: int, outcome: Outcome) -> bool:
        """Fail the next operation of a run without its state, which is rebuilt as recorded when it is needed."""
        self._holdings.drop((operation.tenant, operation.run_id))
        try:
            self._journal.commit(self._lease, operation, _told(operation, outcome), token=token)
        except (StaleOwner, StoreFault) as refusal:
            log.error("%s could not be failed: %s", operation.request_id, refusal)
            return False
        self._waiter.ended(operation.tenant, operation.request_id, outcome.error or "")
        log.error("%s was given up: %s", operation.request_id, outcome.error)
        return True

    def _skip_void(self, run: Run, operations: Sequence[Operation]) -> list[Operation]:
        """Commit leading operations that were refused or never arrived; return the rest, up to the next such one."""
        rest: list[Operation] = []
        for operation in operations:
            if operation.kind not in (REFUSED, MISSING):
                rest.append(operation)
                continue
            if rest:
                break
            outcome = failed(f"{operation.kind} {operation.request_id}", InvalidRequest(operation.error))
            if not self._fail(run, operation, outcome):
                break
        return rest

    def _fail(self, run: Run, operation: Operation, outcome: Outcome) -> bool:
        """Commit a failure that happened outside the device. False: the run was dropped."""
        _void(run, operation.kind, operation.seq_id, outcome.error or "", voids=operation.voids)
        return self._commit(run, operation, _told(operation, outcome))

    def _send(self, committals: Sequence[Committal], *, looks: bool = False) -> list[Exception | None]:
        """Send outcomes to the journal; return what is in the way of each. `looks`: take what is next as well."""
        if not looks:
            return self._journal.commit_all(self._lease, committals)[0]
        self._bell.clear()
        refusals, taken = self._journal.commit_all(self._lease, committals, then=self._taking)
        if taken is None:
            self._bell.set()
        self._taken = taken or None
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
                    self._note_store_down(refusal)
                    if self._stopping.wait(RETRY_S) or self._lease.lost:
                        self._holdings.drop(run.key)
                        return False
                case StaleOwner():
                    log.warning("run %s has passed to another worker; dropped", run.run_id)
                    self._holdings.drop(run.key)
                    return False
                case StoreFault():
                    self._doubt(operation, run.token, refusal)
                    return False
                case QuotaExceeded():  # a save, which leaves the run as it was
                    self._device.discard(outcome)
                    outcome = failed(operation.request_id, refusal)
                case _:
                    raise refusal
            [refusal] = self._send([Committal(operation, outcome, run.token)])
        run.applied = operation.seq_id
        self._waiter.ended(operation.tenant, operation.request_id, outcome.error or "")
        self._doubtful.pop(run.key, None)
        self._residents.note(run, operation.size, outcome.usage.seconds)
        if not as_recorded:
            self._holdings.drop(run.key)
        return as_recorded

    def _after(self, work: Work, outcome: Outcome) -> None:
        """Save the run: at once after a load, else when that is due."""
        message, run = work.message, work.run
        if run.trained is None or not self._residents.holds(run) or run.applied != work.seq_id:
            return
        loaded = isinstance(message, LoadWeights) or (isinstance(message, CreateModel) and bool(message.checkpoint_dir))
        if loaded and outcome.error is None:
            self._holdings.save(run, self._lease)
        else:
            self._holdings.save_if_due(run, self._lease)

    # starting over, stopping

    def hand_back_all(self) -> bool:
        """Write out and release every run, as many as the time for stopping allows."""
        self._holdings.hand_back_all(self._lease)
        return False

    def _start_over(self, reason: StaleOwner) -> None:
        """Drop every run: this process owned nothing for a while. A new lease is a new owner."""
        log.warning("%s; dropping %d runs and starting over", reason, len(self._residents))
        self._taken = None
        self._holdings.drop_all()
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


def _let_go_of_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: runs that were dropped leave the device before the turn ends."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _name(chosen: Chosen) -> tuple[Key, int]:
    return (chosen.tenant, chosen.run_id), chosen.seq_id


def _queue(run: Run, operations: Sequence[Operation]) -> Queue:
    pending = tuple(Pending(kind=each.kind, seq_id=each.seq_id, tokens=each.tokens) for each in operations)
    return Queue(tenant=run.tenant, run_id=run.run_id, pending=pending)


def _decoded(operation: Operation, body: bytes | OSError) -> Message:
    if isinstance(body, OSError):
        raise body
    return decode(operation.kind, body)


def _measured(operations: Sequence[Operation], outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
    """Share the seconds of a pass by the tokens of its operations; evenly where they have none."""
    costs = [operation.tokens for operation in operations]
    if not any(costs):
        costs = [1] * len(costs)
    return [
        replace(outcome, usage=Usage(seconds=seconds * cost / sum(costs)))
        for outcome, cost in zip(outcomes, costs, strict=True)
    ]


def _told(operation: Operation, outcome: Outcome) -> Outcome:
    """Let the failure of a creation show in the run's record."""
    return replace(outcome, run_fields={"state": "failed"}) if operation.kind == CreateModel.kind else outcome


def _void(run: Run, kind: str, seq_id: int, error: str, *, voids: bool = False) -> None:
    """Apply the rule of the void gradient to an operation that failed outside the device."""
    if voids or kind == ForwardBackward.kind:
        run.make_void(seq_id, error)
    elif kind == OptimStep.kind:
        run.drop_gradient()
    elif kind == CreateModel.kind:
        run.failure = error
