"""Do eight runs that train at the same time learn what each learns alone? `make mixed-curves` runs it.

Eight runs of ranks 1 to 64, each with a task, a learning rate and data of its own, take 300 steps: all at once through
the service, and each alone in the trainer's device code, without a service and without company. Then each alone
again, with the sequences of every batch in reverse order. That is the yardstick: mathematically it is the same
training, in float32 its sums are taken in another order, and the small differences grow over the steps as those
between a mixed and a solo pass do. `gap` is the largest difference between the mixed curve and the solo one at the same
step, in nats a token; `noise` is the same between the two solo ones.

AdamW's eps is 1e-6: with a tiny one a parameter whose gradient is nothing but rounding takes a whole step to the side
that the last bits say, and no two trainings stay together.

Prints one JSON line a run and one about the passes, writes the figures and a plot, and fails where a gap is over 0.001
nats a token, or where the runs didn't share passes.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import numpy as np
import tinker
import torch
from data import datums
from parts import Parts
from service import Running, service
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from openrl.tasks.messages import Datum, ForwardBackward, OptimStep
from openrl.tasks.wire.codec import output_to_json
from openrl.workers.model import loading

MODEL = "experiments/tiny"
TOKEN_BUDGET = 1024
WAIT_S = 120.0
LEAST_SHARED = 2.0
RANKS = (1, 2, 4, 8, 8, 16, 32, 64)
STEPS, SEQUENCES, LENGTH = 300, 3, 16
SYMBOLS = 97
EPS = 1e-6
MOST_GAP = 1e-3
"""Nats a token: a thousandth of what these runs learn, whatever their noise."""

Curves = dict[str, list[list[float]]]
"""By way of training, for each run, the loss of each step in nats a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One run's: to continue `x -> (factor * x + offset) mod 97`, of which one symbol in eight is wrong."""

    number: int
    rank: int
    learning_rate: float
    factor: int
    offset: int

    def batch(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the sequences of a step; the same whoever asks."""
        draw = torch.Generator().manual_seed(1000 * step + self.number)
        rows = []
        for _ in range(SEQUENCES):
            symbols = [int(torch.randint(SYMBOLS, (1,), generator=draw))]
            while len(symbols) <= LENGTH:
                symbols.append((self.factor * symbols[-1] + self.offset) % SYMBOLS)
            wrong = torch.rand(LENGTH + 1, generator=draw) < 1 / 8
            row = torch.where(wrong, torch.randint(SYMBOLS, (LENGTH + 1,), generator=draw), torch.tensor(symbols))
            rows.append((row[:-1], row[1:]))
        return rows


TASKS = [
    Task(number=n, rank=rank, learning_rate=2e-3 * 0.9**n, factor=2 + 3 * n, offset=11 * n + 1)
    for n, rank in enumerate(RANKS)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run's figures, in nats a token."""

    run: int
    rank: int
    first: float
    last: float
    gap: float
    noise: float


def tiny(path: Path) -> Path:
    """Write a random Qwen3 that takes milliseconds, with a tokenizer of one word a token, which nothing here reads."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    logging.disable_progress_bar()
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {str(token): token for token in range(128)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(path / "tokenizer.json"))  # noqa: S106  # a word, no secret
    return path


def served(running: Running, task: Task, steps: int, together: threading.Barrier) -> list[float]:
    """Train a new run through the service, each step at the same time as the others'; return each step's loss."""
    run = running.client.create_lora_training_client(MODEL, rank=task.rank, seed=task.number).result()
    adam = tinker.AdamParams(learning_rate=task.learning_rate, beta1=0.9, beta2=0.95, eps=EPS)
    losses = []
    for step in range(steps):
        data = datums(task.batch(step))
        together.wait(WAIT_S)
        passed, stepped = run.forward_backward(data, "cross_entropy"), run.optim_step(adam)
        losses.append(nats_a_token(passed.result().metrics))
        stepped.result()
    return losses


def alone(parts: Parts, task: Task, steps: int, *, reverse: bool = False) -> list[float]:
    """Train a new run by itself in this process; return each step's loss."""
    run = parts.run(task.number, rank=task.rank)
    adam = OptimStep(learning_rate=task.learning_rate, beta1=0.9, beta2=0.95, eps=EPS)
    losses = []
    for step in range(steps):
        rows = task.batch(step)[:: -1 if reverse else 1]
        data = tuple(
            Datum(
                tokens=tokens.int().numpy(),
                inputs={"target_tokens": targets.numpy(), "weights": np.ones(len(targets), np.float32)},
            )
            for tokens, targets in rows
        )
        message = ForwardBackward(data=data, loss_fn="cross_entropy", loss_fn_config={})
        [outcome] = parts.call([(run, message)])
        losses.append(nats_a_token(output_to_json(outcome.result)["metrics"]))
        parts.call([(run, adam)])
    return losses


def nats_a_token(metrics: Mapping[str, float]) -> float:
    """Return an operation's loss."""
    return metrics["loss:sum"] / metrics["tokens:sum"]


def train(path: Path, steps: int) -> tuple[Curves, float]:
    """Return the curves of all runs, `mixed`, `solo` and `again`, and how many runs a mixed pass had on average."""
    curves: Curves = {}
    with service({MODEL: path}) as running, timed("mixed"), ThreadPoolExecutor(len(TASKS)) as pool:
        together = threading.Barrier(len(TASKS))
        curves["mixed"] = list(pool.map(lambda task: served(running, task, steps, together), TASKS))
        runs_a_pass = shared(running.data_dir / "logs")
    parts = Parts(loading.load(path, device="cpu"), token_budget=TOKEN_BUDGET)
    for name in ("solo", "again"):
        with timed(name):
            curves[name] = [alone(parts, task, steps, reverse=name == "again") for task in TASKS]
    return curves, runs_a_pass


def shared(logs: Path) -> float:
    """Return the average number of runs in the passes that a trainer's log tells of."""
    text = "".join(path.read_text() for path in logs.glob("trainer-*.log*"))
    runs = [int(number) for number in re.findall(r"pass: (\d+) runs, \d+ operations \(forward_backward\)", text)]
    return round(sum(runs) / max(1, len(runs)), 2)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Say how long the `with` took."""
    began = time.monotonic()
    yield
    print(f"mixed_curves: {name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


def compared(curves: Curves) -> list[Found]:
    """Return what the curves come to."""
    by_run = zip(TASKS, curves["solo"], curves["mixed"], curves["again"], strict=True)
    return [
        Found(
            run=task.number, rank=task.rank, first=round(solo[0], 4), last=round(sum(solo[-20:]) / len(solo[-20:]), 4),
            gap=largest(solo, mixed), noise=largest(solo, again),
        )
        for task, solo, mixed, again in by_run
    ]  # fmt: skip


def largest(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the largest difference at a step, to three digits."""
    return float(f"{max(abs(a - b) for a, b in zip(one, other, strict=True)):.3g}")


def plot(curves: Curves, found: Sequence[Found], path: Path) -> None:
    """Draw solo and mixed of each run, and below the difference between them beside the noise."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "mixed_curves", "svg.fonttype": "none", "path.simplify_threshold": 0.5}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 4, figsize=(13, 8), height_ratios=(3, 1, 3, 1), sharex=True, layout="constrained")
    for each, solo, mixed, again in zip(found, curves["solo"], curves["mixed"], curves["again"], strict=True):
        row, column = 2 * (each.run // 4), each.run % 4
        above, below = axes[row][column], axes[row + 1][column]
        above.plot(*drawn(solo), color="#1f5fa8", linewidth=2.2, label="alone")
        above.plot(*drawn(mixed), color="#f08a24", linewidth=0.8, label="with seven others")
        above.set_title(f"run {each.run}, rank {each.rank}: gap {each.gap:.1g}", fontsize=9)
        for other, color, label in ((again, "#999999", "reordered"), (mixed, "#f08a24", "mixed")):
            apart = [max(abs(a - b), 1e-9) for a, b in zip(solo, other, strict=True)]
            below.semilogy(*drawn(apart), color=color, lw=0.7,
                           label=f"|alone - {label}|")  # fmt: skip
    axes[0][0].set_ylabel("nats a token")
    axes[0][0].legend(fontsize=7)
    axes[1][0].legend(fontsize=6)
    figure.supxlabel("step")
    figure.savefig(path, metadata={"Date": None})


def drawn(values: Sequence[float]) -> tuple[Sequence[int], Sequence[float]]:
    """Return every fourth step and its value: a plot of all would be a file four times as large."""
    return range(0, len(values), 4), values[::4]


def main() -> None:
    """Train, compare, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "experiments", help="where figures and plot go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service ends with its `with`
    with tempfile.TemporaryDirectory() as folder:
        curves, runs_a_pass = train(tiny(Path(folder) / "tiny"), args.steps)
    found = compared(curves)
    lines = [json.dumps(asdict(each)) for each in found] + [json.dumps({"runs_a_pass": runs_a_pass})]
    print("\n".join(lines))
    args.to.mkdir(parents=True, exist_ok=True)
    (args.to / "mixed_curves.jsonl").write_text("\n".join(lines) + "\n")
    plot(curves, found, args.to / "mixed_curves.svg")
    wide = [each.run for each in found if not each.gap <= MOST_GAP]
    if runs_a_pass < LEAST_SHARED:
        sys.exit(f"mixed_curves: a pass had {runs_a_pass} runs on average, which is hardly mixed; look at the load")
    if wide:
        sys.exit(f"mixed_curves: runs {wide} are over {MOST_GAP} nats a token from their solo curves")


if __name__ == "__main__":
    main()
