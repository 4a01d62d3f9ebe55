"""How fast samples are drawn by vLLM, and how fast new weights get there: random weights in the shapes of Qwen3.

    .venv-vllm/bin/python benchmarks/gpu_sampler.py                              # one GPU, under 8 minutes, no network
    .venv-vllm/bin/python benchmarks/gpu_sampler.py --shape tiny --device cpu    # the same code on next to nothing

Run it with the interpreter that has vLLM (and OpenRL). One JSON line a figure: tokens a second of 16 and of 64
sequences, of 16 that end between 4 and 256 tokens, and of 64 over 8 adapters, each against transformers' `generate` on
the same device where that is the comparison; then the hand-off of an adapter (save, publish, first token), and of full
weights of which a few percent have changed: publishing, fetching and verifying beside the model, the pause in which
vLLM's weights become the new ones, and how far its log-probabilities then are from those of transformers with the same
weights. `right` is false where they are further apart than before the change, or the change isn't seen. Last, vLLM is
put to sleep and woken up as between turns: seconds, bytes, what the device has free by it, and whether it draws alike.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.sampler import vllm_runner
from openrl.workers.sampler.adapter_places import AdapterPlaces
from openrl.workers.sampler.full_weights import Version
from openrl.workers.sampler.requests import Finished, Limits, read
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.tokenizer import tokenizer_of
from openrl.workers.sampler.versions import Versions
from openrl.workers.sampler.vllm_client import Client
from openrl.workers.sampler.vllm_engine import VllmEngine
from openrl.workers.sampler.vllm_parking import VllmParking
from openrl.workers.sampler.vllm_weights import VllmWeights
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, save_adapter
from openrl.workers.weights.publish import Publisher

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip
RANK, ADAPTERS = 32, 8
DENSITY = 0.03
"""Share of the weights that a hand-off of full weights changes."""
PROMPT, NEW = 128, 128
FULL_SLOTS = 256


def show(name: str, **figures: Any) -> None:
    """Print one figure."""
    rounded = {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in figures.items()}
    print(json.dumps({"name": name} | rounded), flush=True)


def timed(act: Callable[[], Any]) -> float:
    """Return the seconds that something takes, the device's work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    act()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


class Base:
    """What an adapter must know of a model that transformers has loaded."""

    device = torch.device("cpu")

    def __init__(self, model: PreTrainedModel) -> None:
        self.shapes = {
            name: (module.in_features, module.out_features)
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }

    def targets(self, train_attn: bool, train_mlp: bool, train_unembed: bool) -> tuple[str, ...]:
        """All of them."""
        return tuple(self.shapes)


class Turns(Accelerator):
    """One that others share, whose turns are cut by hand."""

    shared = True
    vllm: VllmParking

    def add(self, parkable: Any) -> None:
        """Keep what is to be parked."""
        self.vllm = parkable


