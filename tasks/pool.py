"""The connections to the store that a process keeps: one that has just served well is used again without a look.

redis' own pool asks the system before each use whether the connection is still there and nothing lies on it unread:
that took a third of a small command's time under gevent. Here it asks after a pause; and a use that ended in an
exception, which may have left an answer behind, ends the connection. A store that went away since shows at the command
itself, which is sent again on a new connection.
"""

from __future__ import annotations

import sys
import time
from queue import Empty
from typing import Any

import redis

TRUSTED_S = 1.0
"""How long a connection that served well is taken for a good one."""


class Pool(redis.BlockingConnectionPool):
    """A bounded number of connections; who finds none free waits."""

    def __init__(self, **options: Any) -> None:
        self._served: dict[Any, float] = {}
        super().__init__(**options)

    def get_connection(self, command_name: Any = None, *keys: Any, **options: Any) -> Any:
        """Return a connection that can be written to.

        Raises:
            redis.ConnectionError: none became free in time, or none can be made.
        """
        self._checkpid()
        try:
            connection = self.pool.get(timeout=self.timeout)
        except Empty:
            raise redis.ConnectionError("no connection became free") from None
        if connection is not None and time.monotonic() < self._served.pop(connection, 0.0) + TRUSTED_S:
            return connection
        self.pool.put_nowait(connection)
        connection = super().get_connection()
        self._served.pop(connection, None)
        return connection

    def reset(self) -> None:
        """Begin anew, as in a process that was forked: its parent's connections are none of its own."""
        self._served = {}
        super().reset()

    def release(self, connection: Any) -> None:
        """Take a connection back."""
        self._checkpid()
        if sys.exc_info()[0] is not None:  # its answer may still be on the way, where no look finds it
            connection.disconnect()
        elif self.owns_connection(connection) and not connection.should_reconnect():
            self._served[connection] = time.monotonic()
            self.pool.put_nowait(connection)
            return
        self._served.pop(connection, None)
        super().release(connection)
