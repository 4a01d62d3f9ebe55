"""The thread between the journal's waiting set and the model.

It takes some requests of every tenant that has any, so that nobody waits behind another's, lets the runner advance
by a step, and commits whatever ended at once. A request lives in the waiting set until it is committed: whatever
happens here, it is drawn again elsewhere, to the same tokens, as its seed is journaled. Knows no torch: the runner is
whatever can `add` and `step`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

from openrl.tasks.doorbell import Waiter
from openrl.tasks.drafts import Publisher
from openrl.tasks.errors import DiskRefusal, InvalidRequest, StaleOwner, StoreFault, StoreUnavailable
from openrl.tasks.journal import Journal, Outcome, SampleJob
from openrl.tasks.ownership import Lease
from openrl.tasks.process import Streak
from openrl.timeslice.errors import NotGranted
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.sampler.requests import Finished, Limits, Request, read, write

log = logging.getLogger(__name__)

MOST_NEWS = 64
"""New versions that are remembered until the next turn."""
BURST_S = 0.02
"""Where others share the accelerator, so long does the model go on before it is asked whether the turn does: to ask
costs a read of the store."""
LOOK_S = 1.0
"""How often it is looked whether a request in hand was cancelled; the message that says so at once may be lost."""


class Runner(Protocol):
    """What draws; `openrl.workers.sampler.torch_engine` is one."""

    @property
    def most_of_tenant(self) -> int:
        """How many requests of one tenant it takes in at a time."""

    @property
    def requests(self) -> Sequence[Request]:
        """What it has not finished."""

    def add(self, request: Request) -> None:
        """Take a request in."""

    def step(self) -> list[Finished]:
        """Advance, and return what ended."""

    def drop(self, requests: Collection[Request]) -> list[int]:
        """Forget these of its requests; what they held is free in the next step. Return how much each had drawn."""

    def foresee(self, directory: str) -> None:
        """Hear of a new version of some run's weights, which may be asked for next."""

    def tidy(self) -> None:
        """Let go of what is kept in memory for requests that may never come."""

    def wake(self) -> None:
        """Let a step that waits for something return; any thread may call it."""


