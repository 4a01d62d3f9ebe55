"""The trainer's engine: one thread between the journal and the device.

Takes what the journal says is next, plans a pass, has what was chosen read (`reading`), carried out (`device`) and
each outcome committed at once (`settling`). While a pass computes, the one that would follow it is read beside; what
runs is still decided when it is over. Woken by doorbells, else it looks every quarter of a second: progress
depends on no message. Holds no policy (`passes`) and no arithmetic. Whatever goes wrong with the store or a lease
costs memory, never order: a run whose state is in doubt is dropped and rebuilt from the journal. What keeps killing
workers is answered as failed.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import StaleOwner, StoreUnavailable
from openrl.tasks.journal import Journal, Operation, Outcome, Slice, Taking
from openrl.tasks.messages import CreateModel, LoadWeights, Message, OptimStep
from openrl.tasks.operations import Usage
from openrl.tasks.ownership import Lease
from openrl.tasks.process import Streak
from openrl.timeslice.errors import NotGranted
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.trainer.bell import Bell
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.doubts import Doubts
from openrl.workers.trainer.holdings import Holdings
from openrl.workers.trainer.outage import Outage
from openrl.workers.trainer.passes import Chosen, Pass, Pending, Planner, Queue
from openrl.workers.trainer.reading import Name, Reading
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.residency import state_bytes
from openrl.workers.trainer.residents import Key
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.settling import RETRY_S, Settling, void
from openrl.workers.trainer.snapshots import Snapshots
from openrl.workers.trainer.work import Work, broken, failed

log = logging.getLogger(__name__)

MOST_CRASHES = 3
"""An operation that so many workers died of is failed, not tried again."""


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
        doubts: Doubts | None = None,
        reading: Reading | None = None,
    ) -> None:
        """Serve what the lease's worker may; no `accelerator`: the device is this process's own.

        No `doubts`, no `reading`: as the settings and the journal say.
        """
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
        self._room = device.residency.room
        self._planner = Planner(
            token_budget=settings.token_budget, runs_per_pass=settings.runs_per_pass, room=self._room
        )
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
        self._taking = Taking(slug, settings.max_runs, settings.max_operations, settings.max_runs)
        self._bell = Bell()
        self._look_at = 0.0
        """When the journal is looked into whatever was told: of what nobody owns nobody is told."""
        self._stopping = threading.Event()
        self._resting = threading.Event()
        self._outage = Outage()
        self._doubts = doubts or Doubts(settings.doubt_s)
        self._reading = reading or Reading(journal)
        self._settling = Settling(
            journal=journal,
            lease=lambda: self._lease,
            holdings=self._holdings,
            doubts=self._doubts,
            waiter=waiter,
            outage=self._outage,
            taking=self._taking,
            bell=self._bell,
            stopping=self._stopping,
            discard=device.discard,
        )
        self._has_more = False
        """Whether the last turn left something, so that another has to follow it. What comes later rings."""
        self._thread = threading.Thread(target=self._loop, name="trainer-engine", daemon=True)

    def start(self) -> None:
        """Begin to look for operations."""
        self._say("ready")
        self._thread.start()

    def wake(self) -> None:
        """Look at once, or after what was told of: something was submitted."""
        self._bell.ring()

    def hear(self, said: bytes) -> None:
        """Carry out what the journal told of along with the ring; look at once where it told of nothing."""
        self._bell.tell(said)

    def rests(self, timeout_s: float) -> bool:
        """Wait until there is nothing to carry out; False after `timeout_s`."""
        return self._resting.wait(timeout_s)

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
        self._bell.ring()
        if self._thread.is_alive():
            self._say("stopping")
            self._thread.join(self._settings.stop_s)
        if not self._thread.is_alive():
            self._accelerator.close()
        self._lease.close()

    # the loop

    def _loop(self) -> None:
        while not self._stopping.is_set():
            if self._settling.taken is None:
                self._bell.hush()
            if not (self._guarded(self.turn) and (self._has_more or self._settling.taken)):
                self._say("ready")
                self._resting.set()
                self._bell.wait(self._settings.poll_s)
                self._resting.clear()
        self._resting.set()
        self._reading.forget()
        self._guarded(self.hand_back_all)

    def _guarded(self, step: Callable[[], bool]) -> bool:
        """Take one step of the loop; nothing that a step raises may end the thread alone."""
        try:
            progressed = step()
            self._outage.end()
            self._streak.end()
            return progressed
        except StoreUnavailable as error:
            self._outage.note(error)
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
        slices, self._settling.taken = self._settling.taken, None
        is_brought = slices is not None
        told, looks = ([], False) if is_brought else self._told()
        if slices is None:
            slices = told or self._look()
        self._holdings.note_offered(slices)
        ready = [each for each in slices if not self._doubts.pauses((each.tenant, each.run_id))]
        # What was brought along isn't followed by more of that: to cancel something takes a look with empty hands.
        progressed = bool(ready) and self._in_turn(ready, looks=not is_brought)
        if not ready:
            self._reading.forget()
        waiting = {(each.tenant, each.run_id) for each in (*slices, *(self._settling.taken or ()))}
        self._has_more = looks or len(slices) == self._settings.max_runs or any(self._left(each) for each in ready)
        if not told:  # which doesn't say what else waits
            self._holdings.let_go(waiting, self._lease, gives_up=lambda: self._stopping.is_set() or self._bell.is_set())
        return progressed

    def _look(self) -> list[Slice]:
        """Ask the journal what can be executed."""
        self._look_at = time.monotonic() + self._settings.poll_s
        return self._journal.take_next(self._lease, self._taking)

    def _told(self) -> tuple[list[Slice], bool]:
        """Return what was told with the last rings, and whether to look after it.

        Nothing, if it can't be carried out as it is, if it is time to look, or if others have more here.
        """
        heard = self._bell.heard()
        if self._has_more or time.monotonic() >= self._look_at:
            return [], False
        slices: dict[Key, Slice] = {}
        for said in heard.told:
            each = self._journal.heard(self._lease, said)
            run = None if each is None else self._residents.get((each.tenant, each.run_id))
            if each is None or run is None or run.token != each.token or run.applied < each.applied:
                return [], False
            if run.applied == each.applied:
                slices[run.key] = each
        return list(slices.values()), heard.rang

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
            return self._settling.give_up(first, each.token, Outcome(error=cause, category="server"))
        if not self._journal.begin(self._lease, each):
            return False
        return self._serve([replace(each, operations=(first,))])

    def _serve(self, slices: Sequence[Slice], *, looks: bool = False) -> bool:
        """Carry out one pass over these runs. Tells whether anything took effect.

        `looks`: nothing else is carried out in this turn, so that the last commit may bring what is next.
        """
        progressed = False
        operations: dict[Name, Operation] = {}
        queues: list[Queue] = []
        for each in slices:
            run = self._resident(each)
            if run is None:
                continue
            rest = self._settling.skip_void(run, each.operations)
            progressed |= len(rest) < len(each.operations)
            if rest:
                queues.append(self._queue(run, rest))
                operations |= {(run.key, operation.seq_id): operation for operation in rest}
        return self._carry_out(queues, operations, looks=looks) or progressed

    def _queue(self, run: Run, operations: Sequence[Operation]) -> Queue:
        pending = tuple(Pending(kind=each.kind, seq_id=each.seq_id, tokens=each.tokens) for each in operations)
        takes = state_bytes(run.trained) if self._room.state_bytes else 0
        return Queue(tenant=run.tenant, run_id=run.run_id, pending=pending, state_bytes=takes)

    def _carry_out(self, queues: list[Queue], operations: dict[Name, Operation], *, looks: bool) -> bool:
        plan = self._planner.plan(queues)
        groups = plan.groups()
        if not groups:
            self._reading.forget()
            return False
        self._say("busy")
        read = self._reading.read([operations[_name(chosen)] for group in groups for chosen in group])
        for operation, error in read.unreadable:
            self._unreadable(operation, error)
        self._read_ahead(queues, operations, plan)
        for group in groups:
            if self._stopping.is_set():
                break
            names = [_name(chosen) for chosen in self._still_here(group)]
            batch = [(operations[name], read.messages[name]) for name in names if name in read.messages]
            self._pass(batch, looks=looks and group is groups[-1])
        self._lease.touch_busy()
        return True

    def _read_ahead(self, queues: list[Queue], operations: Mapping[Name, Operation], plan: Pass) -> None:
        """Begin to read the pass that would follow `plan`, if that is worth it."""
        chosen = {_name(one) for one in (*plan.singles, *plan.packed)}
        if not self._stopping.is_set() and self._reading.is_worth(
            operation for name, operation in operations.items() if name not in chosen
        ):
            self._reading.begin([operations[_name(one)] for one in self._planner.foresee(queues, plan)])

    def _unreadable(self, operation: Operation, error: Exception) -> None:
        """Fail what can't be read if it is its run's next; what may be read later leaves its run in doubt."""
        run = self._residents.get((operation.tenant, operation.run_id))
        if run is None or run.applied + 1 != operation.seq_id:
            return
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            self._settling.doubt(operation, run.token, error)
            return
        self._settling.fail(
            run, operation, broken(operation.request_id, error, "the operation's body can't be read any more")
        )

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
        committed = self._settling.commit_all(works, operations, _measured(operations, outcomes, seconds), looks=looks)
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

    def _work(self, operation: Operation, message: Message) -> Work:
        run = self._residents.get((operation.tenant, operation.run_id))
        assert run is not None, "a run in the plan is resident"
        return Work(run=run, seq_id=operation.seq_id, message=message)

    def _broken(self, work: Work, error: Exception) -> Outcome:
        """Fail an operation after the device broke in a way that it couldn't pin on one of them."""
        outcome = failed(work, error)
        void(work.run, work.kind, work.seq_id, outcome.error or "")
        return outcome

    # one run

    def _resident(self, each: Slice) -> Run | None:
        """Return the run of a slice as the journal has it, rebuilt if need be; None if that isn't possible now."""
        try:
            return self._holdings.take_up(each)
        except (StoreUnavailable, StaleOwner):
            raise
        except Exception as error:  # it costs this run alone, whatever it is
            self._settling.doubt(each.operations[0], each.token, error)
            return None

    def _after(self, work: Work, outcome: Outcome) -> None:
        """Save the run: at once after a load, else when that is due. After a step its next version may be foreseen."""
        message, run = work.message, work.run
        if run.trained is None or not self._residents.holds(run) or run.applied != work.seq_id:
            return
        loaded = isinstance(message, LoadWeights) or (isinstance(message, CreateModel) and bool(message.checkpoint_dir))
        if loaded and outcome.error is None:
            self._holdings.save(run, self._lease)
        else:
            self._holdings.save_if_due(run, self._lease)
        if isinstance(message, OptimStep) and outcome.error is None and self._residents.holds(run):
            self._device.foresee(run)

    # starting over, stopping

    def hand_back_all(self) -> bool:
        """Write out and release every run, as many as the time for stopping allows."""
        self._holdings.hand_back_all(self._lease)
        return False

    def _start_over(self, reason: StaleOwner) -> None:
        """Drop every run: this process owned nothing for a while. A new lease is a new owner."""
        log.warning("%s; dropping %d runs and starting over", reason, len(self._residents))
        self._settling.taken = None
        self._reading.forget()
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


def _let_go_of_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: runs that were dropped leave the device before the turn ends."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _name(chosen: Chosen) -> Name:
    return (chosen.tenant, chosen.run_id), chosen.seq_id


def _measured(operations: Sequence[Operation], outcomes: Sequence[Outcome], seconds: float) -> list[Outcome]:
    """Share the seconds of a pass by the tokens of its operations; evenly where they have none."""
    costs = [operation.tokens for operation in operations]
    if not any(costs):
        costs = [1] * len(costs)
    return [
        replace(outcome, usage=Usage(seconds=seconds * cost / sum(costs)))
        for outcome, cost in zip(outcomes, costs, strict=True)
    ]
