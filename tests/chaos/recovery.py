"""What a killed trainer costs on the demo's model: the time to the next answer, and what it consists of.

    .venv/bin/python -m tests.chaos.recovery      one line for people, one of JSON; needs the model of `make demo`

The parts are read from what the service itself writes down: when `openrl up` noticed, when the new process began, when
it took its lease, when the model was loaded, how long the run's snapshot and its replay took.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(TINKER_TELEMETRY="0", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import psutil
import tinker
from tinker import types

from openrl.tasks import keys
from tests.chaos.service import Service

ROOT = Path(__file__).resolve().parents[2]
SMOL = "HuggingFaceTB/SmolLM2-135M-Instruct"
TARGET_S = 15.0
STEPS, TOKENS = 20, 64


def measure(home: Path, data_dir: Path, *, steps: int = STEPS) -> dict[str, float]:
    """Kill the trainer after some steps; return seconds by part, `total` among them."""
    service = Service(
        data_dir, SMOL, home / SMOL, env={"OPENRL_TORCH_THREADS": "", "OPENRL_LEASE_S": "30"}, restart_max_s=30.0
    )
    try:
        with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
            return _parts(service, api, steps)
    finally:
        service.stop()


def _parts(service: Service, api: tinker.ServiceClient, steps: int) -> dict[str, float]:
    run = api.create_lora_training_client(base_model=SMOL, rank=16, seed=1).result()
    for _ in range(steps):
        _step(run)
    killed, pid = time.time(), service.wait_for("trainer")
    offset = killed - time.monotonic()
    os.kill(pid, signal.SIGKILL)
    _step(run)
    answered = time.time()
    noticed = max(when for when, line in service.said if "SIGKILL" in line) + offset
    created = psutil.Process(service.wait_for("trainer")).create_time()
    leased = _leased(service)
    lines = _logged(service, since=killed)
    loaded = next(when for when, line in lines if "loaded " in line)
    rebuilt = next(line for _, line in lines if "rebuilt run" in line)
    snapshot_ms, replayed, replay_ms = map(float, re.findall(r"([\d.]+) (?:ms|operations)", rebuilt))
    restored = (snapshot_ms + replay_ms) / 1e3
    return {
        "detection": noticed - killed,
        "back_off": created - noticed,
        "process_start": leased - created,
        "model_load": loaded - leased,
        "snapshot_load": snapshot_ms / 1e3,
        "replay": replay_ms / 1e3,
        "first_step_and_answer": answered - loaded - restored,
        "total": answered - killed,
        "operations_replayed": replayed,
    }


def _step(run: Any) -> None:
    ids = [1 + number % 1000 for number in range(TOKENS)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (TOKENS - 1)},
        )
    ]
    trained, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(types.AdamParams(learning_rate=1e-4))
    trained.result(300)
    stepped.result(300)


def _leased(service: Service) -> float:
    """Return when the trainer took its lease."""
    store = service.store()
    try:
        for member in store.redis.smembers(keys.WORKERS):
            kind, started = store.redis.hmget(keys.worker(member.decode()), ["kind", "started"])
            if kind == b"trainer":
                return float(started)
        raise AssertionError("no trainer holds a lease")
    finally:
        store.close()


def _logged(service: Service, *, since: float) -> list[tuple[float, str]]:
    """Return the trainer's log since then, with the time of each line."""
    found = []
    for path in (service.data_dir / "logs").glob("trainer*.log"):
        for line in path.read_text(errors="replace").splitlines():
            if stamp := re.match(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d{3}) ", line):
                when = time.mktime(time.strptime(stamp[1], "%Y-%m-%d %H:%M:%S")) + int(stamp[2]) / 1e3
                if when >= since:
                    found.append((when, line))
    return found


def main() -> int:
    """Measure; exit status 1 where it took too long."""
    parser = argparse.ArgumentParser(description="What a killed trainer costs.")
    parser.add_argument("--home", type=Path, default=ROOT / ".demo", help="where `make demo` has put the model")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps before the trainer is killed")
    options = parser.parse_args()
    home = options.home.resolve()
    if not (home / SMOL).is_dir():
        sys.exit(f"there is no {home / SMOL}: `make demo` gets it")
    os.chdir(home)  # where the SDK finds the model's tokenizer
    with tempfile.TemporaryDirectory(prefix="openrl-recovery-") as directory:
        parts = measure(home, Path(directory) / "data", steps=options.steps)
    named = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in parts.items())
    sys.stdout.write(f"recovery of a killed trainer, seconds: {named} (target: total under {TARGET_S:.0f})\n")
    sys.stdout.write(json.dumps({name: round(value, 3) for name, value in parts.items()}) + "\n")
    return 0 if parts["total"] < TARGET_S else 1


if __name__ == "__main__":
    sys.exit(main())
