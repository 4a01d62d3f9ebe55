"""A run to a directory and back: PEFT adapter or whole model, AdamW's moments, the gradient, a manifest.

The one place that knows which files a checkpoint, a version for samplers and a recovery snapshot hold.
A directory appears whole or not at all. Knows neither the store nor operations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.records import FULL, LORA
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import Adapter
from openrl.workers.trainer import model_files
from openrl.workers.trainer.full import FullTuning, Masters
from openrl.workers.trainer.full import read as full_weights
from openrl.workers.trainer.optimizer import Moments
from openrl.workers.trainer.runs import Run
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import (
    load_adapter,
    load_tensors,
    save_adapter,
    save_tensors,
)
from openrl.workers.weights.manifest import GRADIENTS_FILE, OPTIMIZER_FILE, Manifest

TRAINING = "training"
SAMPLER = "sampler"
EXTERNAL = "external"
SNAPSHOT = "snapshot"

_WITH_OPTIMIZER = (TRAINING, SNAPSHOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What a directory held: `moments` and `gradient` only if they were asked for.

    Of all weights everything is in host memory: it is `Run.take` that brings it to the device.
    """

    manifest: Manifest
    trained: Adapter | Masters
    moments: Moments
    gradient: list[Tensor] | None


def write(
    final: Path,
    run: Run,
    *,
    kind: str,
    base_model: str,
    base_digest: str,
    extra: dict[str, Any] | None = None,
) -> Manifest:
    """Write `run` as the directory `final`, durable when this returns; after an error nothing is there.

    A directory of that name can only be one that was never registered, and is replaced.
    """
    trained = run.weights()
    layout.remove(final)
    staged = layout.staging(final)
    try:
        if isinstance(trained, Masters):
            dtypes = trained.stored_dtypes if kind == EXTERNAL else None
            model_files.write(staged, trained.weights, base=trained.home, dtypes=dtypes)
        else:
            save_adapter(staged, trained, base_model)
        if kind in _WITH_OPTIMIZER and run.moments.step:
            save_tensors(staged / OPTIMIZER_FILE, _named_moments(trained, run.moments))
        if kind == SNAPSHOT and run.gradient is not None:
            save_tensors(staged / GRADIENTS_FILE, dict(zip(_names(trained), run.gradient, strict=True)))
        described = manifest_of(run, trained, kind=kind, base_model=base_model, base_digest=base_digest, extra=extra)
        complete = manifest.write(staged, described)
        layout.publish(staged, final)
    except BaseException:
        layout.remove(staged)
        raise
    return complete


def read(
    directory: Path, loaded: LoadedModel, *, base_model: str, with_optimizer: bool, full: FullTuning | None = None
) -> State:
    """Read a directory for training on `loaded`; everything is checked before anything is returned.

    With `full` it is all weights, which `loaded` becomes; else an adapter.

    Raises:
        InvalidRequest: torn, for another base model, of the other kind, or without the moments that were asked for.
    """
    found = manifest.verify(directory)
    wanted = LORA if full is None else FULL
    if found.fine_tuning != wanted:
        raise InvalidRequest(
            f"the checkpoint is of {found.fine_tuning} fine-tuning, this run is of {wanted}; "
            "create a run from the checkpoint"
        )
    if found.base_model != base_model:
        raise InvalidRequest(f"the checkpoint is of base model {found.base_model!r}, this run is of {base_model!r}")
    if found.base_digest and loaded.digest and found.base_digest != loaded.digest:
        raise InvalidRequest(f"the checkpoint was made on other weights than those served as {base_model!r}")
    if with_optimizer and not found.has_optimizer:
        raise InvalidRequest("the checkpoint holds no optimizer state; load its weights alone")
    trained: Adapter | Masters
    if full is None:
        trained = load_adapter(directory, loaded, trainable=True)
    else:
        trained = Masters(loaded=loaded, weights=full_weights(directory, loaded), tuning=full)
    home = loaded.device if full is None else torch.device("cpu")
    moments = Moments()
    if with_optimizer and OPTIMIZER_FILE in found.files:
        moments = _read_moments(directory, trained, home, step=found.step)
    gradient = None
    if GRADIENTS_FILE in found.files:
        shapes = {name: tensor.shape for name, tensor in trained.named_parameters()}
        gradient = _moved(load_tensors(directory / GRADIENTS_FILE, shapes).values(), home)
    return State(manifest=found, trained=trained, moments=moments, gradient=gradient)


def manifest_of(
    run: Run, trained: Adapter | Masters, *, kind: str, base_model: str, base_digest: str, extra: dict[str, Any] | None
) -> Manifest:
    """Return what a directory of `kind` says of itself; its files are still to be named."""
    return Manifest(
        kind=kind,
        base_model=base_model,
        base_digest=base_digest,
        rank=trained.rank,
        alpha=trained.alpha,
        targets=trained.targets,
        train_attn=run.train_attn,
        train_mlp=run.train_mlp,
        train_unembed=run.train_unembed,
        step=run.moments.step,
        seed=run.seed,
        has_optimizer=kind in _WITH_OPTIMIZER,
        fine_tuning=FULL if isinstance(trained, Masters) else LORA,
        extra=extra or {},
    )


def _names(trained: Adapter | Masters) -> list[str]:
    return [name for name, _ in trained.named_parameters()]


def _named_moments(trained: Adapter | Masters, moments: Moments) -> dict[str, Tensor]:
    names = _names(trained)
    means = {f"{name}.exp_avg": tensor for name, tensor in zip(names, moments.exp_avg, strict=True)}
    return means | {f"{name}.exp_avg_sq": tensor for name, tensor in zip(names, moments.exp_avg_sq, strict=True)}


def _read_moments(directory: Path, trained: Adapter | Masters, home: torch.device, *, step: int) -> Moments:
    shapes = {
        f"{name}.{which}": tensor.shape
        for name, tensor in trained.named_parameters()
        for which in ("exp_avg", "exp_avg_sq")
    }
    tensors = load_tensors(directory / OPTIMIZER_FILE, shapes)
    return Moments(
        exp_avg=_moved((tensors[f"{name}.exp_avg"] for name in _names(trained)), home),
        exp_avg_sq=_moved((tensors[f"{name}.exp_avg_sq"] for name in _names(trained)), home),
        step=step,
    )


def _moved(tensors: Iterable[Tensor], home: torch.device) -> list[Tensor]:
    return [tensor.to(home) for tensor in tensors]
