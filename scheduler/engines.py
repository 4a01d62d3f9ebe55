"""Which engine draws samples, and in which interpreter: chosen, and refused, before anything starts.

vLLM pins other versions than the trainer needs, so the samplers may have an environment of their own, with the same
OpenRL in it. Knows neither torch nor vLLM: it asks the interpreter.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path

from openrl.tasks.errors import OpenRLError
from openrl.tasks.registry import BaseModel
from openrl.tasks.schema import DATA

TORCH, VLLM, AUTO = "torch", "vllm", "auto"
CHOICES = (AUTO, TORCH, VLLM)

ENGINE = "OPENRL_SAMPLER_ENGINE"
"""What the workers' own settings call it."""

FULL_ENGINE = "OPENRL_SAMPLER_FULL_ENGINE"

ASK_S = 120.0
"""How long an interpreter may take to say what it has: the first start after an installation reads everything."""

_QUESTION = """
import importlib.util as u, json
try:
    from openrl.tasks.schema import DATA as openrl
except ImportError:
    openrl = 0
print(json.dumps({"openrl": openrl, "vllm": bool(u.find_spec("vllm")), "torch": bool(u.find_spec("torch"))}))
"""


class WrongEngine(OpenRLError):
    """The samplers can't run as asked: mend --sampler or --sampler-python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What the samplers of base models run on."""

    name: str
    """torch or vllm."""
    python: str
    """The interpreter."""
    full: bool = False
    """Whether the samplers of full runs run on it too; else they are ours, with torch."""

    @property
    def environ(self) -> dict[str, str]:
        """Return what a sampler must be told to run on it."""
        return {ENGINE: self.name}


def choose(wanted: str, python: str, *, own_python: str, has_gpu: bool, full: bool = False) -> Engine:
    """Return the engine for `--sampler` in the interpreter of `--sampler-python`, "" meaning our own.

    `full`: the samplers of full runs are to run on vLLM too.

    Raises:
        WrongEngine: there is no such interpreter, or it lacks what the engine needs.
    """
    engine = _chosen(wanted, python, own_python=own_python, has_gpu=has_gpu)
    if full and not (engine.name == VLLM and has_gpu):
        raise WrongEngine(
            f"{FULL_ENGINE}=vllm needs --sampler vllm and a GPU: full runs can't be sampled by vLLM on a CPU"
        )
    return replace(engine, full=full)


def _chosen(wanted: str, python: str, *, own_python: str, has_gpu: bool) -> Engine:
    if wanted == TORCH and not python:
        return Engine(name=TORCH, python=own_python)
    found = _ask(python or own_python)
    if python and found["openrl"] != DATA:
        said = "no OpenRL" if not found["openrl"] else "another version of OpenRL"
        raise WrongEngine(
            f"--sampler-python {python}: it has {said}; install there what runs here (pip install openrl-service, or "
            "pip install --no-deps -e . in its source)"
        )
    if wanted == VLLM and not found["vllm"]:
        raise WrongEngine(
            f"--sampler vllm: {python or own_python} has no vLLM; name an interpreter that has with --sampler-python, "
            "or take --sampler torch"
        )
    name = VLLM if found["vllm"] and (wanted == VLLM or (wanted == AUTO and has_gpu)) else TORCH
    if name == TORCH and not found["torch"]:
        raise WrongEngine(f"--sampler-python {python}: it has neither torch nor vLLM; install one of both there")
    return Engine(name=name, python=python or own_python)


def as_set(environ: Mapping[str, str]) -> Engine:
    """Return the engine of samplers that something else starts: the environment says it to them and to us."""
    return Engine(name=environ.get(ENGINE) or TORCH, python="", full=environ.get(FULL_ENGINE) == VLLM)


def as_served(models: Sequence[BaseModel], engine: Engine, environ: Mapping[str, str]) -> list[BaseModel]:
    """Return the base models with what their samplers will serve of adapters: a run is refused by it at once."""
    settings = next(entry.load() for entry in entry_points(group="openrl.settings") if entry.name == "sampler")
    found = settings.from_env({**environ, **engine.environ})
    limits = ((model, found.serves(model.arch, model.vocab_size)) for model in models)
    return [replace(model, sampler_rank=rank, sampler_head=head) for model, (rank, head) in limits]


def _ask(python: str) -> dict[str, int]:
    if not Path(python).is_file():
        raise WrongEngine(f"--sampler-python {python}: there is no such file; name a Python interpreter")
    try:
        # Not from here: what lies in the working directory must not pass for what is installed.
        answer = subprocess.run(
            [python, "-c", _QUESTION], cwd="/", capture_output=True, text=True, timeout=ASK_S, check=True
        )
        found: dict[str, int] = json.loads(answer.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        raise WrongEngine(f"--sampler-python {python} doesn't work as a Python interpreter: {failure}") from failure
    return found
