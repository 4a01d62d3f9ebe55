"""Operations as the messages that they are: the bodies of what was chosen, read in one trip and decoded.

What the next pass is likely to hold is read beside the present one, in a thread of its own. That decides nothing: an
operation under its name has one body for ever, and what is never asked for, because it was cancelled, taken over by
another worker or isn't next after all, is let go without effect.

Knows neither runs nor outcomes: what can't be read is told, and is the engine's to settle.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="trainer-reading")
        self._ahead: Future[Read] | None = None

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
        return sum(operation.size for operation in operations) >= LEAST_AHEAD_BYTES

    def begin(self, operations: Sequence[Operation]) -> None:
        """Begin to read what is likely next, as much as may lie in memory, beside what the caller does meanwhile."""
        self.forget()
        chosen, left = [], MOST_AHEAD_BYTES
        for operation in operations:
            left -= operation.size
            if left < 0:
                break
            chosen.append(operation)
        if self.is_worth(chosen):
            self._ahead = self._beside.submit(self._read, chosen)

    def forget(self) -> None:
        """Let go of what was read ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.cancel()

    def close(self) -> None:
        """Begin nothing more."""
        self.forget()
        self._beside.shutdown(wait=False, cancel_futures=True)

    def _known(self) -> dict[Name, Message]:
        """Return what was read ahead, once, when that has ended; what failed is tried again by whoever needs it."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.cancel():
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
