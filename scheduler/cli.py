"""The commands of a service on one machine: `up`, `flower`, `celery`, `env`.

Turns arguments and environment into settings, and errors into one line and an exit status: 2 when the
start was refused, 1 when it failed.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from openrl.scheduler import engines
from openrl.scheduler.settings import DEFAULT_IDLE_TIMEOUT_S, DEFAULT_RESTART_MAX_S, UpSettings
from openrl.tasks import datadir
from openrl.tasks.errors import OpenRLError
from openrl.tasks.process import api_processes

NO_MODEL = (
    "no base model: add --model NAME (a Hugging Face id or a directory) or --model NAME=PATH; "
    "`openrl model --help` gets a small one"
)


class _Refusal(click.ClickException):
    """One line on stderr, exit status 2."""

    exit_code = 2

    def show(self, file: object = None) -> None:
        click.echo(f"openrl: {self.message}", err=True)


_option = functools.partial(click.option, show_envvar=True)

data_dir_option = _option(
    "--data-dir",
    envvar="OPENRL_DATA_DIR",
    type=click.Path(file_okay=False, path_type=Path),
    default=datadir.DEFAULT,
    show_default=True,
    callback=lambda ctx, param, value: datadir.resolve(value),
    help="Store, checkpoints and logs. A restart on the same directory finds its runs again.",
)


@click.command()
@_option("--host", envvar="OPENRL_HOST", default="127.0.0.1", show_default=True,
              help="Address to listen on. Any but a loopback one needs an API key first.")  # fmt: skip
@_option("--port", envvar="OPENRL_PORT", type=click.IntRange(0, 65535), default=8000, show_default=True,
              help="TCP port to listen on; 0 takes a free one.")  # fmt: skip
@data_dir_option
@_option("--model", "models", multiple=True, metavar="NAME[=PATH]",
              help="A base model to serve: a Hugging Face id, a directory, or a name for a directory. Repeatable. "
                   "[env var: OPENRL_MODELS, separated by commas]")  # fmt: skip
@_option("--accelerators", envvar="OPENRL_ACCELERATORS", type=click.IntRange(min=0), metavar="N",
              help="Accelerators to use, in turns where workers share one; 0 means the CPU without turns. Where there "
                   "is no CUDA device they are simulated on the CPU.  [default: all CUDA devices]")  # fmt: skip
@_option("--redis-url", envvar="OPENRL_REDIS_URL", default="", metavar="URL",
              help="A Redis or Valkey of yours (redis://, rediss://, unix://), for this service alone. Give it "
                   "appendonly yes, appendfsync always and noeviction.  [default: an embedded one]")  # fmt: skip
@_option("--broker-url", envvar="OPENRL_BROKER_URL", default="", metavar="URL",
              help="Celery's broker, as kombu spells it.  [default: the store]")  # fmt: skip
@_option("--idle-timeout", envvar="OPENRL_IDLE_TIMEOUT_S", type=click.FloatRange(min=0, min_open=True),
              default=DEFAULT_IDLE_TIMEOUT_S, show_default=True, metavar="SECONDS",
              help="A worker without work for this long is stopped; it starts again when needed.")  # fmt: skip
@_option("--sampler", envvar="OPENRL_SAMPLER", type=click.Choice(engines.CHOICES), default=engines.AUTO,
              show_default=True,
              help="What draws samples; auto is vLLM where there is a GPU and vLLM, else torch.")  # fmt: skip
@_option("--sampler-python", envvar="OPENRL_SAMPLER_PYTHON", default="", metavar="PATH",
              help="Python for the samplers, with this version of OpenRL in it.  [default: this one]")  # fmt: skip
@_option("--sampler-replicas", envvar="OPENRL_SAMPLER_REPLICAS", type=click.IntRange(min=1), default=1,
              show_default=True, metavar="N",
              help="Samplers of a base model or full run at most; another comes where many samples wait.")  # fmt: skip
@_option("--api-workers", envvar="OPENRL_API_WORKERS", type=click.IntRange(min=1), default=api_processes,
              help="Processes of the API.  [default: one for each two cores, at most 4]")  # fmt: skip
@_option("--restart-max", "restart_max_s", envvar="OPENRL_RESTART_MAX_S", type=click.FloatRange(min=0, min_open=True),
              default=DEFAULT_RESTART_MAX_S, show_default=True, metavar="SECONDS",
              help="Longest wait before a process that keeps crashing is started again.")  # fmt: skip
@_option("--json", "as_json", is_flag=True, help="Print the start-up report as one line of JSON.")
@_option("--verbose", envvar="OPENRL_VERBOSE", is_flag=True,
              help="Say every start and stop. OPENRL_LOG_LEVEL=DEBUG lets the logs say more.")  # fmt: skip
def up(models: tuple[str, ...], accelerators: int | None, idle_timeout: float, **options: Any) -> None:
    """Run the whole service on this machine until Ctrl-C.

    Starts an embedded store, the API and the scheduler; trainers and samplers start when the first
    request needs them and stop when idle. Every option can come from the environment too.

    \b
    A model from the Hugging Face hub:
      openrl up --model HuggingFaceTB/SmolLM2-135M-Instruct
    A model in a directory, under a name of yours:
      openrl up --model my/model=./models/my-model --data-dir ./openrl-data
    Two models, two accelerators, another port:
      openrl up --model Qwen/Qwen3-4B --model Qwen/Qwen3-8B --accelerators 2 --port 9000
    For other machines (keys first, they are required from then on):
      openrl keys create --tenant alice
      openrl up --model Qwen/Qwen3-4B --host 0.0.0.0

    \b
    Exit status: 0 stopped by a signal, 1 a part did not come up, 2 refused before anything was started.
    """
    from openrl.scheduler.clusters.local import devices  # needs psutil, which an API's image has not
    from openrl.scheduler.up import Failed, run

    names = models or tuple(name.strip() for name in os.environ.get("OPENRL_MODELS", "").split(",") if name.strip())
    if not names:
        raise _Refusal(NO_MODEL)
    try:
        chosen = chosen_devices(accelerators, devices())
        run(UpSettings(models=names, devices=chosen, idle_timeout_s=idle_timeout, **options))
    except Failed as failed:
        raise click.ClickException(str(failed)) from failed
    except OpenRLError as refused:
        raise _Refusal(str(refused)) from refused


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=5555, show_default=True, help="Port on loopback.")
@data_dir_option
def flower(port: int, data_dir: Path) -> None:
    """Show queues, workers and every operation in the browser, with Flower.

    \b
    openrl flower --port 5555
    """
    _exec_celery(data_dir, "flower", f"--port={port}", "--address=127.0.0.1")


@click.command("celery", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@data_dir_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def celery_command(data_dir: Path, arguments: tuple[str, ...]) -> None:
    """Run the celery CLI on the running service, or on the one that OPENRL_REDIS_URL names. Options of ours come first.

    \b
    openrl celery inspect active
    openrl celery --data-dir ./openrl-data events
    """
    _exec_celery(data_dir, *arguments)


@click.command()
@data_dir_option
def env(data_dir: Path) -> None:
    """Print the running service's environment, for other shells and tools.

    \b
    eval "$(openrl env)"
    celery -A openrl.tasks inspect active
    """
    service = _service(data_dir)
    for name, value in {"TINKER_BASE_URL": service.base_url, **_environment(data_dir, service)}.items():
        click.echo(f"export {name}={shlex.quote(value)}")


def chosen_devices(accelerators: int | None, found: tuple[str, ...]) -> tuple[str, ...]:
    """Return as many of the devices as are asked for; where there are none, so many that are simulated ("").

    A machine whose devices were all hidden by CUDA_VISIBLE_DEVICES counts as one without any.
    """
    if accelerators == 0:
        return ()
    if accelerators and not found:
        return ("",) * accelerators
    if accelerators is not None and accelerators > len(found):
        raise _Refusal(
            f"--accelerators {accelerators}: found {len(found)}; if there are more, name them in CUDA_VISIBLE_DEVICES"
        )
    return found[:accelerators]


def _service(data_dir: Path) -> datadir.Service:
    service = datadir.service(data_dir, patience_s=5.0)
    if service is None:
        raise _Refusal(f"no service runs on {data_dir}; start one with `openrl up`, or name its --data-dir")
    return service


def _found(data_dir: Path) -> dict[str, str]:
    """Return the environment of the service that runs on the directory, else of the one that our own names."""
    service = datadir.service(data_dir)
    if service is None and os.environ.get("OPENRL_REDIS_URL"):
        return {"OPENRL_DATA_DIR": str(data_dir)}
    return _environment(data_dir, _service(data_dir))


def _environment(data_dir: Path, service: datadir.Service) -> dict[str, str]:
    return {
        "OPENRL_DATA_DIR": str(data_dir),
        "OPENRL_REDIS_URL": service.redis_url,
        "OPENRL_BROKER_URL": service.broker_url,
    }


def _exec_celery(data_dir: Path, *arguments: str) -> NoReturn:
    environ = {**os.environ, **_found(data_dir)}
    argv = [sys.executable, "-m", "celery", "-A", "openrl.tasks", *arguments]
    os.execve(sys.executable, argv, environ)