class SamplerEngine:
    """Serves one base model's samples. All but the thread's own methods may be called from any thread."""

    def __init__(
        self,
        runner: Runner,
        journal: Journal,
        waiter: Waiter,
        *,
        lease: Lease,
        new_lease: Callable[[], Lease],
        slug: str,
        limits: Limits,
        poll_s: float = 0.25,
        stop_s: float = 5.0,
        streak: Streak | None = None,
        drafts: Publisher | None = None,
        accelerator: Accelerator | None = None,
        version: Callable[[], str] | None = None,
    ) -> None:
        """Serve what `runner` draws.

        `new_lease` is called when `lease` was lost; `stop_s` bounds how long `stop` waits for a step; `drafts`
        publishes tokens as they are drawn, None: nobody hears them. No `accelerator`: it is this process's own.
        `version` tells the directory of the one version in memory ("" while there is none); None: the runner keeps
        many.
        """
        self._version = version
        self._accelerator = accelerator or Accelerator()
        self.lease = lease
        self._runner = runner
        self._journal = journal
        self._waiter = waiter
        self._new_lease = new_lease
        self.slug = slug
        self._limits = limits
        self._poll_s = poll_s
        self._stop_s = stop_s
        self._streak = streak or Streak()
        self._drafts = drafts
        self._woken = threading.Event()
        self._looks = threading.Event()
        self._new_versions: deque[str] = deque(maxlen=MOST_NEWS)
        self._cancelled = threading.Event()
        self._stopping = threading.Event()
        self._resting = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="sampler-engine", daemon=True)
        self._uncommitted: deque[tuple[SampleJob, Outcome]] = deque()
        self._disk_refused = False
        self._seconds: dict[tuple[str, str], float] = {}
        self._take_at = 0.0
        self._look_at = 0.0
        self._busy = False

    def start(self) -> None:
        """Begin to look for samples."""
        self.lease.set_state("ready")
        self._thread.start()

    def wake(self) -> None:
        """Look at the waiting set now."""
        self._looks.set()
        self._look_up()

    def let_go(self) -> None:
        """Look now whether a request in hand was cancelled."""
        self._cancelled.set()
        self._look_up()

    def hear_version(self, directory: str) -> None:
        """Hear that weights were saved for sampling."""
        self._new_versions.append(directory)
        self._look_up()

    def rests(self, timeout_s: float) -> bool:
        """Wait until there is nothing to draw; False after `timeout_s`."""
        return self._resting.wait(timeout_s)

    def knows(self, tenant: str, request_id: str) -> bool:
        """Tell that it must look: which requests are in its hands is its own thread's to know."""
        return False

    def wait_for(self, tenant: str, request_id: str) -> None:
        """Wait until a sample has ended; raises OperationFailed when it failed."""
        self._waiter.wait_for(tenant, request_id)

    def release_waiters(self) -> None:
        """Let every `wait_for` return."""
        self._waiter.release()

    def stop(self) -> None:
        """Take nothing more, let the running step end, and give unfinished samples back to the waiting set."""
        self._stopping.set()
        self._look_up()
        self.lease.set_state("stopping")
        if self._thread.is_alive():
            self._thread.join(self._stop_s)
        try:
            self._journal.requeue_samples(self.lease)
        except (StoreUnavailable, StaleOwner) as failure:
            log.warning("unfinished samples return when the lease ends: %s", failure)
        if not self._thread.is_alive():
            self._accelerator.close()
        self.lease.close()

    def _look_up(self) -> None:
        """Let the thread, be it waiting for work or in a step that waits, begin its next turn."""
        self._woken.set()
        self._runner.wake()

    def _loop(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
                self._streak.end()
            except StoreUnavailable as failure:
                log.warning("%s", failure)
                self._stopping.wait(self._poll_s)
            except NotGranted:  # nobody waits for a turn who is asked to stop
                continue
            except Exception as failure:
                # Nothing may end this thread alone: what it holds would hang. Samples are safe in the waiting set.
                log.exception("a turn of the engine failed")
                self._streak.add(failure)
                self._stopping.wait(self._poll_s)

    def _turn(self) -> None:
        """Take what may come in, advance by a step, commit what ended."""
        self._woken.clear()
        if self.lease.lost:
            self._start_over()
        self._commit()
        while self._new_versions:
            self._runner.foresee(self._new_versions.popleft())
        if self._looks.is_set() or time.monotonic() >= self._take_at:
            self._take()
        if self._cancelled.is_set() or time.monotonic() >= self._look_at:
            self._drop_cancelled()
            self._runner.tidy()
        self._show(busy=bool(self._runner.requests))
        if not self._runner.requests:
            if not self._stopping.is_set():
                self._resting.set()
                self._woken.wait(max(0.0, self._take_at - time.monotonic()))
                self._resting.clear()
            return
        ended = self._advance()
        for one in ended:
            seconds = self._seconds.get(_name(one.request), 0.0)
            self._uncommitted.append((one.request.job, _outcome(one, seconds)))
        self._commit()
        if ended:
            self._take_at = 0.0

    def _advance(self) -> list[Finished]:
        """Let the runner advance once the accelerator is ours: by a step, or by some until there is something else."""
        with self._accelerator.turn(gives_up=self._stopping.is_set):
            until = time.monotonic() + BURST_S if self._accelerator.shared else 0.0
            while True:
                began, running = time.monotonic(), list(self._runner.requests)
                ended = self._step()
                self._share(time.monotonic() - began, running)
                if ended or self._woken.is_set() or time.monotonic() >= until:
                    return ended

    def _share(self, seconds: float, running: Sequence[Request]) -> None:
        """Share the time of a step evenly between the requests that were in it."""
        share = seconds / len(running)
        self._seconds = {name: self._seconds.get(name, 0.0) + share for name in map(_name, running)}

    def _take(self) -> None:
        """Bring waiting samples in; one that can't be run is answered at once."""
        self._looks.clear()
        self._take_at = time.monotonic() + self._poll_s
        most = self._runner.most_of_tenant
        version = self._version() if self._version else None
        jobs = self._journal.take_samples(
            self.slug, self.lease, limit=most, of_tenant=most, version=version, leaves_s=self._poll_s
        )
        if len(jobs) >= most:
            self._take_at = 0.0
        for job in jobs:
            try:
                self._runner.add(self._heard(read(job, self._limits)))
            except InvalidRequest as failure:
                self._uncommitted.append((job, Outcome(error=str(failure), category="user")))
            except Exception as failure:
                self._uncommitted.append((job, _unexpected(failure, job)))
        self._commit()

    def _drop_cancelled(self) -> None:
        """Drop what is no longer in this process's hands: it was cancelled, and has been answered."""
        self._cancelled.clear()
        self._look_at = time.monotonic() + LOOK_S
        if not self._runner.requests:
            return
        held = self._journal.held_samples(self.lease)
        gone = [one for one in self._runner.requests if (one.job.tenant, one.job.request_id) not in held]
        if gone:
            log.info("dropped %d cancelled requests", len(gone))
            for one, num_drawn in zip(gone, self._runner.drop(gone), strict=True):
                self._journal.charge(one.job.tenant, num_drawn)

    def _heard(self, request: Request) -> Request:
        """Let whoever waits for the tokens of a request hear them."""
        if self._drafts is None or not request.job.message.listener:
            return request
        return replace(request, heard=self._drafts.to_listener(request.job))

    def _step(self) -> list[Finished]:
        """Advance the runner; if its own bookkeeping broke, nothing in it can be trusted and all of it ends."""
        try:
            return self._runner.step()
        except Exception as failure:
            lost = list(self._runner.requests)
            error_id = _logged(failure, f"the step of {len(lost)} requests")
            self._runner.drop(lost)
            return [
                Finished(request=request, error=f"the sampler failed; its log tells why (error {error_id}); try again")
                for request in lost
            ]

    def _commit(self) -> None:
        """Commit what ended, in one trip; what the store or the disk can't take now stays here."""
        if not self._uncommitted:
            return
        sent, kept = list(self._uncommitted), deque[tuple[SampleJob, Outcome]]()
        trouble: Exception | None = None
        for (job, outcome), refusal in zip(sent, self._journal.commit_samples(self.lease, sent), strict=True):
            match refusal:
                case None:
                    self._waiter.ended(job.tenant, job.request_id, outcome.error or "")
                case StaleOwner():
                    log.warning("sample %s is another worker's by now; dropped", job.request_id)
                case StoreFault():
                    log.error(
                        "sample %s isn't committed, and returns when this worker ends: %s", job.request_id, refusal
                    )
                case DiskRefusal():
                    kept.append((job, outcome))
                    if not self._disk_refused:
                        log.error("sample %s waits with its result: %s", job.request_id, refusal)
                case _:
                    trouble = trouble or refusal
                    kept.append((job, outcome))
        self._uncommitted, self._disk_refused = kept, bool(kept)
        if trouble is not None:
            raise trouble

    def _start_over(self) -> None:
        """The lease ran out, so others may have all that we had: drop it and begin anew."""
        log.warning("the lease was lost; %d samples go back", len(self._runner.requests))
        self._runner.drop(self._runner.requests)
        self._uncommitted.clear()
        self.lease.close()
        self.lease = self._new_lease()
        self.lease.set_state("ready")
        self._busy = False
        self._take_at = 0.0

    def _show(self, *, busy: bool) -> None:
        """Tell the scheduler what this worker is at."""
        if busy != self._busy:
            self.lease.set_state("busy" if busy else "ready")
            self._busy = busy
        if busy:
            self.lease.touch_busy()


def _name(request: Request) -> tuple[str, str]:
    return request.job.tenant, request.job.request_id


def _outcome(ended: Finished, seconds: float) -> Outcome:
    if ended.result is None:
        return Outcome(error=ended.error, category=ended.category)
    try:
        request = ended.request
        return write(
            ended.result, num_prompt_tokens=len(request.prompt), seconds=seconds, weights_id=request.weights_id
        )
    except Exception as failure:
        return _unexpected(failure, ended.request.job)


def _unexpected(failure: Exception, job: SampleJob) -> Outcome:
    error_id = _logged(failure, f"sample {job.request_id}")
    return Outcome(error=f"the sampler failed on this request; its log tells why (error {error_id})", category="server")


def _logged(failure: Exception, what: str) -> str:
    error_id = secrets.token_hex(4)
    log.error("%s failed, error %s", what, error_id, exc_info=failure)
    return error_id
