"""A trainer process: `python -m openrl.workers.trainer --base NAME [--pool SLUG] --name WORKER`.

Builds the parts, binds the engine to this process's Celery tasks, serves until SIGTERM or SIGINT. Without a pool it
serves the LoRA runs of its base model, with one the full fine-tuning run whose pool that is.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from functools import partial

import click
import torch

from openrl.tasks import assignment, keys, upgrade
from openrl.tasks.doorbell import Waiter
from openrl.tasks.errors import OpenRLError, OtherVersion
from openrl.tasks.futures import Completions
from openrl.tasks.journal import Journal
from openrl.tasks.ownership import Lease
from openrl.tasks.process import die_with_parent, leave
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.worker import serve
from openrl.workers.model import grouped, loading, warming
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.model.settings import AcceleratorSettings
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.engine import TrainerEngine
from openrl.workers.trainer.full import FullTuning, left_bytes
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.residency import Residency
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.snapshots import Snapshots

log = logging.getLogger(__name__)

_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@click.command()
@click.option("--base", required=True, help="Name of the base model to serve.")
@click.option("--pool", default="", help="Slug of the pool to serve, where it isn't the base model's own.")
@click.option("--name", required=True, help="Name of this worker, unique in the service.")
def main(base: str, pool: str, name: str) -> None:
    """Train the LoRA runs of one base model, or one full run on it."""
    die_with_parent()
    try:
        store_settings, settings = StoreSettings.from_env(), TrainerSettings.from_env()
        turns = AcceleratorSettings.from_env(os.environ)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.workers.trainer: {nonsense}\n")
        sys.exit(2)
    logging.basicConfig(level=store_settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        store = Store.connect(store_settings)
        upgrade.check(store)
        if not assignment.keep(store, os.environ):
            sys.exit(1)
        accelerator = Accelerator.of(store, turns, owner=name)
        with accelerator.turn():
            engine, slug = build(store, store_settings, settings, accelerator, base=base, pool=pool, name=name)
    except OtherVersion as other:
        sys.stderr.write(f"openrl.workers.trainer: {other}\n")
        sys.exit(2)
    except (OpenRLError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    leave(serve(engine, store=store, family="train", slug=slug, name=name))


def build(
    store: Store,
    store_settings: StoreSettings,
    settings: TrainerSettings,
    accelerator: Accelerator,
    *,
    base: str,
    pool: str = "",
    name: str,
) -> tuple[TrainerEngine, str]:
    """Load the base model in a turn and connect the parts; return the engine and its pool's slug."""
    registry, journal = Registry(store), Journal(store)
    model = registry.model(base)
    slug = pool or model.slug
    if keys.base_slug(slug) != model.slug:
        raise ValueError(f"pool {slug!r} is not of base model {model.name!r}, whose slug is {model.slug!r}")

    def new_lease() -> Lease:
        return Lease(store, name, "trainer", slug)

    lease = new_lease()
    torch.set_num_threads(settings.torch_threads or os.cpu_count() or 1)
    grouped.choose(settings.grouped_mm)
    full = _full_tuning(settings) if keys.is_full(slug) else None
    loaded = loading.load(model.path, dtype=_DTYPES[settings.compute_dtype] if full else None)
    loaded.require(model.digest)
    accelerator.hold(loaded.tensors)
    log.info("loaded %s from %s: %s on %s", model.name, model.path, loaded.dtype, loaded.device)
    if loaded.device.type == "cpu" and not full:
        warming.warm_up()
    budget = settings.token_budget or (16384 if loaded.device.type == "cuda" else 1024)
    settings = replace(settings, token_budget=budget)
    if full:  # which is alone, and leaves when nothing has asked for it for long
        settings = replace(settings, resident_bytes=sys.maxsize, device_bytes=sys.maxsize)
    data_dir = store_settings.data_dir
    residency = Residency(loaded.device, most_runs=settings.device_runs, most_bytes=settings.device_bytes)
    checkpoints = Checkpoints(loaded, base_model=model.name, slug=slug, registry=registry, data_dir=data_dir, full=full)
    device = Device(
        loaded,
        checkpoints,
        token_budget=settings.token_budget,
        residency=residency,
        recomputing=Recomputing(
            loaded, settings.gradient_checkpointing, left=partial(left_bytes, loaded) if full else None
        ),
        tells_entropy=settings.entropy == "on",
    )
    completions = Completions(store)
    engine = TrainerEngine(
        slug=slug,
        journal=journal,
        lease=lease,
        new_lease=new_lease,
        device=device,
        recovery=Recovery(loaded, device, journal, base_model=model.name, data_dir=data_dir, full=full),
        snapshots=Snapshots(
            loaded,
            journal,
            base_model=model.name,
            data_dir=data_dir,
            at_once=settings.snapshots_at_once,
            in_host=accelerator.shared,
        ),
        waiter=Waiter(store, worker_id=lambda: name),
        settings=settings,
        accelerator=accelerator,
    )
    completions.call_on_wake(name, lambda: engine.hear(b""))  # what was said meanwhile may be lost
    completions.call_with(name, engine.hear)
    return engine, slug


def _full_tuning(settings: TrainerSettings) -> FullTuning:
    return FullTuning(offloads=settings.moments == "host", publishes=_DTYPES[settings.publish_dtype])


if __name__ == "__main__":
    main()
