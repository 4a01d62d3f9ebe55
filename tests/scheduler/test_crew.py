"""How workers are started on one machine: with their device, their engine and their turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from openrl.scheduler import preflight, up
from openrl.scheduler.engines import TORCH, VLLM, Engine
from openrl.scheduler.resources import Workload
from openrl.scheduler.settings import UpSettings
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


def started(engine: str, data_dir: Path) -> dict[str, Program]:
    """Return what a service starts for a trainer and a sampler that share the second of two devices."""
    settings = UpSettings(host="127.0.0.1", port=0, data_dir=data_dir, models=("m",), devices=("0", "1"))
    starts = Starts()
    with preflight.listen("127.0.0.1", 0) as listener:
        service = up._Up(settings, [], listener, Engine(name=engine, python="python"))
        service._supervisor = starts
        service._crew().follow(
            tuple(
                Workload(name=kind, kind=kind, base="m", slug="m", since=0.0, claim="gpu-1")
                for kind in ("trainer", "sampler")
            )
        )
    return starts.programs


@pytest.mark.parametrize(
    ("engine", "between", "turns"),
    [(TORCH, None, "gpu-1"), (VLLM, None, ""), (VLLM, "stays", ""), (VLLM, "sleeps", "gpu-1")],
)
def test_vllm_takes_turns_only_where_it_is_told_to_sleep_between_them(engine, between, turns, tmp_path, monkeypatch):
    monkeypatch.delenv("OPENRL_SAMPLER_BETWEEN_TURNS", raising=False)
    if between is not None:
        monkeypatch.setenv("OPENRL_SAMPLER_BETWEEN_TURNS", between)
    programs = started(engine, tmp_path)
    assert programs["sampler"].env["OPENRL_ACCELERATOR"] == turns
    assert programs["trainer"].env["OPENRL_ACCELERATOR"] == "gpu-1", "trainers are torch's"
    assert {program.env["CUDA_VISIBLE_DEVICES"] for program in programs.values()} == {"1"}


def test_workers_get_the_shells_settings_under_the_services_own_and_no_place_of_a_pod(tmp_path, monkeypatch):
    for name, value in (("LEASE_S", "7"), ("ACCELERATORS", "9"), ("ASSIGNMENT_ID", "a-pods")):
        monkeypatch.setenv(f"OPENRL_{name}", value)
    for program in started(TORCH, tmp_path).values():
        got = [program.env[f"OPENRL_{name}"] for name in ("LEASE_S", "ACCELERATORS", "ASSIGNMENT_ID")]
        assert got == ["7", "2", ""]
