"""The service as a user runs it, and the unmodified SDK as its client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import tinker

OPENRL = Path(sys.executable).with_name("openrl")
START_S, STOP_S = 120, 20
ADAMW = tinker.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-12)


@contextmanager
def service(models: Mapping[str, Path]) -> Iterator[tinker.ServiceClient]:
    """Run `openrl up` on a free port with its own settings; gives the SDK's client."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENRL_", "TINKER_"))}
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    with tempfile.TemporaryDirectory() as folder:
        command = [OPENRL, "up", "--json", "--port", "0", "--accelerators", "0", "--data-dir", folder, *named]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**kept, "HF_HUB_OFFLINE": "1"}, start_new_session=True
        )
        try:
            yield tinker.ServiceClient(base_url=_address(process), api_key="tml-local")
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


def step(run: tinker.TrainingClient, data: list[tinker.Datum]) -> None:
    """Take one training step, both operations sent before either is waited for."""
    forward_backward = run.forward_backward(data, "cross_entropy")
    optim_step = run.optim_step(ADAMW)
    forward_backward.result()
    optim_step.result()


def sample(sampler: tinker.SamplingClient, prompts: list[list[int]], num_tokens: int) -> int:
    """Draw `num_tokens` after each prompt, all asked for at once; return how many came."""
    params = tinker.SamplingParams(max_tokens=num_tokens, temperature=1.0)
    asked = [sampler.sample(tinker.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    return sum(len(one.result().sequences[0].tokens) for one in asked)
