"""A run to a directory and back: PEFT adapter, AdamW's moments, the gradient, a manifest.

The one place that knows which files a checkpoint, a version for samplers and a recovery snapshot hold.
A directory appears whole or not at all. Knows neither the store nor operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import Adapter
from openrl.workers.trainer.optimizer import Moments
from openrl.workers.trainer.runs import Run
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import (
    GRADIENTS_FILE,
    OPTIMIZER_FILE,
    load_adapter,
    load_tensors,
    save_adapter,
    save_tensors,
)
from openrl.workers.weights.manifest import Manifest

TRAINING = "training"
SAMPLER = "sampler"
EXTERNAL = "external"
SNAPSHOT = "snapshot"

_WITH_OPTIMIZER = (TRAINING, SNAPSHOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a directory held: `moments` and `gradient` only if they were asked for."""

    manifest: Manifest
    adapter: Adapter
    moments: Moments
    gradient: list[Tensor] | None


def write(
    final: Path, run: Run, *, kind: str, base_model: str, base_digest: str, extra: dict[str, Any] | None = None
) -> Manifest:
    """Write `run` as the directory `final`, durable when this returns; after an error nothing is there.

    A directory of that name can only be one that was never registered, and is replaced.
    """
    adapter = run.weights()
    layout.remove(final)
    staged = layout.staging(final)
    try:
        save_adapter(staged, adapter, base_model)
        if kind in _WITH_OPTIMIZER and run.moments.step:
            save_tensors(staged / OPTIMIZER_FILE, _named_moments(adapter, run.moments))
        if kind == SNAPSHOT and run.gradient is not None:
            save_tensors(staged / GRADIENTS_FILE, dict(zip(_names(adapter), run.gradient, strict=True)))
        described = _manifest(run, adapter, kind=kind, base_model=base_model, base_digest=base_digest, extra=extra)
        complete = manifest.write(staged, described)
        layout.publish(staged, final)
    except BaseException:
        layout.remove(staged)
        raise
    return complete


def read(directory: Path, loaded: LoadedModel, *, base_model: str, with_optimizer: bool) -> State:
    """Read a directory for training on `loaded`; everything is checked before anything is returned.

    Raises:
        InvalidRequest: torn, for another base model, or without the moments that were asked for.
    """
    found = manifest.verify(directory)
    if found.base_model != base_model:
        raise InvalidRequest(f"the checkpoint is of base model {found.base_model!r}, this run is of {base_model!r}")
    if found.base_digest and loaded.digest and found.base_digest != loaded.digest:
        raise InvalidRequest(f"the checkpoint was made on other weights than those served as {base_model!r}")
    if with_optimizer and not found.has_optimizer:
        raise InvalidRequest("the checkpoint holds no optimizer state; load its weights alone")
    adapter = load_adapter(directory, loaded, trainable=True)
    moments = Moments()
    if with_optimizer and OPTIMIZER_FILE in found.files:
        moments = _read_moments(directory, adapter, loaded, step=found.step)
    gradient = None
    if GRADIENTS_FILE in found.files:
        shapes = {name: tensor.shape for name, tensor in adapter.named_parameters()}
        gradient = _moved(load_tensors(directory / GRADIENTS_FILE, shapes).values(), loaded)
    return State(manifest=found, adapter=adapter, moments=moments, gradient=gradient)


def _manifest(
    run: Run, adapter: Adapter, *, kind: str, base_model: str, base_digest: str, extra: dict[str, Any] | None
) -> Manifest:
    return Manifest(
        kind=kind,
        base_model=base_model,
        base_digest=base_digest,
        rank=adapter.rank,
        alpha=adapter.alpha,
        targets=adapter.targets,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        step=run.moments.step,
        seed=run.seed,
        has_optimizer=kind in _WITH_OPTIMIZER,
        extra=extra or {},
    )


def _names(adapter: Adapter) -> list[str]:
    return [name for name, _ in adapter.named_parameters()]


def _named_moments(adapter: Adapter, moments: Moments) -> dict[str, Tensor]:
    names = _names(adapter)
    means = {f"{name}.exp_avg": tensor for name, tensor in zip(names, moments.exp_avg, strict=True)}
    return means | {f"{name}.exp_avg_sq": tensor for name, tensor in zip(names, moments.exp_avg_sq, strict=True)}


def _read_moments(directory: Path, adapter: Adapter, loaded: LoadedModel, *, step: int) -> Moments:
    shapes = {
        f"{name}.{which}": tensor.shape
        for name, tensor in adapter.named_parameters()
        for which in ("exp_avg", "exp_avg_sq")
    }
    tensors = load_tensors(directory / OPTIMIZER_FILE, shapes)
    return Moments(
        exp_avg=_moved((tensors[f"{name}.exp_avg"] for name in _names(adapter)), loaded),
        exp_avg_sq=_moved((tensors[f"{name}.exp_avg_sq"] for name in _names(adapter)), loaded),
        step=step,
    )


def _moved(tensors: Iterable[Tensor], loaded: LoadedModel) -> list[Tensor]:
    return [tensor.to(loaded.device) for tensor in tensors]
