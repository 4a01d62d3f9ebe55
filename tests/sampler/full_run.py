"""A full run as its trainer has it: weights that change, and the versions that it published."""

from __future__ import annotations

from pathlib import Path

import torch

from openrl.workers.model import coordinates
from openrl.workers.model.loading import load
from openrl.workers.weights.publish import Publisher

HOME = "tenants/local/runs/s_train_0/sampler_weights"
Weights = dict[str, torch.Tensor]


class Run:
    """One run. `saved` and `digests` are by the version's directory."""

    def __init__(self, data_dir: Path, model: Path, dtype: torch.dtype = torch.float32) -> None:
        self.data_dir, self.model = data_dir, model
        views = coordinates.views(load(model, device="cpu").model)
        self.weights = {name: view.to(dtype) for name, view in views.items()}
        self.publisher = Publisher(data_dir / HOME, threads=1)
        self.saved: dict[str, Weights] = {}
        self.digests: dict[str, str] = {}

    def train(self, seed: int) -> None:
        """Move about a twentieth of the weights a little."""
        draw = torch.Generator().manual_seed(seed)
        self.weights = {
            name: torch.where(
                torch.rand(each.shape, generator=draw) < 0.05,
                (each + 0.2 * torch.randn(each.shape, generator=draw)).to(each.dtype),
                each,
            )
            for name, each in self.weights.items()
        }

    def publish(self, name: str, **options) -> str:
        link = self.publisher.publish(name, self.weights, step=len(self.saved), **options)
        directory = f"{HOME}/{name}"
        self.saved[directory], self.digests[directory] = self.weights, link.ident.digest
        return directory

    def steps(self, count: int) -> list[str]:
        """Publish so many versions, a step between each."""
        found = []
        for _ in range(count):
            self.train(len(self.saved))
            found.append(self.publish(f"v{len(self.saved)}.1"))
        return found
