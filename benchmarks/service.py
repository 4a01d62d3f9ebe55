"""The service as a user runs it, and the unmodified SDK as its client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import tinker

OPENRL = Path(sys.executable).with_name("openrl")
START_S, STOP_S = 120, 20
ADAMW = tinker.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12)

Steps = Sequence[tuple[tinker.TrainingClient, list[tinker.Datum]]]
"""Runs, each with the data of its next step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A service: where it is, its process, its data, the SDK's client."""

    base_url: str
    pid: int
    data_dir: Path
    client: tinker.ServiceClient


@contextmanager
def service(models: Mapping[str, Path], settings: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Run `openrl up` on a free port with its own settings, but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENRL_", "TINKER_"))}
    kept |= settings or {}
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [OPENRL, "up", "--json", "--port", "0", "--accelerators", "0", "--data-dir", folder, *named]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**kept, "HF_HUB_OFFLINE": "1"}, start_new_session=True
        )
        try:
            base_url = _address(process)
            client = tinker.ServiceClient(base_url=base_url, api_key="tml-local")
            yield Running(base_url=base_url, pid=process.pid, data_dir=Path(folder), client=client)
        finally:
            process.terminate()
            process.wait(STOP_S)


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    report = process.stdout.readline()
    if not report:
        sys.exit(f"bench: the service did not start (exit status {process.wait(START_S)})")
    url: str = json.loads(report)["base_url"]
    with urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=START_S) as answer:  # noqa: S310  # our own service
        assert answer.status == 200
    return url


def snapshot(running: Running, run: tinker.TrainingClient) -> int:
    """Return the operation that the run's recovery snapshot was taken after; 0 when there is none."""
    home = f"tenants/*/runs/{run.model_id.replace(':', '_')}/snapshots/*"
    names = [path.name for path in running.data_dir.glob(home)]
    return max((int(name.partition(".")[0]) for name in names if not name.startswith(".")), default=0)


def step(run: tinker.TrainingClient, data: list[tinker.Datum]) -> None:
    """Take one training step, both operations sent before either is waited for."""
    steps([(run, data)])


def steps(work: Steps) -> None:
    """Take one training step of each run, everything sent before anything is waited for."""
    asked = [(run.forward_backward(data, "cross_entropy"), run.optim_step(ADAMW)) for run, data in work]
    for forward_backward, optim_step in asked:
        forward_backward.result()
        optim_step.result()


def sample(sampler: tinker.SamplingClient, asked: Sequence[tuple[list[int], int]]) -> int:
    """Draw so many tokens after each prompt, whatever they are, all asked for at once; return how many came."""
    futures = [
        sampler.sample(
            tinker.ModelInput.from_ints(prompt),
            1,
            tinker.SamplingParams(max_tokens=num_tokens, temperature=1.0, stop=[]),
        )
        for prompt, num_tokens in asked
    ]
    return sum(len(one.result().sequences[0].tokens) for one in futures)