class Measured:
    """One model, as transformers has it and as vLLM serves it."""

    def __init__(self, path: Path, model: PreTrainedModel, home: Path, settings: SamplerSettings) -> None:
        self.path, self.model, self.home, self.settings = path, model, home, settings
        self.numbers = iter(range(1 << 30))
        self.generator = torch.Generator().manual_seed(1)

    def prompts(self, count: int, length: int = PROMPT) -> torch.Tensor:
        """Return random prompts [count, length]."""
        return torch.randint(0, self.model.config.vocab_size, (count, length), generator=self.generator)

    def draw(
        self, engine: VllmEngine, limits: Limits, prompts: torch.Tensor, new: Sequence[int], dirs: Sequence[str] = ("",)
    ) -> list[Finished]:
        """Draw `new` tokens after each prompt, all asked for at once."""
        for index, prompt in enumerate(prompts.tolist()):
            message = Sample(
                adapter_dir=dirs[index % len(dirs)], prompt=tuple(prompt), num_samples=1, seed=index,
                max_tokens=new[index % len(new)], stop_at_eos=False,
            )  # fmt: skip
            name = f"r{next(self.numbers)}"
            engine.add(read(SampleJob(tenant="local", request_id=name, message=message, submitted=0.0), limits))
        ended: list[Finished] = []
        while engine.requests:
            ended += engine.step()
        failed = [one.error for one in ended if one.result is None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(ended)} requests failed: {failed[0]}")
        return ended

    def plain_s(self, prompts: torch.Tensor, new: int) -> float:
        """Return what `generate` takes for the whole batch."""
        inputs = prompts.to(self.model.device)
        options = {"do_sample": True, "min_new_tokens": new, "max_new_tokens": new, "pad_token_id": 0}
        run = lambda: self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)  # noqa: E731
        run()
        return timed(run)

    def rates(self, engine: VllmEngine, limits: Limits, versions: Sequence[str], *, plain: bool) -> None:
        """Show tokens a second of whole batches."""
        ragged = [4 + 252 * index // 15 for index in range(16)]
        for name, count, new, dirs in (
            ("sample16", 16, [NEW], ("",)),
            ("sample64", 64, [NEW], ("",)),
            ("sample_ragged", 16, ragged, ("",)),
            ("sample64_adapters8", 64, [NEW], versions),
        ):
            total = sum(new[index % len(new)] for index in range(count))
            seconds = self.batch_s(engine, limits, count, new, dirs)
            plain_s = self.plain_s(self.prompts(count), max(new)) if plain and dirs == ("",) else None
            ratio = plain_s and plain_s / seconds
            show(name, tok_s=total / seconds, generate_tok_s=plain_s and total / plain_s, ratio=ratio)

    def batch_s(self, engine: VllmEngine, limits: Limits, count: int, new: Sequence[int], dirs: Sequence[str]) -> float:
        """Return the seconds of one batch of new prompts, the median of three after one for nothing."""
        self.draw(engine, limits, self.prompts(count), [2], dirs)
        return median(timed(lambda: self.draw(engine, limits, self.prompts(count), new, dirs)) for _ in range(3))

    def save_adapter(self, name: str, seed: int) -> str:
        """Publish an adapter as a trainer does; return its directory."""
        adapter = Adapter.init(Base(self.model), rank=RANK, seed=seed)
        relative = layout.sampler_dir("local", "s-1:train:0", name, 1)
        staged = layout.staging(self.home / relative)
        save_adapter(staged, adapter, "random")
        facts = manifest.Manifest(
            kind="sampler", base_model="random", rank=RANK, alpha=32.0, targets=adapter.targets, step=1,
            train_attn=True, train_mlp=True, train_unembed=True,
        )  # fmt: skip
        manifest.write(staged, facts)
        layout.publish(staged, self.home / relative)
        return relative

    def adapters(self, *, plain: bool) -> None:
        """Measure a base model with adapters."""
        began = time.perf_counter()
        engine, limits = vllm_runner.runner(str(self.path), self.home, self.settings)
        show("start", seconds=time.perf_counter() - began)
        versions = [self.save_adapter(f"a{number}", number) for number in range(ADAPTERS)]
        self.rates(engine, limits, versions, plain=plain)
        handoffs = []
        for number in range(5):
            began = time.perf_counter()
            version = self.save_adapter(f"b{number}", 100 + number)
            self.draw(engine, limits, self.prompts(1), [1], [version])
            handoffs.append(time.perf_counter() - began)
        size = sum(path.stat().st_size for path in (self.home / version).iterdir())
        show("adapter_save_to_first_token", ms=1e3 * median(handoffs), worst_ms=1e3 * max(handoffs), bytes=size)
        engine.close()

    # Full weights

    def full(self) -> bool:
        """Hand full weights over in place; tell whether they came out right."""
        config = json.loads((self.path / "config.json").read_text())
        settings = replace(self.settings, slots=FULL_SLOTS)
        client = Client(vllm_runner.full_arguments(str(self.path), config, settings))
        engine = VllmEngine(
            client,
            Versions(str, max_idle=0),
            tokenizer_of(str(self.path)),
            num_slots=FULL_SLOTS,
            places=AdapterPlaces(1),
        )
        limits = Limits(
            vocab_size=config["vocab_size"], max_context=config["max_position_embeddings"],
            cache_tokens=client.cache_tokens, eos_token_ids=(),
        )  # fmt: skip
        weights = VllmWeights(client, self.path, self.home)
        home = layout.sampler_dir("local", "s-2:train:0", "v0", 1).rpartition("/")[0]
        (self.home / home).mkdir(parents=True)
        publisher, tensors = Publisher(self.home / home), self.host_tensors()
        gaps = [self.gap(engine, limits)]
        right = True
        for number in range(3):
            before = self.score()
            if number:
                self.change(tensors)
            publish_s = timed(lambda: publisher.publish(f"v{number}.1", tensors, step=number))  # noqa: B023
            prepared: list[Any] = []
            fetch_s = timed(lambda: prepared.append(weights.prepare(Version(f"{home}/v{number}.1"))))  # noqa: B023
            apply_s = timed(lambda: weights.apply(prepared[0]))  # noqa: B023
            token_s = timed(lambda: self.draw(engine, limits, self.prompts(1), [1]))
            gaps.append(self.gap(engine, limits))
            moved = float((self.score() - before).abs().mean())
            right &= gaps[-1] < max(1.5 * gaps[0], 1e-3) and (number == 0 or moved > 3 * gaps[-1])
            show(
                "full_handoff", version=number, publish_s=publish_s, fetch_s=fetch_s, pause_s=apply_s,
                first_token_s=token_s, mean_gap_nats=gaps[-1], gap_before_nats=gaps[0], moved_nats=moved, right=right,
            )  # fmt: skip
        show("full_save_and_load", seconds=self.whole_s())
        engine.close()
        return right

    def asleep(self) -> bool:
        """Put vLLM to sleep between two draws of the same; tell whether they are the same."""
        turns = Turns()
        engine, limits = vllm_runner.runner(str(self.path), self.home, self.settings, accelerator=turns)
        versions, prompts = ["", self.save_adapter("c0", 200)], self.prompts(16)
        right = True
        for number in range(3):
            before = self.drawn(engine, limits, prompts, versions)
            size, free = turns.vllm.resident_bytes, torch.cuda.mem_get_info()[0]
            park_s = timed(turns.vllm.park)
            freed = torch.cuda.mem_get_info()[0] - free
            restore_s = timed(turns.vllm.restore)
            after = self.drawn(engine, limits, prompts, versions)
            same = sum(one == other for one, other in zip(before, after, strict=True)) / len(before)
            right &= same > 0.99
            show("sleep", number=number, park_s=park_s, restore_s=restore_s, bytes=size, freed_bytes=freed, same=same)
        engine.close()
        return right

    def drawn(self, engine: VllmEngine, limits: Limits, prompts: torch.Tensor, versions: Sequence[str]) -> list[int]:
        """Return all tokens after some prompts, in order."""
        ended = self.draw(engine, limits, prompts, [NEW], versions)
        ended.sort(key=lambda one: int(one.request.job.request_id[1:]))
        return [token for one in ended if one.result for drawn in one.result.sequences for token in drawn.tokens]

    def host_tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights in host memory, tied ones once."""
        return {name: parameter.detach().cpu().contiguous() for name, parameter in self.model.named_parameters()}

    @torch.no_grad()
    def change(self, tensors: dict[str, torch.Tensor]) -> None:
        """Change a share of all weights by a half, on both sides alike."""
        for name, parameter in self.model.named_parameters():
            at = torch.rand(parameter.shape, device=parameter.device) < DENSITY
            parameter.mul_(torch.where(at, 1.5, 1.0).to(parameter.dtype))
            tensors[name].copy_(parameter)

    def fixed(self) -> list[int]:
        return torch.randint(0, 500, (257,), generator=torch.Generator().manual_seed(7)).tolist()

    @torch.inference_mode()
    def score(self) -> torch.Tensor:
        """Return what transformers makes of a fixed text, float32 [T]."""
        tokens = torch.tensor([self.fixed()], device=self.model.device)
        logits = self.model(input_ids=tokens[:, :-1]).logits[0].float()
        return logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0].cpu()

    def gap(self, engine: VllmEngine, limits: Limits) -> float:
        """Return how far vLLM is from that, in nats on average."""
        message = Sample(
            adapter_dir="", prompt=tuple(self.fixed()), num_samples=1, max_tokens=1, seed=1, prompt_logprobs=True
        )
        job = SampleJob(tenant="local", request_id=f"g{next(self.numbers)}", message=message, submitted=0.0)
        engine.add(read(job, limits))
        ended: list[Finished] = []
        while engine.requests:
            ended += engine.step()
        result = ended[0].result
        if result is None or result.prompt_logprobs is None:
            raise RuntimeError(ended[0].error)
        return float((torch.tensor(result.prompt_logprobs[1:]) - self.score()).abs().mean())

    def whole_s(self) -> float:
        """Return what saving the whole model and loading it again takes, as a hand-off without deltas would."""
        folder = self.home / "whole"

        def whole() -> None:
            self.model.save_pretrained(folder)
            AutoModelForCausalLM.from_pretrained(folder, dtype=self.model.dtype).to(self.model.device)

        return timed(whole)


@contextmanager
def random_model(shape: str, device: torch.device, home: Path) -> Iterator[tuple[Path, PreTrainedModel]]:
    """Write a model of random weights, and return it as transformers has it."""
    config = Qwen3Config(max_position_embeddings=4096, rope_theta=1e6, eos_token_id=None, **SHAPES[shape])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    path = home / "model"
    model.save_pretrained(path)
    yield path, model
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Measure each shape that there is time for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="*", choices=list(SHAPES), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU's memory for vLLM (%(default)s)")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin nothing after so long (%(default)s)")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for models and versions")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here; use --shape tiny --device cpu")
    deadline = time.monotonic() + 60 * args.minutes
    settings = SamplerSettings(
        engine="vllm", slots=64, max_loras=ADAPTERS, max_lora_rank=64, gpu_memory_utilization=args.memory
    )
    right = True
    for shape in args.shape:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            home = Path(folder)
            with random_model(shape, torch.device(args.device), home) as (path, model):
                measured = Measured(path, model, home, settings)
                show("shape", shape=shape, device=args.device, parameters=sum(p.numel() for p in model.parameters()))
                acts = (lambda: measured.adapters(plain=shape != "qwen3-8b"), measured.full, measured.asleep)  # noqa: B023
                for act in acts:
                    if time.monotonic() > deadline:
                        show("left_out", shape=shape, reason="no time was left")
                    elif act == measured.full and args.device == "cpu":
                        show("full_handoff", left_out="vLLM's CPU build loads changed weights wrongly: needs a GPU")
                    elif act == measured.asleep and args.device == "cpu":
                        show("sleep", left_out="vLLM's CPU build can't sleep: needs a GPU")
                    else:
                        right &= act() is not False
    os._exit(0 if right else 1)


if __name__ == "__main__":
    main()
