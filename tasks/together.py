"""Commands of many greenlets or threads, in one trip to the store.

A process that holds thousands of polls asks the store for many small things at the same moment. Each by itself would
take a connection of the pool and several turns of the event loop, and a few hundred would wait for connections. Here
whoever comes while a trip is under way goes with the next one, which takes all that wait. Knows commands, not what they
are for.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import redis

MOST = 64
"""Askers of one trip: the answers are read in one go, and some are long."""

Command = tuple[str | bytes | int | float, ...]


class Together:
    """One trip at a time; each is led by one of those who ask."""

    def __init__(self, client: redis.Redis) -> None:
        self._redis = client
        self._lock = threading.Lock()
        self._waiting: deque[_Asker] = deque()
        self._under_way = False

    def ask(self, *commands: Command) -> list[Any]:
        """Return the answers to these commands, which travel together.

        Raises:
            redis.RedisError: the store can't be reached, or refused one of them; the others have been carried out.
        """
        asker = _Asker(commands)
        with self._lock:
            asker.leads = not self._under_way
            self._under_way = True
            if not asker.leads:
                self._waiting.append(asker)
        if not asker.leads:
            self._wait(asker)
        if asker.leads:
            self._lead(asker)
        return asker.outcome()

    def _wait(self, asker: _Asker) -> None:
        try:
            asker.turn.wait()
        except BaseException:  # given up: nobody may wait for one who has gone
            with self._lock:
                if asker in self._waiting:
                    self._waiting.remove(asker)
            if asker.leads:
                self._hand_on()
            raise

    def _lead(self, leader: _Asker) -> None:
        with self._lock:
            party = [leader, *(self._waiting.popleft() for _ in range(min(MOST - 1, len(self._waiting))))]
        try:
            self._travel(party)
        finally:
            for other in party[1:]:
                other.turn.set()
            self._hand_on()

    def _travel(self, party: list[_Asker]) -> None:
        try:
            answers = iter(self._answers([command for asker in party for command in asker.commands]))
        except redis.RedisError as error:
            for asker in party:
                asker.answers = [error]
            return
        for asker in party:
            asker.answers = [next(answers) for _ in asker.commands]

    def _answers(self, commands: list[Command]) -> list[Any]:
        """Return what the store says to each; what it refuses is an error in its place."""
        if len(commands) == 1:  # as most are; a pipeline would cost half as much again
            try:
                return [self._redis.execute_command(*commands[0])]
            except redis.ResponseError as refused:
                return [refused]
        with self._redis.pipeline(transaction=False) as pipe:
            for command in commands:
                pipe.execute_command(*command)
            return list(pipe.execute(raise_on_error=False))

    def _hand_on(self) -> None:
        with self._lock:
            following = self._waiting.popleft() if self._waiting else None
            self._under_way = following is not None
            if following is not None:
                following.leads = True
                following.turn.set()


class _Asker:
    def __init__(self, commands: tuple[Command, ...]) -> None:
        self.commands = commands
        self.leads = False
        self.turn = threading.Event()
        # What those of a trip find whose leader was torn away.
        self.answers: list[Any] = [redis.ConnectionError("the trip to the store was broken off")]

    def outcome(self) -> list[Any]:
        for answer in self.answers:
            if isinstance(answer, Exception):
                raise answer
        return self.answers
