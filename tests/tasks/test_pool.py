"""Connections to the store that are used again without a look."""

from __future__ import annotations

import pytest
import redis

from openrl.tasks import pool
from openrl.tasks.pool import Pool
from openrl.tasks.store import Store


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A note for each time that redis' own way of taking a connection is gone."""
    seen: list[str] = []
    through = redis.BlockingConnectionPool.get_connection

    def counted(self: redis.BlockingConnectionPool, *args: object, **options: object) -> object:
        seen.append("look")
        return through(self, *args, **options)

    monkeypatch.setattr(redis.BlockingConnectionPool, "get_connection", counted)
    return seen


def test_a_connection_that_served_well_serves_again_without_a_look(store: Store, looks: list[str]) -> None:
    for _ in range(10):
        assert store.redis.ping()
    assert len(looks) <= 1  # the first, where the fixture has used none


def test_an_answer_that_nobody_read_is_given_to_nobody_else(store: Store) -> None:
    connections = store.redis.connection_pool
    connection = connections.get_connection()
    with pytest.raises(ZeroDivisionError):
        try:
            connection.send_command("ECHO", "another's")
            raise ZeroDivisionError
        finally:
            connections.release(connection)
    assert [store.redis.echo("mine") for _ in range(3)] == [b"mine"] * 3


def test_a_connection_that_the_store_has_closed_is_made_anew_without_anybody_noticing(store: Store) -> None:
    for _ in range(3):
        mine = store.redis.client_id()
        other = redis.Redis.from_url(store.settings.redis_url)
        other.client_kill_filter(_id=str(mine))
        other.close()
        assert store.redis.echo("x") == b"x"
        assert store.redis.client_id() != mine


def test_after_a_pause_a_connection_is_looked_at(
    store: Store, looks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.redis.ping()
    monkeypatch.setattr(pool, "TRUSTED_S", 0.0)
    before = len(looks)
    assert store.redis.ping() and store.redis.ping()
    assert len(looks) == before + 2


def test_who_finds_no_connection_free_is_told_so_in_time(store_url: str) -> None:
    full = Pool.from_url(store_url, max_connections=1, timeout=0.01)
    held = full.get_connection()
    with pytest.raises(redis.ConnectionError):
        full.get_connection()
    full.release(held)
    assert full.get_connection() is held
    full.disconnect()
