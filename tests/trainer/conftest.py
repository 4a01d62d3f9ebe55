"""A tiny base model and a device on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from openrl.tasks.store import Store
from openrl.workers.model import loading
from tests.tiny import make_tiny_model
from tests.trainer.bench import Bench
from tests.trainer.service import Service


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model with tied embeddings."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def loaded(tiny_path: Path) -> loading.LoadedModel:
    """The tiny model in float32 on the CPU."""
    torch.set_num_threads(1)
    return loading.load(tiny_path, device="cpu", dtype=torch.float32)


@pytest.fixture
def bench(loaded: loading.LoadedModel, tmp_path: Path) -> Bench:
    """A device on the tiny model."""
    return Bench(loaded, tmp_path)


@pytest.fixture
def service(store: Store, loaded: loading.LoadedModel) -> Iterator[Service]:
    """A journal, and trainers on the tiny model; every lease ends with the test."""
    service = Service(store, loaded)
    yield service
    service.close()
