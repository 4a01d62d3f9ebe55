"""The vLLM engine of a base model: vLLM's arguments from our settings, what loads its adapters, what it can take."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest

from openrl.tasks.errors import InvalidRequest, OperationFailed
from openrl.workers.model import families, identity
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.sampler.adapter_places import AdapterPlaces
from openrl.workers.sampler.full_weights import Version
from openrl.workers.sampler.requests import Limits
from openrl.workers.sampler.rotation import Rotation
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.switching import Switching
from openrl.workers.sampler.tokenizer import tokenizer_of
from openrl.workers.sampler.versions import Versions
from openrl.workers.sampler.vllm_client import Client
from openrl.workers.sampler.vllm_engine import VllmEngine
from openrl.workers.sampler.vllm_parking import ParkingError, TookTooLong, VllmParking
from openrl.workers.sampler.vllm_transfer import NAME as TRANSFER
from openrl.workers.sampler.vllm_weights import VllmWeights
from openrl.workers.weights import layout, manifest

log = logging.getLogger(__name__)

HEAD = "lm_head"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BLOCK = 16
"""Positions that vLLM's prefix cache keeps or forgets together."""
CPU_BLOCK = 128
MOST_CANDIDATES = 1024
"""As many as the API lets a request ask for, `openrl.app.checks.MAX_TOPK`."""


def runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    grace_s: float = float("inf"),
    accelerator: Accelerator | None = None,
) -> tuple[VllmEngine, Limits]:
    """Start vLLM on a base model, which must have this digest; return what draws from it, and what it can take.

    With an `accelerator` that others share it sleeps between turns; call it in one.

    Raises:
        InvalidRequest: the model, or the settings on this machine, can't be served; CannotStart is one.
    """
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    families.check(config)
    if digest and identity.digest_of(Path(model_path)) != digest:
        raise InvalidRequest(f"{model_path} was changed while the service ran; start `openrl up` anew")
    sleeps = accelerator is not None and accelerator.shared
    client = Client(arguments(model_path, config, settings, sleeps=sleeps))
    load = version_loader(data_dir, client, digest=digest, max_rank=settings.max_lora_rank)
    # Never more than vLLM keeps by itself: what it forgot it would read again, in a step and unverified.
    idle = min(settings.versions, settings.max_cpu_loras - settings.max_loras)
    versions = Versions(load, max_idle=idle, idle_s=grace_s, unload=client.remove_adapter, beside=not sleeps)
    places = AdapterPlaces(settings.max_loras)
    engine = VllmEngine(client, versions, tokenizer_of(model_path), num_slots=settings.slots, places=places)
    if accelerator is not None and accelerator.shared:
        share(accelerator, client, engine)
    return engine, _limits(model_path, config, client)


def share(accelerator: Accelerator, client: Client, engine: VllmEngine) -> None:
    """Let vLLM sleep between turns.

    Raises:
        InvalidRequest: it has no memory that it could put aside.
        OperationFailed: it didn't say so in time; it may another time.
    """
    accelerator.name_processes(*client.pids)
    try:
        accelerator.add(VllmParking(client, stopped=engine.stopped))
    except TookTooLong as failure:
        raise OperationFailed(f"OPENRL_SAMPLER_BETWEEN_TURNS=sleeps: {failure}") from failure
    except ParkingError as failure:
        raise InvalidRequest(f"OPENRL_SAMPLER_BETWEEN_TURNS=sleeps: {failure}; take stays") from failure


def full_runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    accelerator: Accelerator | None = None,
) -> tuple[Switching, Limits]:
    """Start vLLM for the versions of a full run on a base model; return what draws from them, and what it can take.

    With an `accelerator` that others share it sleeps between turns; call it in one.

    Raises:
        InvalidRequest: there is no GPU; a mixture of experts, whose weights vLLM packs anew as it loads them.
    """
    config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    layout_of = families.check(config)
    if not torch.cuda.device_count():
        raise InvalidRequest("vLLM's weights can only be changed on a GPU: take the torch engine for full runs")
    if layout_of.experts:
        raise InvalidRequest("vLLM's weights of a mixture of experts aren't changed: take the torch engine")
    if digest and identity.digest_of(Path(model_path)) != digest:
        raise InvalidRequest(f"{model_path} was changed while the service ran; start `openrl up` anew")
    sleeps = accelerator is not None and accelerator.shared
    client = Client(full_arguments(model_path, config, settings, sleeps=sleeps))
    nothing: Versions[LoRARequest] = Versions(_no_adapter, max_idle=0)
    places = AdapterPlaces(settings.max_loras)
    engine = VllmEngine(client, nothing, tokenizer_of(model_path), num_slots=settings.slots, places=places)
    if accelerator is not None and accelerator.shared:
        share(accelerator, client, engine)
    weights = VllmWeights(client, Path(model_path), data_dir, digest=digest)
    turns: Rotation[Version] = Rotation(turn_s=settings.version_turn_s, drain_s=settings.version_drain_s)
    return Switching(engine, weights, turns, Version), _limits(model_path, config, client)


