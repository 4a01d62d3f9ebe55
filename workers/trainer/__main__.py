"""A trainer process: `python -m openrl.workers.trainer --base NAME --name WORKER`.

Builds the parts, binds the engine to this process's Celery tasks, serves until SIGTERM or SIGINT.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace

import click
import torch

from openrl.tasks import upgrade
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
from openrl.workers.model import loading
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.trainer.arena import Arena
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.device import Device
from openrl.workers.trainer.engine import TrainerEngine
from openrl.workers.trainer.recovery import Recovery
from openrl.workers.trainer.settings import TrainerSettings
from openrl.workers.trainer.snapshots import Snapshots

log = logging.getLogger(__name__)


@click.command()
@click.option("--base", required=True, help="Name of the base model to serve.")
@click.option("--name", required=True, help="Name of this worker, unique in the service.")
def main(base: str, name: str) -> None:
    """Train LoRA runs of one base model."""
    die_with_parent()
    try:
        store_settings, settings = StoreSettings.from_env(), TrainerSettings.from_env()
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.workers.trainer: {nonsense}\n")
        sys.exit(2)
    logging.basicConfig(level=store_settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        store = Store.connect(store_settings)
        upgrade.check(store)
        engine, slug = build(store, store_settings, settings, base=base, name=name)
    except OtherVersion as other:
        sys.stderr.write(f"openrl.workers.trainer: {other}\n")
        sys.exit(2)
    except (OpenRLError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    leave(serve(engine, store=store, family="train", slug=slug, name=name))


def build(
    store: Store, store_settings: StoreSettings, settings: TrainerSettings, *, base: str, name: str
) -> tuple[TrainerEngine, str]:
    """Load the base model and connect the parts; return the engine and the base model's slug."""
    registry, journal = Registry(store), Journal(store)
    model = registry.model(base)

    def new_lease() -> Lease:
        return Lease(store, name, "trainer", model.slug)

    lease = new_lease()
    torch.set_num_threads(settings.torch_threads or os.cpu_count() or 1)
    loaded = loading.load(model.path)
    loaded.require(model.digest)
    log.info("loaded %s from %s: %s on %s", model.name, model.path, loaded.dtype, loaded.device)
    budget = settings.token_budget or (16384 if loaded.device.type == "cuda" else 1024)
    settings = replace(settings, token_budget=budget)
    data_dir = store_settings.data_dir
    checkpoints = Checkpoints(loaded, base_model=model.name, slug=model.slug, registry=registry, data_dir=data_dir)
    device = Device(
        loaded,
        checkpoints,
        token_budget=settings.token_budget,
        arena=Arena(loaded.device, most_runs=settings.device_runs, most_bytes=settings.device_bytes),
        recomputing=Recomputing(loaded, settings.gradient_checkpointing),
        tells_entropy=settings.entropy == "on",
    )
    completions = Completions(store)
    engine = TrainerEngine(
        slug=model.slug,
        journal=journal,
        lease=lease,
        new_lease=new_lease,
        device=device,
        recovery=Recovery(loaded, device, journal, base_model=model.name, data_dir=data_dir),
        snapshots=Snapshots(
            loaded, journal, base_model=model.name, data_dir=data_dir, at_once=settings.snapshots_at_once
        ),
        waiter=Waiter(store, worker_id=lambda: name),
        settings=settings,
    )
    completions.call_on_wake(name, engine.wake)
    return engine, model.slug


if __name__ == "__main__":
    main()
