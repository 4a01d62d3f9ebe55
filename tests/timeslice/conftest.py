"""A store without a disk for the turns: what is durable is tested where the store is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from tests.conftest import QUICK_OPTIONS, store_server


@pytest.fixture(scope="session")
def quick_url() -> Iterator[str]:
    with store_server(QUICK_OPTIONS) as url:
        yield url


@pytest.fixture
def client(quick_url: str) -> Iterator[redis.Redis]:
    """A client of an empty store."""
    connected = redis.Redis.from_url(quick_url)
    connected.flushall()
    yield connected
    connected.close()
