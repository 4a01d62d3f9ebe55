"""What the service costs over a plain loop: one JSON line a figure, measured side by side. `make bench` runs it.

Each run measures the baseline first, with the service idle, and then the service, on the same data; the medians of
the runs are compared. docs/benchmarks.md says what each figure is and what it should be.
"""

from __future__ import annotations

import argparse
import gc
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

os.environ.update(HF_HUB_OFFLINE="1", TINKER_TELEMETRY="0", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import mixed
import torch
from data import VOCAB, batch_of, datums, tiny_qwen3
from figures import Figure, check, compared, figure, mean, note, show, timed
from plain import RANK, Plain, fastest
from polls import Site, api_memory, crowd, forward_backward
from service import OPENRL, Running, sample, service, snapshot, step
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
TINY, SMOL = "bench/tiny-qwen3", "HuggingFaceTB/SmolLM2-135M-Instruct"
THREADS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    runs: int = 5
    pairs: int = 20
    steps: int = 3
    datums: int = 32
    smol_datums: int = 16
    longest: int = 256
    samples: int = 64
    few_samples: int = 16
    longest_sample: int = 256
    tokens: int = 32
    saves: int = 5
    snapshots: int = 5
    polls: int = 4096
    windows: int = 3
    window_s: float = 60.0
    body_datums: int = 1000


SMALL = Size(
    runs=1, pairs=2, steps=1, datums=2, smol_datums=2, longest=24, samples=2, few_samples=2, longest_sample=8, tokens=4,
    saves=1, snapshots=1, polls=32, windows=1, window_s=1.0, body_datums=10,
)  # fmt: skip
"""For a test: everything is called, nothing is measured."""
SMALL_SETTINGS = {"OPENRL_TRAINER_SNAPSHOT_OPERATIONS": "16"}

SAMPLED = ("sample", "save_to_first_token")
"""What the names of figures begin with that another engine changes."""

CROWDED, CROWDED_SETTINGS = "heartbeat_p99_ms", {"OPENRL_API_WORKERS": "2"}
"""This figure is asked of a service with two API processes; it has one of its own."""


class Bench:
    """One model in both worlds: the plain loop here, a run of the service there."""

    def __init__(self, running: Running, name: str, path: Path, size: Size) -> None:
        self.size = size
        self.running, self.name = running, name
        self.plain = Plain(path)
        self.run = running.client.create_lora_training_client(name, rank=RANK).result()

    def pair_over_plain_ms(self) -> Figure:
        """A short datum and its step: what the way through the service adds."""
        batch = batch_of([32])
        data = datums(batch)
        plain, served = self.both(
            lambda: self.plain.step(batch, "one-by-one"), lambda: step(self.run, data), times=self.size.pairs
        )
        over = [1e3 * (slow - fast) for slow, fast in zip(served, plain, strict=True)]
        return figure("pair_over_plain_ms", over, "ms", [1e3 * seconds for seconds in plain])

    def train_tok_s(self, name: str, num_datums: int, *, steps: int) -> Figure:
        """A batch of mixed lengths and its step, against the best way of the plain loop."""
        least = min(16, self.size.longest)
        lengths = torch.linspace(least, self.size.longest, num_datums).round().long()
        order = torch.randperm(num_datums, generator=torch.Generator().manual_seed(1))
        batch = batch_of(lengths[order].tolist())
        data, tokens = datums(batch), int(lengths.sum())
        ways = fastest(self.plain, batch, steps)
        step(self.run, data)
        note(f"{name}: {tokens} tokens, the plain loop is fastest {ways[0]}, then {ways[1]}")
        plain, served = [], []
        for _ in range(self.size.runs):
            plain.append(min(mean(timed(partial(self.plain.step, batch, way), steps)) for way in ways[:2]))
            served.append(mean(timed(lambda: step(self.run, data), steps)))
        return compared(name, [tokens / seconds for seconds in served], "tok/s", [tokens / s for s in plain])

    def sample_tok_s(self, name: str, lengths: Sequence[int]) -> Figure:
        """One sample of each length asked for at once, against `generate` on the whole batch to the longest."""
        prompts = torch.randint(VOCAB, (len(lengths), 16), generator=torch.Generator().manual_seed(2))
        sampler = self.run.save_weights_and_get_sampling_client()
        asked, total = list(zip(prompts.tolist(), lengths, strict=True)), sum(lengths)
        plain, served = self.both(
            lambda: self.plain.generate(prompts, max(lengths)),
            lambda: check(sample(sampler, asked) == total, "a sample came back short"),
        )
        return compared(name, [total / s for s in served], "tok/s", [total / s for s in plain])

    def sample_ragged(self) -> Figure:
        """Samples of very different lengths at once: a batch that waits for nobody, against one that does."""
        lengths = torch.linspace(4, self.size.longest_sample, self.size.few_samples).round().long()
        order = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(3))
        return self.sample_tok_s("sample_ragged", lengths[order].tolist())

    def save_to_first_token_ms(self) -> Figure:
        """From the call that saves weights for sampling to a first token drawn from them."""
        prompt = list(range(16))
        plain, served = self.both(
            lambda: self.plain.save_and_generate(torch.tensor([prompt])),
            lambda: check(
                sample(self.run.save_weights_and_get_sampling_client(), [(prompt, 1)]) == 1, "no token was drawn"
            ),
            times=self.size.saves,
        )
        return figure("save_to_first_token_ms", [1e3 * s for s in served], "ms", [1e3 * s for s in plain])

    def heartbeat_p99_ms(self) -> Figure:
        """What a heartbeat takes among thousands of held polls and 5 MB bodies."""
        size, pid = self.size, self.running.pid
        with tempfile.TemporaryDirectory() as folder:
            body = Path(folder) / "forward_backward"
            body.write_bytes(forward_backward(num_datums=size.body_datums))
            found = crowd(
                Site(self.running.base_url, self.name), num=size.polls, seconds=size.window_s, windows=size.windows,
                body=body, memory=lambda: api_memory(pid), note=note,
            )  # fmt: skip
        return figure("heartbeat_p99_ms", found.held_ms, "ms", found.idle_ms)

    def snapshot_step_ratio(self) -> Figure:
        """A step beside the writing of a recovery snapshot, against those since the snapshot before it."""
        run = self.running.client.create_lora_training_client(self.name, rank=RANK).result()
        data = datums(batch_of([32]))
        step(run, data)
        seconds, taken_after = [0.0], [0]  # by number of step
        while len(taken_after) <= self.size.snapshots:
            seconds += timed(lambda: step(run, data), 1)
            steps = snapshot(self.running, run) // 2  # a step is two operations
            if taken_after[-1] + 1 < steps < len(seconds):
                taken_after.append(steps)
        ratios = [seconds[now] / median(seconds[before + 1 : now]) for before, now in pairwise(taken_after)]
        return figure("snapshot_step_ratio", ratios, "x", [1.0], ratio=median(ratios))

    def both(
        self, plain: Callable[[], object], served: Callable[[], object], *, times: int = 1
    ) -> tuple[list[float], list[float]]:
        """Return seconds a call, run by run, after one round that isn't counted."""
        rounds = [(mean(timed(plain, times)), mean(timed(served, times))) for _ in range(self.size.runs + 1)]
        first, second = zip(*rounds[1:], strict=True)
        return list(first), list(second)


