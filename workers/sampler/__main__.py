"""`python -m openrl.workers.sampler --base NAME --name WORKER`: build, bind, serve."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from transformers import AutoTokenizer

from openrl.tasks import keys, upgrade
from openrl.tasks.doorbell import Waiter
from openrl.tasks.drafts import Publisher
from openrl.tasks.errors import InvalidRequest, OpenRLError, OtherVersion
from openrl.tasks.futures import Completions
from openrl.tasks.journal import Journal
from openrl.tasks.ownership import Lease
from openrl.tasks.process import die_with_parent, leave
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.worker import serve
from openrl.workers.model.loading import LoadedModel, load
from openrl.workers.sampler.engine import SamplerEngine
from openrl.workers.sampler.requests import Limits
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.stops import Decode
from openrl.workers.sampler.torch_engine import TorchEngine
from openrl.workers.sampler.versions import Versions
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, load_adapter


def tokenizer_of(path: str) -> Decode:
    """Return a decoder that reads the tokenizer in `path` when it is first needed; special tokens stay."""

    @functools.cache
    def tokenizer() -> Any:
        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as failure:
            raise InvalidRequest("this base model has no readable tokenizer: use stop tokens, not strings") from failure

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer().decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    return decode


def version_loader(data_dir: Path, loaded: LoadedModel) -> Callable[[str], Adapter]:
    """Return what loads a version by its directory, digests compared first."""

    def load_version(directory: str) -> Adapter:
        path = layout.existing(data_dir, directory)
        base_digest = manifest.verify(path).base_digest
        if base_digest and loaded.digest and base_digest != loaded.digest:
            raise InvalidRequest("these weights were trained on another base than the one served under its name")
        return load_adapter(path, loaded)

    return load_version


def runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    grace_s: float = float("inf"),
) -> tuple[TorchEngine, Limits]:
    """Load the base model, which must have this digest, and return what draws from it, and what it can take.

    An adapter that was not used for `grace_s` leaves memory.
    """
    loaded = load(model_path)
    loaded.require(digest)
    versions = Versions(version_loader(data_dir, loaded), max_idle=settings.versions, idle_s=grace_s)
    engine = TorchEngine(
        loaded,
        versions,
        tokenizer_of(loaded.tokenizer_path),
        num_slots=settings.slots,
        kv_tokens=settings.kv_tokens,
        prefill_tokens=settings.prefill_tokens,
    )
    limits = Limits(
        vocab_size=loaded.vocab_size,
        max_context=loaded.max_context,
        cache_tokens=settings.kv_tokens,
        eos_token_ids=loaded.eos_token_ids,
    )
    return engine, limits


def build(base: str, name: str, store: Store, settings: SamplerSettings) -> SamplerEngine:
    """Return the engine of a base model, not yet started. Its lease stands while the model is loaded."""
    model = Registry(store).model(base)

    def new_lease() -> Lease:
        return Lease(store, name, kind="sampler", slug=model.slug)

    lease = new_lease()
    try:
        torch_engine, limits = runner(
            model.path,
            store.settings.data_dir,
            settings,
            digest=model.digest,
            grace_s=store.settings.session_grace_s,
        )
    except BaseException:
        lease.close()
        raise
    completions = Completions(store)
    engine = SamplerEngine(
        torch_engine,
        Journal(store),
        Waiter(store, worker_id=lambda: name),
        lease=lease,
        new_lease=new_lease,
        slug=model.slug,
        limits=limits,
        poll_s=settings.poll_s,
        stop_s=settings.stop_s,
        drafts=Publisher(store),
    )
    completions.call_on_wake(keys.samplers(model.slug), engine.wake)
    completions.call_on_wake(keys.cancelling(name), engine.let_go)
    completions.call_with(keys.new_versions(model.slug), engine.hear_version)
    return engine


@click.command()
@click.option("--base", required=True, help="Name of the base model, as it is registered.")
@click.option("--name", required=True, help="Name of this worker, unique among those that run.")
def main(base: str, name: str) -> None:
    """Serve the samples of one base model until SIGTERM."""
    die_with_parent()
    try:
        store_settings, settings = StoreSettings.from_env(), SamplerSettings.from_env()
        if threads := int(os.environ.get("OPENRL_TORCH_THREADS") or 0):
            torch.set_num_threads(threads)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.workers.sampler: {nonsense}\n")
        sys.exit(2)
    logging.basicConfig(level=store_settings.log_level)
    try:
        store = Store.connect(store_settings)
        upgrade.check(store)
        engine = build(base, name, store, settings)
    except OtherVersion as other:
        sys.stderr.write(f"openrl.workers.sampler: {other}\n")
        sys.exit(2)
    except (OpenRLError, ValueError) as failure:
        raise SystemExit(f"the sampler can't start: {failure}") from failure
    leave(serve(engine, store=store, family="sample", slug=engine.slug, name=name))


if __name__ == "__main__":
    main()
