"""How workers are started on one machine: with their device, their engine and their turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.scheduler.crew import Crew
from openrl.scheduler.engines import TORCH, VLLM, Engine
from openrl.scheduler.resources import Workload
from openrl.scheduler.supervisor import Program


class Starts:
    """Remembers what it was to start."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}

    def names(self) -> set[str]:
        return set(self.programs)

    def start(self, program: Program) -> None:
        self.programs[program.name] = program

    def log_path(self, name: str) -> Path:
        return Path(name)


@pytest.mark.parametrize(
    ("engine", "environ", "turns"),
    [
        (TORCH, {}, "gpu-1"),
        (VLLM, {}, ""),
        (VLLM, {"OPENRL_SAMPLER_BETWEEN_TURNS": "stays"}, ""),
        (VLLM, {"OPENRL_SAMPLER_BETWEEN_TURNS": "sleeps"}, "gpu-1"),
    ],
)
def test_vllm_takes_turns_only_where_it_sleeps_between_them(engine: str, environ: dict[str, str], turns: str):
    starts = Starts()
    crew = Crew(starts, Engine(name=engine, python="python"), ("0", "1"), environ)  # type: ignore[arg-type]
    crew.follow(
        tuple(
            Workload(name=kind, kind=kind, base="m", slug="m", since=0.0, claim="gpu-1")
            for kind in ("trainer", "sampler")
        )
    )
    assert starts.programs["sampler"].env["OPENRL_ACCELERATOR"] == turns
    assert starts.programs["trainer"].env["OPENRL_ACCELERATOR"] == "gpu-1", "trainers are torch's"
    assert {program.env["CUDA_VISIBLE_DEVICES"] for program in starts.programs.values()} == {"1"}
