"""`python -m openrl.workers.sampler --base NAME [--pool SLUG] --name WORKER`: build, bind, serve."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import click
import torch

from openrl.tasks import assignment, keys, upgrade
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
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.model.settings import CONTEXT, STAYS, AcceleratorSettings
from openrl.workers.sampler.engine import Runner, SamplerEngine
from openrl.workers.sampler.requests import Limits
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.switching import Switching

log = logging.getLogger(__name__)


def runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    grace_s: float = float("inf"),
    accelerator: Accelerator | None = None,
) -> tuple[Runner, Limits]:
    """Return what draws from a base model, by the engine that the settings name, and what it can take."""
    if settings.engine == "vllm":
        from openrl.workers.sampler import vllm_runner

        return vllm_runner.runner(
            model_path, data_dir, settings, digest=digest, grace_s=grace_s, accelerator=accelerator
        )
    # Only here: it needs what vLLM's environment need not hold.
    from openrl.workers.sampler import torch_runner

    return torch_runner.runner(model_path, data_dir, settings, digest=digest, grace_s=grace_s, accelerator=accelerator)


def full_runner(
    model_path: str,
    data_dir: Path,
    settings: SamplerSettings,
    *,
    digest: str = "",
    grace_s: float = float("inf"),
    accelerator: Accelerator | None = None,
) -> tuple[Runner, Limits]:
    """Return what draws from the versions of a full run on a base model, and what it can take."""
    if settings.full_engine == "vllm":
        from openrl.workers.sampler import vllm_runner

        return vllm_runner.full_runner(model_path, data_dir, settings, digest=digest, accelerator=accelerator)
    from openrl.workers.sampler import torch_runner

    settings = replace(settings, weights_copy_bytes=0)  # which of weights that change would be made again and again
    engine, limits = torch_runner.runner(
        model_path, data_dir, settings, digest=digest, grace_s=grace_s, accelerator=accelerator
    )
    in_place = False if accelerator is not None and accelerator.shared else None
    return torch_runner.full_runner(engine, data_dir, settings, in_place=in_place), limits


def build(
    base: str,
    name: str,
    store: Store,
    settings: SamplerSettings,
    *,
    pool: str = "",
    accelerator: Accelerator | None = None,
) -> SamplerEngine:
    """Return the engine of a pool (by default the base model's own), not yet started.

    Its lease stands while the model is loaded, which is done in a turn of the `accelerator`.

    Raises:
        InvalidRequest: the pool isn't one of this base model.
    """
    model = Registry(store).model(base)
    slug = pool or model.slug
    if keys.base_slug(slug) != model.slug:
        raise InvalidRequest(
            f"--pool is {slug!r}, which is no pool of {base!r}; those are {model.slug!r} and its runs'"
        )

    def new_lease() -> Lease:
        return Lease(store, name, kind="sampler", slug=slug)

    lease = new_lease()
    try:
        drawing, limits = (full_runner if keys.is_full(slug) else runner)(
            model.path,
            store.settings.data_dir,
            settings,
            digest=model.digest,
            grace_s=store.settings.session_grace_s,
            accelerator=accelerator,
        )
    except BaseException:
        lease.close()
        raise
    if not keys.is_full(slug):
        rank, head = settings.serves(model.arch, model.vocab_size)
        Registry(store).note_sampler(model, rank=rank, head=head)
    completions = Completions(store)
    engine = SamplerEngine(
        drawing,
        Journal(store),
        Waiter(store, worker_id=lambda: name),
        lease=lease,
        new_lease=new_lease,
        slug=slug,
        limits=limits,
        poll_s=settings.poll_s,
        stop_s=settings.stop_s,
        drafts=Publisher(store),
        accelerator=accelerator,
        version=drawing.directory if isinstance(drawing, Switching) else None,
    )
    completions.call_on_wake(keys.samplers(slug), engine.wake)
    completions.call_on_wake(keys.cancelling(name), engine.let_go)
    completions.call_with(keys.new_versions(slug), lambda said: engine.hear_version(said.decode()))
    return engine


def check_together(settings: SamplerSettings, turns: AcceleratorSettings) -> None:
    """Raise ValueError where vLLM that sleeps can't do, between its turns, what both settings ask for."""
    if turns.name and turns.context != STAYS and settings.tensor_parallel_size > 1:
        raise ValueError(
            f"{CONTEXT}={turns.context} is for one process without NCCL; OPENRL_SAMPLER_TENSOR_PARALLEL_SIZE "
            f"is {settings.tensor_parallel_size}: set it to 1, or {CONTEXT}={STAYS}"
        )


@click.command()
@click.option("--base", required=True, help="Name of the base model, as it is registered.")
@click.option("--pool", default="", help="Slug of a full run's pool, to serve its versions; default: the base's own.")
@click.option("--name", required=True, help="Name of this worker, unique among those that run.")
def main(base: str, pool: str, name: str) -> None:
    """Serve the samples of one base model, or the versions of one full run on it, until SIGTERM."""
    die_with_parent()
    try:
        store_settings, settings = StoreSettings.from_env(), SamplerSettings.from_env()
        turns = AcceleratorSettings.from_env(os.environ)
        # vLLM that doesn't sleep keeps its first turn until it ends, and is placed alone there.
        is_vllm = (settings.full_engine if keys.is_full(pool) else settings.engine) == "vllm"
        stays = is_vllm and settings.between_turns == "stays"
        if is_vllm and not stays:
            check_together(settings, turns)
        if threads := int(os.environ.get("OPENRL_TORCH_THREADS") or 0):
            torch.set_num_threads(threads)
    except ValueError as nonsense:
        sys.stderr.write(f"openrl.workers.sampler: {nonsense}\n")
        sys.exit(2)
    logging.basicConfig(level=store_settings.log_level)
    try:
        store = Store.connect(store_settings)
        upgrade.check(store)
        if not assignment.keep(store, os.environ):
            sys.exit(1)
        accelerator = Accelerator.of(store, turns, owner=name)
        with ExitStack() as turn:
            turn.enter_context(accelerator.turn())
            engine = build(base, name, store, settings, pool=pool, accelerator=None if stays else accelerator)
            kept = turn.pop_all() if stays else None
    except (OtherVersion, InvalidRequest) as refused:
        # It would be so for ever: whoever started it need not try again.
        sys.stderr.write(f"openrl.workers.sampler: {refused}\n")
        sys.exit(2)
    except (OpenRLError, ValueError) as failure:
        raise SystemExit(f"the sampler can't start: {failure}") from failure
    status = serve(engine, store=store, family="sample", slug=engine.slug, name=name)
    del kept  # not before: a turn ends with what holds it
    leave(status)


if __name__ == "__main__":
    main()
