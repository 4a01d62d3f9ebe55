"""All weights of the one run that a process trains: float32 masters, and the model that computes with them.

The model lies on its device in the type that it computes in, and is written anew from the masters whenever these have
changed. Everything is in the checkpoint's names (`openrl.workers.model.coordinates`): masters, moments, gradients,
files. Knows neither operations nor losses; it stands where a LoRA run has its adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import coordinates, identity, recomputing
from openrl.workers.model.loading import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTuning:
    """How a process trains all weights."""

    offloads: bool = False
    """Whether moments lie in host memory."""
    publishes: torch.dtype | None = None
    """The type of versions for samplers; None: the one that each tensor of the base model has on disk."""


@dataclass(slots=True)
class Edition:
    """How often weights were written: what was made of an earlier edition is not of them."""

    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masters:
    """The float32 weights by their names in the checkpoint, and the model that they are for."""

    loaded: LoadedModel
    weights: Mapping[str, Tensor]
    """On the model's device, once they were adopted."""
    tuning: FullTuning = FullTuning()
    rank: int = 0
    """There is no adapter: what rows and manifests say."""
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    edition: Edition = field(default_factory=Edition)

    @classmethod
    def of_base(cls, loaded: LoadedModel, tuning: FullTuning) -> Self:
        """Return the weights that the base model has on disk, whatever the model in memory has become since.

        Raises:
            InvalidRequest: they can't be read, or aren't those of the model.
        """
        return cls(loaded=loaded, weights=read(Path(loaded.tokenizer_path), loaded), tuning=tuning)

    @property
    def home(self) -> Path:
        """The directory of the base model."""
        return Path(self.loaded.tokenizer_path)

    @property
    def stored_dtypes(self) -> dict[str, torch.dtype]:
        """The type that each tensor of the base model has on disk."""
        found = coordinates.stored_dtypes(self.home)
        return {name: found[name] for name in self.weights}

    def adopted(self) -> Self:
        """Return the same on the model's device, which is made what they are and computes gradients from now on."""
        weights = {name: tensor.to(self.loaded.device) for name, tensor in self.weights.items()}
        masters = replace(self, weights=weights)
        self.loaded.model.requires_grad_(True)
        masters.install()
        return masters

    @torch.no_grad()
    def take(self, other: Mapping[str, Tensor]) -> None:
        """Become other weights of the same names, wherever these lie, without a second set on the device."""
        for name, tensor in self.weights.items():
            tensor.copy_(other[name])
        self.install()

    @torch.no_grad()
    def install(self) -> None:
        """Make the model in memory what the masters are, in its own type; whoever has changed these calls it."""
        self.edition.number += 1
        for name, view in coordinates.views(self.loaded.model).items():
            view.copy_(self.weights[name])

    def parameters(self) -> list[Tensor]:
        """Return the masters, always in the same order."""
        return list(self.weights.values())

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same with their names."""
        yield from self.weights.items()

    def leaves(self) -> list[Tensor]:
        """Return the tensors of the model that gradients are asked of."""
        return list(self.loaded.model.parameters())

    def gradients(self, of_leaves: Sequence[Tensor | None]) -> list[Tensor]:
        """Return gradients of the leaves as float32 ones of the masters, in their order; None counts as 0."""
        whole = [
            torch.zeros_like(leaf, dtype=torch.float32) if gradient is None else gradient.float()
            for leaf, gradient in zip(self.leaves(), of_leaves, strict=True)
        ]
        return list(coordinates.taken_apart(self.loaded.model, whole).values())

    def published(self) -> dict[str, Tensor]:
        """Return copies of the weights on the CPU, in the types that samplers get them in."""
        if self.tuning.publishes is None:
            dtypes = self.stored_dtypes
        else:
            dtypes = dict.fromkeys(self.weights, self.tuning.publishes)
        return {name: tensor.to("cpu", dtypes[name], copy=True).contiguous() for name, tensor in self.weights.items()}


def left_bytes(loaded: LoadedModel) -> int:
    """Return what the device could still give for activations: a backward of all weights needs room for gradients.

    Those of the model in its own type, and their sum in float32.
    """
    num = sum(parameter.numel() for parameter in loaded.model.parameters())
    return recomputing.left_bytes(loaded.device) - num * (loaded.dtype.itemsize + 4)


def read(directory: Path, loaded: LoadedModel) -> dict[str, Tensor]:
    """Read a model's directory as float32 tensors on the CPU, exactly those that the loaded model has.

    Raises:
        InvalidRequest: a file can't be read; a tensor is missing, has another shape or a number that isn't finite.
    """
    what = f"weights {directory.name!r}"
    expected = {name: tuple(view.shape) for name, view in coordinates.views(loaded.model).items()}
    try:
        files = identity.tensor_files(directory)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{what} hold no readable model") from error
    missing = sorted(expected.keys() - files.keys())
    if missing:
        raise InvalidRequest(f"{what} lack {len(missing)} of the model's tensors, {missing[0]} among them")
    found: dict[str, Tensor] = {}
    for file in sorted(set(files.values())):
        try:
            with safe_open(directory / file, framework="pt") as tensors:
                for name in expected.keys() & set(tensors.keys()):
                    found[name] = _checked(what, name, tensors.get_tensor(name), expected[name])
        except (OSError, SafetensorError) as error:
            raise InvalidRequest(f"{file} of {what} can't be read as safetensors") from error
    return {name: found[name] for name in expected}


def _checked(what: str, name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise InvalidRequest(f"{what}: {name} has shape {tuple(tensor.shape)}, the model needs {shape}")
    if not tensor.is_floating_point() or tensor.dtype.itemsize > 4:
        raise InvalidRequest(f"{what}: {name} has type {tensor.dtype}, which is no float of up to 32 bits")
    if tensor.numel() and not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        raise InvalidRequest(f"{what}: {name} holds a number that is not finite")
    return tensor.to(torch.float32, copy=True)
