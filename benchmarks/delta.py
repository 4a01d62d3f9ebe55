"""What it takes to hand full weights to a sampler as a delta: one JSON line a figure; docs/weights.md explains them.

AdamW trains all of SmolLM2-135M on text of our own; what a sampler gets is the bfloat16 copy of the float32 masters.
The real steps say how many weights change. A step of a chosen density (changes drawn from those of real ones) says what
a hand-off takes, beside a full save and load of the same weights with stock safetensors. What changed is found and
encoded after the step, before anybody asks for a version: that has a figure of its own, and is not in the hand-off,
which begins with the call to publish; `delta_with_step_ms_*` has both.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
from bench import Figure, compared, figure, note, smol, tiny_qwen3
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from openrl.workers.weights.lanes import THREADS
from openrl.workers.weights.links import Link
from openrl.workers.weights.publish import Publisher
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident

ROOT = Path(__file__).resolve().parent.parent
RATES = (1e-6, 5e-6, 2e-5)
"""Learning rates: of RL, between, and of supervised fine-tuning."""
INDEX_AND_VALUE = 6.0
"""Bytes a changed weight as a 32-bit index and a bfloat16 value: the baseline."""
Weights = dict[str, Tensor]


class Trained:
    """The model, its optimizer, and the tokens that it reads, row after row."""

    def __init__(self, path: Path, rate: float, tokens: Tensor) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.tokens = tokens
        self.taken = 0

    def step(self, *, length: int, rows: int) -> Weights:
        """Take one step on the next rows of text; return the bfloat16 copy."""
        starts = [(self.taken * rows + row) * length % (len(self.tokens) - length) for row in range(rows)]
        batch = torch.stack([self.tokens[start : start + length] for start in starts])
        self.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1
        return self.copy()

    def copy(self) -> Weights:
        """The bfloat16 copy of every parameter; tied ones once."""
        return {name: each.detach().to(torch.bfloat16) for name, each in self.model.named_parameters()}


def text(path: Path, *, small: bool) -> Tensor:
    """Tokens [T] of the documentation of this project; its bytes, for a model without a real tokenizer."""
    written = "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "docs").glob("*.md")))
    if small:
        return torch.tensor(list(written.encode()))
    found = AutoTokenizer.from_pretrained(path, local_files_only=True)(written, verbose=False)["input_ids"]
    return torch.tensor(found)


class HandOff:
    """A publisher and a reader of one home, as trainer and sampler would be."""

    def __init__(self, home: Path, weights: Weights, threads: int) -> None:
        self.home, self.threads = home, threads
        self.publisher = Publisher(home, anchor_every=1 << 30, threads=threads)
        self.reader = Reader(home, Resident({name: torch.empty_like(each) for name, each in weights.items()}))
        self.number = 0
        self.go(weights)

    def go(self, weights: Weights) -> tuple[Link, float, float, float, float]:
        """Publish and load; return the version, and the seconds of staging, publishing, preparing and applying."""
        name = f"v{self.number}"
        self.number += 1
        stepped = time.perf_counter()
        staged = self.publisher.stage(weights, gives=True)
        began = time.perf_counter()
        link = self.publisher.publish(name, staged or weights, step=self.number, gives=True)
        published = time.perf_counter()
        forget(self.home / name)
        opened = time.perf_counter()
        with self.reader.prepare(name) as switch:
            prepared = time.perf_counter()
            switch.apply(threads=self.threads)
        applied = time.perf_counter()
        if any(
            not torch.equal(bits(weights[each]), bits(found)) for each, found in self.reader.resident.tensors.items()
        ):
            sys.exit("delta: the sampler has other weights than the trainer")
        return link, began - stepped, published - began, prepared - opened, applied - prepared


def full(home: Path, weights: Weights, into: Weights) -> tuple[float, float]:
    """Seconds of a full save with stock safetensors, durable, and of a load, copied to where it is used."""
    path = home / "full.safetensors"
    began = time.perf_counter()
    save_file(weights, path.with_suffix(".tmp"))
    handle = os.open(path.with_suffix(".tmp"), os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    path.with_suffix(".tmp").rename(path)
    saved = time.perf_counter() - began
    forget(home)
    began = time.perf_counter()
    for name, tensor in load_file(path).items():
        into[name].copy_(tensor)
    loaded = time.perf_counter() - began
    path.unlink()
    return saved, loaded


def forget(folder: Path) -> None:
    """Let the system drop files from its memory: a sampler elsewhere wouldn't find them there either."""
    for path in folder.iterdir():
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def bits(tensor: Tensor) -> Tensor:
    """Compare bits, not numbers: NaN and -0.0 count."""
    return tensor.view(torch.int16)


def changed(old: Weights, new: Weights) -> int:
    """How many weights differ."""
    return sum(int((bits(old[name]) != bits(new[name])).sum()) for name in old)


