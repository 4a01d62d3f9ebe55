"""The torch engine of a base model: its weights, what loads its adapters, and what it can take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import warming
from openrl.workers.model.accelerator import Accelerator, SharedAccelerator
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.sampler.full_weights import FullWeights, Version
from openrl.workers.sampler.pools import PoolsParking
from openrl.workers.sampler.requests import Limits
from openrl.workers.sampler.rotation import Rotation
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.switching import Switching
from openrl.workers.sampler.tokenizer import tokenizer_of
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, load_adapter


def version_loader(data_dir: Path, loaded: LoadedModel) -> Callable[[str], Adapter]:
    """Return what loads a version by its directory, digests compared first."""

    def load_version(directory: str) -> Adapter:
        path = layout.existing(data_dir, directory)
        found, contents = manifest.contents(path)
        if found.base_digest and loaded.digest and found.base_digest != loaded.digest:
            raise InvalidRequest("these weights were trained on another base than the one served under its name")
        with torch.inference_mode(False):  # tensors of inference mode don't say when they were changed
            return load_adapter(path, loaded, contents=contents)

    return load_version


def runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    grace_s: float = float("inf"),
    accelerator: Accelerator | None = None,
) -> tuple[TorchEngine, Limits]:
    """Load the base model, which must have this digest, and return what draws from it, and what it can take.

    An adapter that was not used for `grace_s` leaves memory. Call it in a turn of the `accelerator`.
    """
    shared = accelerator if isinstance(accelerator, SharedAccelerator) else None
    loaded = load(model_path)
    loaded.require(digest)
    if loaded.device.type == "cpu":
        warming.warm_up()
    versions = Versions(
        version_loader(data_dir, loaded), max_idle=settings.versions, idle_s=grace_s, beside=shared is None
    )
    engine = TorchEngine(
        loaded,
        versions,
        tokenizer_of(loaded.tokenizer_path),
        num_slots=settings.slots,
        kv_tokens=settings.kv_tokens,
        prefill_tokens=settings.prefill_tokens,
        copy_bytes=settings.weights_copy_bytes if shared is None else 0,
    )
    if shared is not None:
        shared.hold(lambda: [*loaded.tensors(), *engine.adapters()])
        shared.add(PoolsParking(engine.pools, shared.device))
    limits = Limits(
        vocab_size=loaded.vocab_size,
        max_context=loaded.max_context,
        cache_tokens=settings.kv_tokens,
        eos_token_ids=loaded.eos_token_ids,
    )
    return engine, limits


def full_runner(engine: TorchEngine, data_dir: Path, settings: SamplerSettings, *, in_place: bool | None) -> Switching:
    """Return what draws from a full run's versions, with an engine on their base model.

    With `in_place` the model's own memory is patched; None: where it lies on the CPU.
    """
    return Switching(
        engine,
        FullWeights(engine.loaded, data_dir, in_place=in_place),
        Rotation(turn_s=settings.version_turn_s, drain_s=settings.version_drain_s),
        Version,
    )
