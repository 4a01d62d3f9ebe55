"""A full run's weights as a model's directory: what stock transformers loads, and we read again bit by bit.

Beside the tensors lie config and tokenizer of the base model, as they are there. Large models are cut into several
files with an index. Knows neither moments nor manifests, and makes nothing durable: that is `states`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from openrl.workers.model import identity
from openrl.workers.weights import manifest
from openrl.workers.weights.adapter import save_tensors

SHARD_BYTES = 4 << 30
"""Of one file, about: what a reader may hold of it at once."""

BESIDE = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""How config and tokenizer end; what else may lie there is weights in other forms, code, or there to be read."""


_OURS = (identity.INDEX, manifest.FILENAME)


def write(
    directory: Path,
    weights: Mapping[str, Tensor],
    *,
    base: Path,
    dtypes: Mapping[str, torch.dtype] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model into an existing directory; without `dtypes` in float32.

    Raises:
        OSError: the disk refused, and why.
    """
    for path in sorted(base.iterdir()):
        if path.suffix in BESIDE and path.name not in _OURS and path.is_file():
            shutil.copyfile(path, directory / path.name)
    shards = list(_shards(weights, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = identity.SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_tensors(directory / file, {name: weights[name] for name in names}, dtypes=dtypes)
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.numel() * _dtype(name, dtypes).itemsize for name, tensor in weights.items())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / identity.INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _shards(weights: Mapping[str, Tensor], most_bytes: int) -> Iterator[list[str]]:
    """Cut the names, in order, where a file would become too large; a larger tensor has a file of its own."""
    names: list[str] = []
    size = 0
    for name, tensor in weights.items():
        if names and size + 4 * tensor.numel() > most_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += 4 * tensor.numel()
    yield names


def _dtype(name: str, dtypes: Mapping[str, torch.dtype] | None) -> torch.dtype:
    return torch.float32 if dtypes is None else dtypes[name]