def at_density(old: Weights, new: Weights, density: float, seed: int) -> Weights:
    """Keep so many of the changes of real steps, drawn at random: their sizes and places are real."""
    draw = torch.Generator().manual_seed(seed)
    share = density * sum(each.numel() for each in old.values()) / max(1, changed(old, new))
    if share > 1:
        note(f"the real steps change less than {density:.0%}: all of them are kept")
    return {
        name: torch.where(torch.rand(each.shape, generator=draw) < share, new[name], each) for name, each in old.items()
    }


def densities(
    trained: Trained, name: str, *, steps: int, length: int, rows: int
) -> tuple[Figure, Figure, Weights, Weights]:
    """The share of weights that each step changes, and bytes for each; the weights before and after them."""
    first = before = trained.copy()
    total = sum(each.numel() for each in first.values())
    shares, sizes = [], []
    with tempfile.TemporaryDirectory() as folder:
        publisher = Publisher(Path(folder))
        publisher.publish("v0", first, step=0)
        for number in range(1, steps + 1):
            after = trained.step(length=length, rows=rows)
            link = publisher.publish(f"v{number}", after, step=number)
            count = changed(before, after)
            shares.append(100 * count / total)
            sizes.append(link.delta.size_bytes / max(1, count) if link.delta else float("nan"))
            note(f"lr {name} step {number}: {shares[-1]:.2f} % changed, {sizes[-1]:.3f} bytes each")
            before = after
    return (
        figure(f"delta_density_{name}", shares, "%", [100.0]),
        compared(f"delta_bytes_{name}", sizes, "bytes", [INDEX_AND_VALUE]),
        first,
        before,
    )


def hand_off(old: Weights, new: Weights, density: float, *, runs: int, threads: int) -> Iterator[Figure]:
    """Hand over a step of this density, there and back, beside a full save and load."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        target = at_density(old, new, density, seed=0)
        count, size = changed(old, target), sum(each.nbytes for each in old.values())
        pair = HandOff(home, old, threads)
        rows, plain, sizes = [], [], []
        for run in range(runs + 1):
            weights = {each: tensor.clone() for each, tensor in (target if run % 2 == 0 else old).items()}
            plain.append(full(Path(folder), weights, blank(old)))
            link, *seconds = pair.go(weights)
            rows.append(seconds)
            sizes.append(link.delta.size_bytes / max(1, count) if link.delta else float("nan"))
            note(f"{density:.0%} run {run}: full {plain[-1]} s, delta {seconds}")
        rows, plain, sizes = rows[1:], plain[1:], sizes[1:]
        name = f"{100 * density:g}"
        megabytes = size / 1e6
        yield compared(f"delta_bytes_at_{name}", sizes, "bytes", [INDEX_AND_VALUE])
        saves, loads = ([megabytes / each[part] for each in plain] for part in (0, 1))
        both = [1e3 * sum(each) for each in plain]
        yield compared(f"delta_encode_mb_s_at_{name}", [megabytes / row[0] for row in rows], "MB/s", saves)
        yield compared(f"delta_publish_mb_s_at_{name}", [megabytes / row[1] for row in rows], "MB/s", saves)
        yield compared(f"delta_verify_mb_s_at_{name}", [megabytes / row[2] for row in rows], "MB/s", loads)
        yield compared(f"delta_apply_mb_s_at_{name}", [megabytes / row[3] for row in rows], "MB/s", loads)
        yield compared(f"delta_pause_ms_at_{name}", [1e3 * row[3] for row in rows], "ms", both)
        yield compared(f"delta_hand_off_ms_at_{name}", [1e3 * sum(row[1:]) for row in rows], "ms", both)
        yield compared(f"delta_with_step_ms_at_{name}", [1e3 * sum(row) for row in rows], "ms", both)


def blank(weights: Weights) -> Weights:
    """Memory that a full load is copied to."""
    return {name: torch.zeros_like(each) for name, each in weights.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="call everything once on next to nothing: for a test")
    parser.add_argument("--home", type=Path, default=ROOT / ".demo", help="where SmolLM2 is, or is put")
    parser.add_argument("--rates", type=float, nargs="*", default=RATES, help="learning rates")
    parser.add_argument("--steps", type=int, default=4, help="steps at each rate")
    parser.add_argument("--runs", type=int, default=5, help="hand-offs at each density")
    parser.add_argument("--threads", type=int, default=THREADS)
    args = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_qwen3(Path(folder) / "tiny") if args.small else smol(args.home)
        tokens = text(path, small=args.small)
        for rate in args.rates:
            name = f"{rate:g}".replace("e-0", "e-")
            length, rows = (16, 1) if args.small else (128, 4)
            *lines, first, last = densities(
                Trained(path, rate, tokens), name, steps=args.steps, length=length, rows=rows
            )
            show(*lines)
        for density in (0.01, 0.03):
            show(*hand_off(first, last, density, runs=args.runs, threads=args.threads))


def show(*figures: Figure) -> None:
    """Print each on a line of its own."""
    for each in figures:
        print(json.dumps(asdict(each)), flush=True)


if __name__ == "__main__":
    main()