def smol(home: Path) -> Path:
    """Return the folder of SmolLM2-135M, fetched if it isn't there."""
    path = home / SMOL
    if not (path / "config.json").exists():
        subprocess.run([OPENRL, "model", "fetch", "smollm2-135m-instruct", "--to", path], check=True, stdout=sys.stderr)
    return path


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", metavar="FIGURE", help="measure these alone")
    parser.add_argument("--small", action="store_true", help="call everything once on next to nothing: for a test")
    parser.add_argument("--vllm", metavar="PYTHON", help="measure sampling alone, on the vLLM of this interpreter")
    parser.add_argument("--home", type=Path, default=ROOT / ".demo", help="where SmolLM2 is, or is put")
    args = parser.parse_args()
    size = SMALL if args.small else Size()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(THREADS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service ends with its `with`
    wanted = [name for name in args.only or FIGURES if not args.vllm or name.startswith(SAMPLED)]
    engine = {"OPENRL_SAMPLER": "vllm", "OPENRL_SAMPLER_PYTHON": args.vllm} if args.vllm else {}
    with tempfile.TemporaryDirectory() as folder:
        models = {TINY: tiny_qwen3(Path(folder) / "tiny")}
        if any(FIGURES[name][0] == SMOL for name in wanted):
            models[SMOL] = models[TINY] if args.small else smol(args.home)
        crowded = [name for name in wanted if name == CROWDED and not args.small]
        others = [name for name in wanted if name not in crowded]
        for names, settings in ((others, SMALL_SETTINGS if args.small else {}), (crowded, CROWDED_SETTINGS)):
            if names:
                with service(models, settings | engine) as running:
                    measure(running, models, size, names, suffix="_vllm" if engine else "")


FIGURES: dict[str, tuple[str, Callable[[Bench], Figure]]] = {
    "pair_over_plain_ms": (TINY, Bench.pair_over_plain_ms),
    "train_tok_s": (TINY, lambda bench: bench.train_tok_s("train_tok_s", bench.size.datums, steps=bench.size.steps)),
    "sample64_tok_s": (
        TINY,
        lambda bench: bench.sample_tok_s("sample64_tok_s", [bench.size.tokens] * bench.size.samples),
    ),
    "sample_ragged": (TINY, Bench.sample_ragged),
    "save_to_first_token_ms": (TINY, Bench.save_to_first_token_ms),
    "heartbeat_p99_ms": (TINY, Bench.heartbeat_p99_ms),
    "mixed8_tok_s": (TINY, lambda bench: mixed.tok_s(bench, "mixed8_tok_s", times=bench.size.steps)),
    "mixed8_small": (TINY, lambda bench: mixed.small(bench, "mixed8_small")),
    "train_tok_s_smol": (SMOL, lambda bench: bench.train_tok_s("train_tok_s_smol", bench.size.smol_datums, steps=1)),
    "mixed8_tok_s_smol": (SMOL, lambda bench: mixed.tok_s(bench, "mixed8_tok_s_smol", times=1)),
    "sample16_tok_s_smol": (
        SMOL,
        lambda bench: bench.sample_tok_s("sample16_tok_s_smol", [bench.size.tokens] * bench.size.few_samples),
    ),
    "snapshot_step_ratio": (SMOL, Bench.snapshot_step_ratio),
}


def measure(running: Running, models: dict[str, Path], size: Size, wanted: list[str], *, suffix: str = "") -> None:
    """Print each figure as soon as it is there, its name with a suffix."""
    bench: Bench | None = None
    served = ""
    for name in wanted:
        model, take = FIGURES[name]
        if bench is None or served != model:
            bench, served = Bench(running, model, models[model], size), model
            gc.collect()
            gc.freeze()  # what a loop's own process doesn't hold must not slow the client's collector down
        found = take(bench)
        show(replace(found, name=found.name + suffix))


if __name__ == "__main__":
    main()
