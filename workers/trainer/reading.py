"""Operations as the messages that they are: the bodies of what was chosen, read in one trip and decoded.

What the next pass is likely to hold is read beside the present one, in a thread of its own. That decides nothing: an
operation under its name has one body for ever, and what is never asked for, because it was cancelled, taken over by
another worker or isn't next after all, is let go without effect. Where a disk hangs, nothing more is read ahead until
it answers, and the process may leave meanwhile.

Knows neither runs nor outcomes: what can't be read is told, and is the engine's to settle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from openrl.tasks.journal import Journal, Operation
from openrl.tasks.messages import Message, decode
from openrl.workers.trainer.residents import Key

log = logging.getLogger(__name__)

Name = tuple[Key, int]
"""An operation: its run and its `seq_id`."""

LEAST_AHEAD_BYTES = 16 << 10
"""Fewer are decoded in less time (0.2 ms) than it takes to hand them to another thread and back."""
MOST_AHEAD_BYTES = 64 << 20
"""Of bodies that are read ahead; decoded, they take about as much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What some operations are. A run goes as far as its first one that can't be read."""

    messages: dict[Name, Message] = field(default_factory=dict)
    unreadable: list[tuple[Operation, Exception]] = field(default_factory=list)
    """At most one of each run, with the reason."""


class Reading:
    """Reads for one engine; its methods are for that engine's thread."""

    def __init__(
        self, journal: Journal, *, least_bytes: int = LEAST_AHEAD_BYTES, most_bytes: int = MOST_AHEAD_BYTES
    ) -> None:
        """Read ahead where it is `least_bytes` or more, and no more than `most_bytes`."""
        self._journal = journal
        self._least_bytes, self._most_bytes = least_bytes, most_bytes
        self._ahead: Future[Read] | None = None
        self._idle = threading.Event()
        """Nothing is being read beside, not even what was forgotten."""
        self._idle.set()

    def read(self, operations: Sequence[Operation]) -> Read:
        """Read these operations, those of one run in order; what was read ahead, and isn't among them, is forgotten.

        Raises:
            StoreUnavailable: the store doesn't answer.
        """
        known = self._known()
        absent = [operation for operation in operations if _name(operation) not in known]
        read = self._read(absent) if absent else Read()
        ends = {(operation.tenant, operation.run_id): operation.seq_id for operation, _ in read.unreadable}
        for operation in operations:
            key, seq_id = _name(operation)
            if (key, seq_id) in known and seq_id < ends.get(key, seq_id + 1):
                read.messages[key, seq_id] = known[key, seq_id]
        return read

    def is_worth(self, operations: Iterable[Operation]) -> bool:
        """Tell whether so much should be read beside."""
        return sum(operation.size for operation in operations) >= self._least_bytes

    def begin(self, operations: Sequence[Operation]) -> None:
        """Begin to read what is likely next, as much as may lie in memory, beside what the caller does meanwhile."""
        self.forget()
        if not self._idle.is_set():
            return
        chosen, left = [], self._most_bytes
        for operation in operations:
            left -= operation.size
            if left < 0:
                break
            chosen.append(operation)
        if self.is_worth(chosen):
            self._idle.clear()
            ahead: Future[Read] = Future()
            # No executor: its threads are waited for when the process leaves.
            threading.Thread(target=self._fill, args=(ahead, chosen), name="reading", daemon=True).start()
            self._ahead = ahead

    def forget(self) -> None:
        """Let go of what was read ahead."""
        self._ahead = None

    def _fill(self, ahead: Future[Read], operations: Sequence[Operation]) -> None:
        """Read into `ahead`; whoever has that can begin the next."""
        try:
            read = self._read(operations)
        except Exception as error:
            self._idle.set()
            ahead.set_exception(error)
        else:
            self._idle.set()
            ahead.set_result(read)

    def _known(self) -> dict[Name, Message]:
        """Return what was read ahead, once, when that has ended; what failed is tried again by whoever needs it."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return {}
        try:
            return ahead.result().messages
        except Exception as error:  # the store was away, say
            log.warning("nothing could be read ahead: %s", error)
            return {}

    def _read(self, operations: Sequence[Operation]) -> Read:
        read = Read()
        ended: set[Key] = set()
        for operation, body in zip(operations, self._journal.bodies(operations), strict=True):
            key, seq_id = _name(operation)
            if key in ended:
                continue
            try:
                read.messages[key, seq_id] = _decoded(operation, body)
            except Exception as error:  # whatever a broken body makes the decoder raise, it costs this run alone
                ended.add(key)
                read.unreadable.append((operation, error))
        return read


def _name(operation: Operation) -> Name:
    return (operation.tenant, operation.run_id), operation.seq_id


def _decoded(operation: Operation, body: bytes | OSError) -> Message:
    if isinstance(body, OSError):
        raise body
    return decode(operation.kind, body)
