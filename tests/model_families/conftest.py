"""The models of the zoo, loaded."""

import pytest
import torch

from openrl.workers.model.loading import load
from tests.model_families.zoo import make_model


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Load a model of the zoo, each once."""
    torch.set_num_threads(1)
    known = {}

    def get(name):
        if name not in known:
            known[name] = load(make_model(tmp_path_factory.mktemp(name), name), device="cpu", dtype=torch.float32)
        return known[name]

    return get
