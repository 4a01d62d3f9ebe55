"""The samples of one request: submitted, heard while they are drawn, waited for, and given up with the client.

Each prompt is one sample in the tenant's queue, like any other. Whoever goes away, or waits too long, has them
cancelled. Knows nothing of how an answer looks.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from gevent import monkey

from openrl.app import sampling, wire
from openrl.app.context import services, tenant
from openrl.app.greenlets import beside, off_loop
from openrl.app.openai.errors import ClientGone, SampleFailed, TookTooLong, refused
from openrl.app.openai.plan import Plan
from openrl.tasks import keys
from openrl.tasks.drafts import Draft
from openrl.tasks.errors import NotFound, OpenRLError, Overloaded
from openrl.tasks.futures import FAILED, PENDING, Watch
from openrl.tasks.messages import Sample
from openrl.tasks.records import Sampler
from openrl.tasks.wire import codec

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often it is looked whether the client is still there."""

REREAD_S = 5.0
"""That a sample ended can go unheard (the store restarts, a connection breaks): read it again after this long."""

MAX_UNHEARD = 1 << 14
"""Tokens kept for a stream whose client reads slowly; of more, the oldest come with the result."""

_numbers = itertools.count(secrets.randbelow(keys.MAX_CLONE) * 10**keys.CLONE_DIGITS)
"""Numbers of samples: this process counts as one more clone of a sampling client, with a place of its own."""


class Order:
    """The submitted samples of a plan. `results` are those that have ended, by the number of their prompt."""

    def __init__(self, planned: Plan, client: socket.socket | None) -> None:
        """Submit. `client` is the connection of whoever waits, None where it can't be looked at.

        Raises:
            Overloaded, StoreUnavailable: not all of it was accepted, and the rest is given up.
        """
        self.results: dict[int, dict[str, Any]] = {}
        self._closed = False
        self._services, self._tenant, self._client = services(), tenant(), client
        self._ids: list[str] = []
        self._inbox = _Inbox()
        self._watching = ExitStack()
        self._timeout_s = self._services.settings.completion_timeout_s
        self._ends_at = time.monotonic() + self._timeout_s
        self._reread_at = time.monotonic() + REREAD_S
        try:
            for index, sample in enumerate(planned.samples):
                self._submit(planned.sampler, index, sample)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Sequence[tuple[int, Draft]]]:
        """Yield tokens as they are heard, with the number of their prompt, until all results are there.

        Raises:
            InvalidRequest, SampleFailed: a sample failed.
            ClientGone, TookTooLong, Overloaded: it isn't waited for any longer.
        """
        while len(self.results) < len(self._ids):
            drafts, ended = self._inbox.wait(LOOK_S)
            now = time.monotonic()
            if drafts or ended:
                self._ends_at = now + self._timeout_s
            elif now >= self._reread_at:
                ended, self._reread_at = set(self._unfinished), now + REREAD_S
            for index in sorted(ended):
                self._read(index)
            yield drafts
            if len(self.results) < len(self._ids):
                self._require_sense(now)

    def close(self) -> None:
        """Stop listening, cancel what hasn't ended, note that the rest was delivered. A second time does nothing."""
        if self._closed:
            return
        self._closed = True
        self._watching.close()
        delivered, left = [self._ids[index] for index in self.results], [self._ids[index] for index in self._unfinished]
        if delivered:
            beside(_settle, self._services.futures.deliver, self._tenant, delivered)
        if left:
            beside(_settle, self._services.cancelling.cancel, self._tenant, left)

    @property
    def _unfinished(self) -> list[int]:
        return [index for index in range(len(self._ids)) if index not in self.results]

    def _submit(self, sampler: Sampler, index: int, sample: Sample) -> None:
        number = next(_numbers)
        request_id = keys.request_id(sampler.sampler_id, number)
        line = _Line(self._inbox, index)
        self._watching.enter_context(self._services.completions.watch(self._tenant, request_id, line))
        if sample.listener:
            self._watching.enter_context(self._services.listener.listen(self._tenant, request_id, line))
        self._ids.append(request_id)
        sampling.submit(sampler, number, sample)

    def _read(self, index: int) -> None:
        """Take a result over, if it is there."""
        future = self._services.futures.get(self._tenant, self._ids[index])
        if future.state == PENDING or index in self.results:
            return
        if future.state == FAILED:
            raise refused(future.error, "prompt") if future.category == "user" else SampleFailed(future.error)
        large = len(future.result) > wire.LARGE_BYTES
        self.results[index] = off_loop(codec.sample_response_to_json, future.result, large=large)

    def _require_sense(self, now: float) -> None:
        """Stop waiting where nobody would read the answer, or none comes."""
        if self._services.polls.closing:
            raise Overloaded("this process is about to end: send the request again")
        if self._client is not None and _gone(self._client):
            raise ClientGone("the client has gone")
        if now >= self._ends_at:
            raise TookTooLong(
                f"nothing came for {self._timeout_s:g} s (OPENRL_COMPLETION_TIMEOUT_S), and it was cancelled: send it "
                "again when a sampler has time for it"
            )


class _Inbox:
    """What the greenlet of a request waits for: tokens, and word that a sample may have ended."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self._drafts: deque[tuple[int, Draft]] = deque(maxlen=MAX_UNHEARD)
        self._ended: set[int] = set()

    def wait(self, timeout_s: float) -> tuple[list[tuple[int, Draft]], set[int]]:
        """Wait until something came, or the time is up; return all that came."""
        self._rung.wait(timeout_s)
        self._rung.clear()
        drafts = [self._drafts.popleft() for _ in range(len(self._drafts))]
        ended = {self._ended.pop() for _ in range(len(self._ended))}
        return drafts, ended

    def hear(self, index: int, drafts: Sequence[Draft]) -> None:
        self._drafts.extend((index, draft) for draft in drafts)
        self._rung.set()

    def end(self, index: int) -> None:
        self._ended.add(index)
        self._rung.set()


class _Line(Watch):
    """One sample's way into an inbox."""

    def __init__(self, inbox: _Inbox, index: int) -> None:
        super().__init__()
        self._inbox, self._index = inbox, index

    def set(self) -> None:
        """Note that the sample may have ended."""
        self._inbox.end(self._index)

    def hear(self, drafts: Sequence[Draft]) -> None:
        """Note tokens of the sample."""
        self._inbox.hear(self._index, drafts)


def _settle(settle: Callable[[str, str], object], owner: str, request_ids: Sequence[str]) -> None:
    """Note delivered results, or cancel what nobody waits for. At worst both end by themselves."""
    for request_id in request_ids:
        try:
            settle(owner, request_id)
        except NotFound:  # it was never accepted
            continue
        except OpenRLError as error:
            log.warning("%s is left to end by itself: %s", request_id, error)


def _gone(client: socket.socket) -> bool:
    """Tell whether the other side has closed a connection; what it may have sent stays unread."""
    # The plain socket: gevent's would wait for something to read.
    plain = monkey.get_original("socket", "socket")(fileno=client.fileno())
    try:
        return not plain.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        plain.detach()
