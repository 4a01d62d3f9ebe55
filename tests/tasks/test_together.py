"""Commands of many in one trip to the store."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from openrl.tasks.store import Store
from openrl.tasks.together import MOST, Together


class Gate:
    """Stands between askers and the store: the first trip waits until it is let through. Counts the trips."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.trips: list[int] = []
        self.open, self.reached = threading.Event(), threading.Event()

    @contextmanager
    def pipeline(self, **options: Any) -> Iterator[Any]:
        with self._client.pipeline(**options) as pipe:
            through = pipe.execute

            def execute(**how: Any) -> list[Any]:
                self._hold(len(pipe))
                return through(**how)

            pipe.execute = execute
            yield pipe

    def execute_command(self, *command: Any) -> Any:
        self._hold(1)
        return self._client.execute_command(*command)

    def _hold(self, num_commands: int) -> None:
        self.trips.append(num_commands)
        self.reached.set()
        assert self.open.wait(20)


@pytest.fixture
def gate(store: Store) -> Gate:
    return Gate(store.redis)


def during_a_trip(gate: Gate, together: Together, *, ask: list[Callable[[], Any]]) -> list[Any]:
    """Start `ask` while the trip of another is under way; return what they found, errors too."""

    def outcome(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ask) + 1) as pool:
        first = pool.submit(together.ask, ("PING",))
        assert gate.reached.wait(20)
        others = [pool.submit(outcome, call) for call in ask]
        while len(together._waiting) < len(ask):
            threading.Event().wait(0.001)
        gate.open.set()
        assert first.result(20)
        return [each.result(20) for each in others]


def test_each_gets_its_own_answers(store: Store) -> None:
    assert store.together.ask(("SET", "a", 1), ("GET", "a"), ("GET", "b")) == [True, b"1", None]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda n: store.together.ask(("ECHO", f"{n}"), ("ECHO", f"-{n}")), range(300)))
    assert found == [[f"{n}".encode(), f"-{n}".encode()] for n in range(300)]


def test_those_who_come_during_a_trip_go_together_with_the_next(gate: Gate) -> None:
    together = Together(gate)  # type: ignore[arg-type]
    ask = [lambda n=n: together.ask(("ECHO", f"{n}")) for n in range(40)]
    assert during_a_trip(gate, together, ask=ask) == [[f"{n}".encode()] for n in range(40)]
    assert gate.trips == [1, 40]


def test_a_trip_takes_only_so_many(gate: Gate) -> None:
    together = Together(gate)  # type: ignore[arg-type]
    found = during_a_trip(gate, together, ask=[lambda: together.ask(("ECHO", "x"))] * (MOST + 10))
    assert found == [[b"x"]] * (MOST + 10)
    assert gate.trips == [1, MOST, 10]


def test_a_command_that_is_refused_fails_its_asker_alone(gate: Gate) -> None:
    gate._client.set("text", "x")
    together = Together(gate)  # type: ignore[arg-type]
    refused, fine = during_a_trip(
        gate, together, ask=[lambda: together.ask(("HGETALL", "text")), lambda: together.ask(("GET", "text"))]
    )
    assert isinstance(refused, redis.ResponseError)
    assert fine == [b"x"]
    with pytest.raises(redis.ResponseError):
        together.ask(("HGETALL", "text"))
    assert together.ask(("GET", "text")) == [b"x"]


def test_a_store_that_is_gone_fails_all_and_strands_nobody() -> None:
    together = Together(redis.Redis(unix_socket_path="/nowhere/store.sock", retry=Retry(NoBackoff(), 0)))
    with ThreadPoolExecutor(8) as pool:
        found = [pool.submit(together.ask, ("PING",)) for _ in range(50)]
        assert all(isinstance(each.exception(20), redis.ConnectionError) for each in found)
    assert not together._under_way and not together._waiting


class TornAway(BaseException):
    """What ends a greenlet from outside."""


def test_a_leader_that_is_torn_away_fails_its_companions_and_strands_nobody(store: Store) -> None:
    tears = [True]

    class Torn(Gate):
        @contextmanager
        def pipeline(self, **options: Any) -> Iterator[Any]:
            with super().pipeline(**options) as pipe:
                if self.trips and tears.pop():
                    raise TornAway
                yield pipe

    gate = Torn(store.redis)
    together = Together(gate)  # type: ignore[arg-type]

    def asked() -> Any:
        try:
            return together.ask(("PING",))
        except (TornAway, redis.ConnectionError) as end:
            return type(end).__name__

    assert sorted(during_a_trip(gate, together, ask=[asked] * 5)) == ["ConnectionError"] * 4 + ["TornAway"]
    assert together.ask(("ECHO", "x")) == [b"x"]


GIVEN_UP = """
from gevent import monkey; monkey.patch_all()
import gevent, redis, sys
from openrl.tasks.together import Together

together = Together(redis.Redis.from_url(sys.argv[1]))
under_way = gevent.spawn(together.ask, ("BLPOP", "nothing", 1))
gevent.sleep(0)
waiting = [gevent.spawn(together.ask, ("ECHO", "x")) for _ in range(3)]
gevent.sleep(0)
assert len(together._waiting) == 3
waiting[0].kill()
gevent.joinall([under_way, *waiting], timeout=20)
assert [each.value for each in waiting[1:]] == [[b"x"]] * 2
assert together.ask(("ECHO", "y")) == [b"y"]
print("done")
"""


def test_one_who_gives_up_while_waiting_is_not_waited_for(store_url: str) -> None:
    command = [sys.executable, "-c", GIVEN_UP, store_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "done\n", done.stderr
