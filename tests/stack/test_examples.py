"""The examples run to their end, unchanged, on a tiny model; `make demo` shows that they learn on a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack.conftest import MODEL, Service

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "options", "figure"),
    [
        ("pig_latin_sft", ("--batch", "4"), "loss"),
        ("arithmetic_rl", ("--problems", "2", "--group", "4"), "reward"),
        ("arithmetic_rl", ("--problems", "2", "--group", "4", "--loss", "ppo"), "reward"),
    ],
)
def test_an_example_runs_to_its_end_and_saves_its_curve(
    service: Service, tmp_path: Path, name: str, options: tuple[str, ...], figure: str
) -> None:
    command = [sys.executable, EXAMPLES / f"{name}.py", "--base-url", service.base_url, "--model", MODEL]
    command += ["--steps", "2", "--rank", "4", "--out", tmp_path, *options]
    env = {**os.environ, "TINKER_API_KEY": "tml-local"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert len(json.loads((tmp_path / f"{name}.json").read_text())[figure]) == 2
    assert (tmp_path / f"{name}.png").stat().st_size > 1000