def full_arguments(
    model_path: str, config: dict[str, Any], settings: SamplerSettings, *, sleeps: bool = False
) -> AsyncEngineArgs:
    """Return what vLLM is started with where its weights will change: no adapters, and our way of transfer."""
    return replace(
        arguments(model_path, config, settings, sleeps=sleeps),
        enable_lora=False,
        worker_extension_cls="openrl.workers.sampler.vllm_transfer.FullExtension",
        weight_transfer_config=WeightTransferConfig(backend=TRANSFER),
    )


def arguments(
    model_path: str, config: dict[str, Any], settings: SamplerSettings, *, sleeps: bool = False
) -> AsyncEngineArgs:
    """Return what vLLM is started with; sets its environment, which it reads when it is imported further.

    `sleeps`: its memory, graphs included, can be put aside; vLLM refuses that on a CPU.

    Raises:
        InvalidRequest: fewer devices than the settings want.
    """
    devices = torch.cuda.device_count()
    if settings.tensor_parallel_size > max(1, devices):
        raise InvalidRequest(
            f"OPENRL_SAMPLER_TENSOR_PARALLEL_SIZE is {settings.tensor_parallel_size}; this worker sees "
            f"{devices} devices"
        )
    _prepare_environment(cpu=not devices)
    block = BLOCK if devices else CPU_BLOCK
    # On a GPU the longest sequence that fits is left to vLLM; one block it keeps back.
    memory: dict[str, Any] = (
        {"gpu_memory_utilization": settings.gpu_memory_utilization, "max_model_len": -1}
        if devices
        else {
            "num_gpu_blocks_override": -(-settings.kv_tokens // block) + 1,
            "max_model_len": min(families.max_context(config), settings.kv_tokens),
            "max_num_batched_tokens": settings.prefill_tokens + settings.slots,
        }
    )
    _, serves_head = settings.serves(str(config["model_type"]), int(config["vocab_size"]))
    return AsyncEngineArgs(
        model=model_path,
        skip_tokenizer_init=True,
        dtype="bfloat16" if devices else "float32",
        max_num_seqs=settings.slots,
        max_logprobs=min(MOST_CANDIDATES, int(config["vocab_size"])),
        generation_config="vllm",
        block_size=block,
        enable_prefix_caching=True,
        enforce_eager=not devices,
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
        enable_lora=True,
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        max_lora_rank=settings.max_lora_rank,
        lora_target_modules=[*TARGETS, *([HEAD] if serves_head else [])],
        logits_processors=["openrl.workers.sampler.vllm_rows:Rows"],
        worker_extension_cls="openrl.workers.sampler.vllm_worker.Extension",
        enable_log_requests=False,
        disable_log_stats=True,
        enable_sleep_mode=sleeps,
        sleep_mode_offload_cudagraph=sleeps,
        **memory,
    )


def version_loader(data_dir: Path, client: Client, *, digest: str, max_rank: int) -> Callable[[str], LoRARequest]:
    """Return what loads a version by its directory, digests compared first.

    Each load has a name and a number of its own, for ever: vLLM keeps by them what it has computed.
    """
    numbers = itertools.count(1)

    def load_version(directory: str) -> LoRARequest:
        path = layout.existing(data_dir, directory)
        found = manifest.verify(path)
        if found.base_digest and digest and found.base_digest != digest:
            raise InvalidRequest("these weights were trained on another base than the one served under its name")
        if found.rank > max_rank:
            raise InvalidRequest(
                f"this adapter has rank {found.rank}; the sampler serves at most {max_rank} "
                "(OPENRL_SAMPLER_MAX_LORA_RANK)"
            )
        number = next(numbers)
        adapter = LoRARequest(lora_name=f"{number}:{directory}", lora_int_id=number, lora_path=str(path))
        client.add_adapter(adapter)
        return adapter

    return load_version


def _limits(model_path: str, config: dict[str, Any], client: Client) -> Limits:
    log.info("vLLM runs in the processes %s, its cache has %d positions", client.pids, client.cache_tokens)
    return Limits(
        vocab_size=int(config["vocab_size"]),
        max_context=min(families.max_context(config), client.max_context),
        cache_tokens=client.cache_tokens,
        eos_token_ids=_eos(Path(model_path), config),
    )


def _no_adapter(directory: str) -> LoRARequest:
    raise InvalidRequest(f"{directory} was taken for an adapter; a full run has none")


def _prepare_environment(*, cpu: bool) -> None:
    """Choose what vLLM reads from its environment, where the operator has not."""
    chosen = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # The model runner whose sampler `vllm_worker` replaces.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if cpu:
        threads = os.environ.get("OPENRL_TORCH_THREADS") or str(torch.get_num_threads())
        chosen |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


def _eos(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """End-of-text ids: the generation config knows those of chat models, the model config is the fallback."""
    generation = path / "generation_config.json"
    said = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
    found = said.get("eos_token_id", config.get("eos_token_id"))
    return () if found is None else tuple(found) if isinstance(found, list) else (found,)
