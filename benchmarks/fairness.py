"""What a short operation waits for a tenant with much to do: its latency alone, and beside 64 long sequences.

`python benchmarks/fairness.py` prints two figures, one line of JSON each, as `make bench` does: the sequences are
queued as 16 calls of one pass each, and as one call. `baseline` is the same short operation with nobody beside it.
The difference should be at most one pass, whose longest is told on standard error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import tinker
import torch
from data import batch_of, datums, tiny_qwen3
from figures import figure, note, show, timed
from plain import RANK
from service import OPENRL, Running, service
from transformers.utils import logging

TINY = "bench/tiny-qwen3"
LONG, SEQUENCES, SHORT = 256, 64, 32
RUNS = 5
HEAD_START_S = 0.3
"""After so long the long tenant's first pass is under way."""
PASS = re.compile(r"pass: .* (\d+) ms$", re.MULTILINE)


def main() -> None:
    """Measure and print."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service ends with its `with`
    with tempfile.TemporaryDirectory() as folder, service({TINY: tiny_qwen3(Path(folder) / "tiny")}) as running:
        patient, busy = (_run(running, tenant) for tenant in ("patient", "busy"))
        for calls in (16, 1):
            _measure(running, patient, busy, calls=calls)


def _measure(running: Running, short: tinker.TrainingClient, long: tinker.TrainingClient, *, calls: int) -> None:
    """One round isn't counted; then each measures the short operation alone first, and beside the long ones."""
    name = f"short_beside_{SEQUENCES}_in_{calls}_ms"
    data = datums(batch_of([SHORT]))
    parts = [datums(batch_of([LONG] * (SEQUENCES // calls), seed=seed)) for seed in range(calls)]
    ask = partial(_forward_backward, short, data)
    alone, beside, longest = [], [], []
    for counts in (False, *[True] * RUNS):
        seconds = timed(ask, 1)[0]
        before = len(_passes(running))
        queued = [long.forward_backward(part, "cross_entropy") for part in parts]
        time.sleep(HEAD_START_S)
        waited = timed(ask, 1)[0]
        for one in queued:
            one.result()
        if counts:
            alone.append(1e3 * seconds)
            beside.append(1e3 * waited)
            longest.append(max(_passes(running)[before:]))
    note(f"{name}: the longest pass took {max(longest)} ms, the short one waited at most {max(beside):.0f} ms")
    show(figure(name, beside, "ms", alone))


def _run(running: Running, tenant: str) -> tinker.TrainingClient:
    """Create a tenant of that name, and a run of it."""
    command = [OPENRL, "keys", "create", "--data-dir", running.data_dir, "--tenant", tenant, "--json"]
    key = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["key"]
    client = tinker.ServiceClient(base_url=running.base_url, api_key=key)
    return client.create_lora_training_client(TINY, rank=RANK).result()


def _forward_backward(run: tinker.TrainingClient, data: list[tinker.Datum]) -> None:
    run.forward_backward(data, "cross_entropy").result()


def _passes(running: Running) -> list[int]:
    """Return the milliseconds of every pass so far, as the trainer's log has them."""
    [path] = running.data_dir.glob("logs/trainer-*.log")
    return [int(found) for found in PASS.findall(path.read_text())]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
