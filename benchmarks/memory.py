"""What a large vocabulary costs a training pass in memory: peak resident memory, each size in a process of its own.

    python benchmarks/memory.py

trains one rank-8 run for a step over 8 x 1,024 tokens on a random Qwen3 (hidden 256, 4 layers, float32, tied
embeddings, a head with an adapter), at a vocabulary of 8,192 and of 151,936, with one target a position and with four.
The logits alone would be 5 GB. One JSON line a process; then, for each kind of target,
`ratio = (peak of the large - its larger embedding) / peak of the small`, which is to be at most 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

SMALL, LARGE = 8_192, 151_936
HIDDEN, SEQUENCES, LENGTH, RANK = 256, 8, 1_024, 8
KINDS = (1, 4)
"""Targets of a position."""


def peak_bytes() -> int:
    """Return the most that this process had resident since that was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kib) << 10


def measure(vocab: int, targets: int, token_budget: int) -> dict[str, int]:
    """Train a step in this process and say what it took."""
    import torch
    from parts import Parts, batch, random_model
    from transformers import Qwen3Config

    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
    )  # fmt: skip
    parts = Parts(random_model(config, torch.device("cpu"), torch.float32), token_budget=token_budget)
    run = parts.run(0, rank=RANK)
    built = peak_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew: drawing a model takes more than holding it
    message = batch(SEQUENCES, LENGTH, vocab=vocab, targets=None if targets == 1 else targets)
    parts.step([(run, message)])
    return {
        "vocab": vocab,
        "targets": targets,
        "token_budget": token_budget,
        "built_bytes": built,
        "peak_bytes": peak_bytes(),
        "embedding_bytes": 4 * vocab * HIDDEN,
    }


def in_a_process(vocab: int, targets: int, token_budget: int) -> dict[str, int]:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--measure", str(vocab), str(targets), str(token_budget)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    found: dict[str, int] = json.loads(done.stdout)
    return found


def compared(small: dict[str, int], large: dict[str, int]) -> dict[str, float]:
    """Return the line that the bound is about."""
    embedding = large["embedding_bytes"] - small["embedding_bytes"]
    return {
        "targets": small["targets"],
        "small_bytes": small["peak_bytes"],
        "large_bytes": large["peak_bytes"],
        "embedding_bytes": embedding,
        "ratio": round((large["peak_bytes"] - embedding) / small["peak_bytes"], 3),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--token-budget", type=int, default=1024, help="tokens of a micro-batch (%(default)s)")
    parser.add_argument("--measure", nargs=3, type=int, metavar=("VOCAB", "TARGETS", "BUDGET"), help="in this process")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    for targets in KINDS:
        found = [in_a_process(vocab, targets, args.token_budget) for vocab in (SMALL, LARGE)]
        for line in (*found, compared(*found)):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
