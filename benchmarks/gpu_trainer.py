"""How fast the trainer's device code is on an accelerator: random weights in the shape of Qwen3-0.6B and 8B.

    python benchmarks/gpu_trainer.py                              # on one GPU, some minutes; nothing is fetched
    python benchmarks/gpu_trainer.py --shape tiny --device cpu    # the same code on next to nothing

One JSON line a figure: tokens a second of `forward_backward` and step, the share of the chip's matrix peak that is, and
the peak memory; for one run alone, for the same tokens as 8 runs of ranks 1 to 64 in one pass (`ratio` is to the run
alone), the adapters' products grouped and one after another, for 8 small operations together and one after another,
with layers computed again, and for runs that move to host memory and back. docs/performance.md says what each is.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import Qwen3Config

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import OperationFailed, Parts, batch, random_model

from openrl.workers.model import grouped
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.trainer.residency import Residency

RANKS = (1, 2, 4, 8, 16, 32, 64, 64)
SOLO_RANK = 32

PEAK_TFLOPS = {
    "B200": 2250.0, "H200": 989.0, "H100": 989.0, "A100": 312.0, "L40S": 362.0, "L4": 121.0, "A10": 125.0,
}  # fmt: skip
"""Dense bfloat16 by the vendor's data sheets, by a part of the device's name; the first that fits counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's sizes, and how much of it is measured."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocab: int = 151_936
    tied: bool = True
    token_budget: int = 16_384
    sequences: int = 64
    length: int = 1_024
    small_length: int = 64
    repeats: int = 5

    def config(self) -> Qwen3Config:
        """Return it as transformers reads it."""
        return Qwen3Config(
            vocab_size=self.vocab, hidden_size=self.hidden, intermediate_size=self.inner, head_dim=self.head_dim,
            num_hidden_layers=self.layers, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads,
            max_position_embeddings=40_960, tie_word_embeddings=self.tied, rope_theta=1e6,
        )  # fmt: skip


SHAPES = {
    "qwen3-0.6b": Shape(hidden=1024, inner=3072, layers=28, heads=16, kv_heads=8),
    "qwen3-8b": Shape(
        hidden=4096, inner=12_288, layers=36, heads=32, kv_heads=8, tied=False, sequences=32, repeats=3
    ),
    "tiny": Shape(
        hidden=64, inner=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=512, token_budget=128, sequences=8,
        length=16, small_length=4, repeats=1,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One figure. `ratio` compares it with what its name says; what wasn't measured is null."""

    shape: str
    device: str
    name: str
    tokens: int
    seconds: float
    tok_s: float | None
    share_of_peak: float | None
    peak_bytes: int | None
    ratio: float | None
    adapters: str
    """How the products of several runs' adapters were computed: `grouped` or `loop`."""


class Measured:
    """One shape on one device."""

    def __init__(self, name: str, shape: Shape, device: torch.device, peak_flops: float) -> None:
        self._name, self._shape, self._device, self._peak_flops = name, shape, device, peak_flops
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._loaded = random_model(shape.config(), device, dtype)

    def lines(self, keep_on: Callable[[], bool]) -> None:
        """Measure and print, as long as there is time."""
        shape = self._shape
        whole = batch(shape.sequences, shape.length, vocab=shape.vocab)
        eighth = batch(shape.sequences // 8, shape.length, vocab=shape.vocab)
        tokens = shape.sequences * shape.length
        parts = self._parts()
        alone, runs = parts.run(0, rank=SOLO_RANK), [parts.run(1 + n, rank=rank) for n, rank in enumerate(RANKS)]
        solo = self._line("solo", lambda: parts.step([(alone, whole)]), tokens)

        def mixed() -> None:
            parts.step([(run, eighth) for run in runs])

        for name, way in (("mixed8", "auto"), ("mixed8_grouped", "on"), ("mixed8_loop", "off")):
            grouped.choose(way)
            self._line(name, mixed, tokens, against=solo)
        grouped.choose("auto")
        if not keep_on():
            return
        few = batch(4, shape.small_length, vocab=shape.vocab)
        tokens = 8 * 4 * shape.small_length

        def in_turn() -> None:
            for run in runs:
                parts.step([(run, few)])

        apart = self._line("small8_in_turn", in_turn, tokens)
        self._line("small8_mixed", lambda: parts.step([(run, few) for run in runs]), tokens, against=apart)
        if keep_on():
            again = self._parts(recomputing=Recomputing(self._loaded, "on"))
            alone = again.run(0, rank=SOLO_RANK)
            tokens = shape.sequences * shape.length
            self._line("solo_checkpointed", lambda: again.step([(alone, whole)]), tokens, against=solo)
        if keep_on():
            self._moves()

    def _moves(self) -> None:
        """Two runs that take the only place in turns: each call parks one and restores the other."""
        parts = self._parts(residency=Residency(self._device, most_runs=1))
        pair = [parts.run(n, rank=SOLO_RANK) for n in range(2)]
        few = batch(1, self._shape.small_length, vocab=self._shape.vocab)
        for run in pair:
            parts.step([(run, few)])
        bytes_moved = 2 * sum(run.size_bytes for run in pair)

        def swap() -> None:
            for run in pair:
                parts.residency.admit([run])

        seconds = self._timed(swap)
        self._print("park_and_restore", 0, seconds, peak_bytes=bytes_moved)

    def _parts(self, **options: object) -> Parts:
        options = {"residency": Residency(self._device), **options}
        return Parts(self._loaded, token_budget=self._shape.token_budget, **options)

    def _line(self, name: str, call: Callable[[], None], tokens: int, *, against: float | None = None) -> float:
        """Measure and print; return tokens a second."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        seconds = self._timed(call)
        peak_bytes = torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else None
        self._print(name, tokens, seconds, peak_bytes=peak_bytes, against=against)
        return tokens / seconds

    def _print(
        self, name: str, tokens: int, seconds: float, *, peak_bytes: int | None, against: float | None = None
    ) -> None:
        speed = tokens / seconds
        length = self._shape.small_length if name.startswith("small") else self._shape.length
        share = speed * flops_per_token(self._loaded, self._shape, length) / self._peak_flops
        line = Line(
            shape=self._name, device=device_name(self._device), name=name, tokens=tokens, seconds=round(seconds, 5),
            tok_s=round(speed, 1) if tokens else None, share_of_peak=round(share, 4) if tokens else None,
            peak_bytes=peak_bytes, ratio=None if against is None else round(speed / against, 3),
            adapters=self._adapters(),
        )  # fmt: skip
        print(json.dumps(asdict(line)), flush=True)

    def _adapters(self) -> str:
        hidden, dtype = self._shape.hidden, self._loaded.dtype
        asked = grouped.serves(torch.empty(1, hidden, device=self._device, dtype=dtype), hidden, len(RANKS))
        return "grouped" if asked else "loop"

    def _timed(self, call: Callable[[], None]) -> float:
        """Return the median seconds of a call, after one that isn't counted."""
        seconds = []
        for _ in range(1 + self._shape.repeats):
            synchronize(self._device)
            began = time.perf_counter()
            call()
            synchronize(self._device)
            seconds.append(time.perf_counter() - began)
        return median(seconds[1:])


def flops_per_token(loaded: LoadedModel, shape: Shape, length: int) -> float:
    """Return what a token's forward and backward must multiply and add, adapters and what is computed twice left out.

    The base is frozen: a backward is as much as a forward. Causal attention: half of the scores, twice that backward.
    """
    linears = 2.0 * sum(inputs * outputs for inputs, outputs in loaded.shapes.values())
    scores = 4.0 * shape.layers * shape.heads * shape.head_dim * length / 2
    return 2 * linears + 3 * scores


def matmul_flops(device: torch.device, size: int) -> float:
    """Return what a large product reaches, in operations a second."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        left @ right
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return float(2 * size**3 / median(seconds[1:]))


def synchronize(device: torch.device) -> None:
    """Wait for what a GPU was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_name(device: torch.device) -> str:
    """Return what the chip calls itself."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak(device: torch.device) -> float:
    """Print the matrix peak, by data sheet and as measured, and return the one that shares are of."""
    name = device_name(device)
    reached = matmul_flops(device, 8192 if device.type == "cuda" else 256)
    known = next((1e12 * tflops for part, tflops in PEAK_TFLOPS.items() if part in name), None)
    line = {"device": name, "torch": torch.__version__, "matmul_tflops": round(reached / 1e12, 3)}
    print(json.dumps(line | {"data_sheet_tflops": known and known / 1e12}), flush=True)
    return known or reached


def main() -> None:
    """Measure each shape that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing after so long (%(default)s)")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --shape tiny --device cpu")
    deadline = time.monotonic() + 60 * args.minutes
    peak_flops = peak(device)
    for name in args.shape:
        if time.monotonic() > deadline:
            print(json.dumps({"shape": name, "left_out": "no time was left for it"}))
            continue
        try:
            Measured(name, SHAPES[name], device, peak_flops).lines(lambda: time.monotonic() < deadline)
        except (OperationFailed, torch.OutOfMemoryError) as error:
            print(json.dumps({"shape": name, "left_out": str(error)}))


if __name__ == "__main__":
    main()
