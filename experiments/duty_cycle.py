"""How much of a trainer's accelerator is used, dedicated and shared? `make duty-cycle` runs it.

Three jobs: RL whose environment answers after a while, RL whose environment is slower, and supervised training that
samples an evaluation now and then. They run

    dedicated   each with an accelerator for its trainer and one for its sampler: six; one job at a time, so that two
                cores don't distort it
    shared      all at once, the trainers on one accelerator and the samplers on another, in turns
    sequential  one after another on those two

through the service, with real training of small random models, one torch thread a worker. Accelerators are simulated
on the CPU: each holds the largest state, and not two. Environments only wait; for how long is set from a first look at
what a step takes, so that the dedicated trainers are used for 15.6 % of the time, as in the published case. Everything
that turns cost (waiting, parking, restoring) is in the wall clocks, and counts as not used.

The two RL jobs last equally long. The supervised job ends earlier: alone it uses two thirds of its accelerator, and one
that lasted as long as the others would by itself bring three of them above the published duty cycle. How much the
shared accelerator is used while all three run is printed beside.

Prints one JSON line a figure, writes them and a plot, and fails where curves differ or a target is missed.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tinker
import torch
from placed import Placed, placed
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from openrl.timeslice.standing import standing

ROOT = Path(__file__).resolve().parent.parent

PUBLISHED_DUTY, DUTY_BAND = 0.156, 0.01
LEAST_DUTY_RATIO, MOST_WALL_RATIO = 2.1, 0.75
SYMBOLS, LENGTH, SEQUENCES = 23, 24, 32
SETTLED_S = 3.5
"""A holder reports its use every two seconds; after so long without work all of it is known."""
ACCELERATOR_BYTES = 60 << 20
"""More than the largest state, less than two."""
LOOKED_AT, LOOK_S = 4, 1.0
"""Steps of the first look, and latency in it: after a pause a step takes longer than straight after another."""
ADAM = tinker.AdamParams(learning_rate=2e-3, beta1=0.9, beta2=0.95, eps=1e-12)
SETTINGS = {"OPENRL_SAMPLER_KV_TOKENS": "2048", "OPENRL_TRAINER_TOKEN_BUDGET": "1024"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job. `slowness`: how its environment's latency compares to that of the first; 0 means it has none."""

    name: str
    number: int
    steps: int
    slowness: float
    evaluates_every: int = 0

    @property
    def model(self) -> str:
        """Name of its base model."""
        return f"experiments/duty-{self.number}"


JOBS = (
    Job(name="rl", number=0, steps=16, slowness=1.0),
    Job(name="rl, slower environment", number=1, steps=10, slowness=1.7),
    Job(name="sft", number=2, steps=60, slowness=0.0, evaluates_every=3),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a job came to: its learning curve, and its wall clock in seconds."""

    curve: list[float]
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What an accelerator was used for, in seconds, up to a moment at which nothing ran."""

    busy_s: float = 0.0
    waited_s: float = 0.0
    waits: int = 0
    turns: int = 0
    longest_wait_s: float = 0.0
    switch_s: float = 0.0

    def since(self, before: Use) -> Use:
        """Return what came after `before`; the longest wait and the cost of a switch are of all time."""
        return replace(
            self,
            busy_s=self.busy_s - before.busy_s,
            waited_s=self.waited_s - before.waited_s,
            waits=self.waits - before.waits,
            turns=self.turns - before.turns,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One way to run the three jobs."""

    name: str
    accelerators: int
    wall_s: float
    accelerator_s: float
    jobs_s: list[float]
    trainer_busy_s: float
    trainer_duty: float
    sampler_duty: float
    switches: int
    switch_ms: float
    waits: int
    mean_wait_s: float
    longest_wait_s: float


def tiny(path: Path) -> Path:
    """Write a random Qwen3 of 3 million parameters, with a tokenizer of one word a token, which nothing here reads."""
    config = Qwen3Config(
        vocab_size=32, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, dtype="float32",
    )  # fmt: skip
    logging.disable_progress_bar()
    Qwen3ForCausalLM(config).save_pretrained(path)
    words = {str(token): token for token in range(32)}
    Tokenizer(WordLevel(words, unk_token="0")).save(str(path / "tokenizer.json"))  # noqa: S106  # a word, no secret
    return path


# What the jobs do


def follows(job: Job, symbol: int) -> int:
    """Return the symbol that is right after another one."""
    return ((2 + 3 * job.number) * symbol + 5) % SYMBOLS


class Playing:
    """A job on a service."""

    def __init__(self, service: Placed, job: Job) -> None:
        self._job = job
        self._client = service.client()
        self._latency_s = 0.0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Make a new run from the job's seed."""
        self._run = self._client.create_lora_training_client(self._job.model, rank=16, seed=self._job.number).result()

    def warm_up(self) -> None:
        """Let the sampler load, too."""
        self._sample(0, temperature=0.0)

    def play(self, latency_s: float, *, steps: int | None = None) -> Ran:
        """Take all steps, or fewer."""
        self._latency_s = latency_s * self._job.slowness
        began, curve = time.monotonic(), []
        for step in range(steps or self._job.steps):
            curve.append(self._learn(step) if self._job.slowness else self._imitate(step))
        return Ran(curve=curve, wall_s=time.monotonic() - began)

    def _learn(self, step: int) -> float:
        """Sample, let the environment judge, take a step; return the share of symbols that were right."""
        prompt, drawn = self._sample(step, temperature=1.0)
        rewards = [self._rewards(prompt, one.tokens) for one in drawn]
        time.sleep(self._latency_s)
        mean = sum(map(sum, rewards)) / (SEQUENCES * LENGTH)
        data = [
            _datum(prompt, one.tokens, logprobs=one.logprobs, advantages=[reward - mean for reward in of_one])
            for one, of_one in zip(drawn, rewards, strict=True)
        ]
        self._step(data, "importance_sampling")
        return mean

    def _imitate(self, step: int) -> float:
        """Take a step on given sequences; return its loss in nats a token."""
        draw = torch.Generator().manual_seed(1000 * step + self._job.number)
        data = []
        for first in torch.randint(SYMBOLS, (SEQUENCES,), generator=draw).tolist():
            symbols = [first]
            while len(symbols) <= LENGTH:
                symbols.append(follows(self._job, symbols[-1]))
            data.append(_datum(symbols[:1], symbols[1:], weights=[1.0] * LENGTH))
        metrics = self._step(data, "cross_entropy")
        if (step + 1) % self._job.evaluates_every == 0:
            self._sample(step, temperature=0.0)
        return metrics["loss:sum"] / metrics["tokens:sum"]

    def _sample(self, step: int, *, temperature: float) -> tuple[list[int], Sequence[tinker.SampledSequence]]:
        """Draw from the weights as they are; all sequences in one request, so that they share every batch."""
        sampler = self._run.save_weights_and_get_sampling_client().result()
        prompt = [step % SYMBOLS]
        how = tinker.SamplingParams(max_tokens=LENGTH, temperature=temperature, seed=step)
        return prompt, sampler.sample(tinker.ModelInput.from_ints(prompt), SEQUENCES, how).result().sequences

    def _rewards(self, prompt: Sequence[int], drawn: Sequence[int]) -> list[float]:
        before = [*prompt, *drawn][: len(drawn)]
        return [float(symbol == follows(self._job, last)) for last, symbol in zip(before, drawn, strict=True)]

    def _step(self, data: list[tinker.Datum], loss: str) -> Mapping[str, float]:
        passed, stepped = self._run.forward_backward(data, loss), self._run.optim_step(ADAM)
        metrics: Mapping[str, float] = passed.result().metrics
        stepped.result()
        return metrics


def _datum(prompt: Sequence[int], drawn: Sequence[int], **inputs: Sequence[float] | None) -> tinker.Datum:
    """Return one sequence; of the inputs of its loss, those before the first drawn token are zeros."""
    tokens, zeros = [*prompt, *drawn], [0.0] * (len(prompt) - 1)
    padded = {name: [*zeros, *values] for name, values in inputs.items() if values is not None}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **padded}
    )


# Where they run


def used(service: Placed, *names: str) -> list[Use]:
    """Return what each of these accelerators was used for up to now; nothing may run meanwhile."""
    time.sleep(SETTLED_S)
    return [_used(service, name) for name in names]


def _used(service: Placed, name: str) -> Use:
    found = standing(service.turns, name)
    total, present = service.store.redis.hmget(f"openrl:accelerator:{name}", ["busy_total", "busy"])
    return Use(
        busy_s=(float(total or 0) + float(present or 0)) / 1e6,
        waited_s=sum(owner.waited_s for owner in found.owners),
        waits=sum(owner.waits for owner in found.owners),
        turns=found.turns,
        longest_wait_s=max((owner.longest_wait_s for owner in found.owners), default=0.0),
        switch_s=sum(owner.switch_s for owner in found.owners) / max(1, len(found.owners)),
    )


def forget_waits(service: Placed) -> None:
    """Let the longest wait count from now on."""
    for key in service.store.redis.scan_iter(match="openrl:accelerator:*:owner:*"):
        service.store.redis.hdel(key, "longest")


def place(service: Placed, job: Job, trainers: str, samplers: str) -> None:
    """Start a job's workers."""
    service.start("trainer", job.model, accelerator=trainers)
    service.start("sampler", job.model, accelerator=samplers)


def phase(name: str, runs: Sequence[Ran], wall_s: float, trainers: Use, samplers: Use, *, accelerators: int) -> Phase:
    """Return the figures of a phase. An accelerator counts for as long as somebody has it."""
    total_s = sum(run.wall_s for run in runs) if accelerators > 2 else wall_s
    waits = trainers.waits + samplers.waits
    return Phase(
        name=name,
        accelerators=accelerators,
        wall_s=round(wall_s, 2),
        accelerator_s=round(2 * total_s, 2),
        jobs_s=[round(run.wall_s, 2) for run in runs],
        trainer_busy_s=round(trainers.busy_s, 2),
        trainer_duty=round(trainers.busy_s / total_s, 4),
        sampler_duty=round(samplers.busy_s / total_s, 4),
        switches=trainers.turns + samplers.turns,
        switch_ms=round(1e3 * (trainers.switch_s + samplers.switch_s) / 2, 2),
        waits=waits,
        mean_wait_s=round((trainers.waited_s + samplers.waited_s) / max(1, waits), 3),
        longest_wait_s=round(max(trainers.longest_wait_s, samplers.longest_wait_s), 2),
    )


class Experiment:
    """The service with the workers of each phase."""

    def __init__(self, service: Placed, jobs: Sequence[Job]) -> None:
        self._service = service
        self._jobs = jobs

    def alone(self, latency_s: float | None) -> tuple[Phase, list[Ran], float]:
        """Run each job on two accelerators of its own; return the latency too, looked for where none is given."""
        for job in self._jobs:
            place(self._service, job, f"train-{job.number}", f"sample-{job.number}")
        playing = [Playing(self._service, job) for job in self._jobs]
        latency_s = latency_s or self._latency(playing)
        found, runs = self._each_alone(playing, latency_s)
        if abs(found.trainer_duty - PUBLISHED_DUTY) > DUTY_BAND:
            say(f"with {latency_s:.2f} s the duty cycle is {found.trainer_duty}; once more")
            missing_s = (found.trainer_duty / PUBLISHED_DUTY - 1) * sum(run.wall_s for run in runs)
            latency_s = max(0.05, latency_s + missing_s / self._weight)
            found, runs = self._each_alone(playing, latency_s)
        self._stop()
        return found, runs, latency_s

    @property
    def _weight(self) -> float:
        """Return how many latencies of the first environment are waited for in all."""
        return sum(job.slowness * job.steps for job in self._jobs)

    def _each_alone(self, playing: Sequence[Playing], latency_s: float) -> tuple[Phase, list[Ran]]:
        runs, trainers, samplers = [], Use(), Use()
        for job, first in zip(self._jobs, playing, strict=True):
            names = [f"train-{job.number}", f"sample-{job.number}"]
            first.begin_anew()
            before = used(self._service, *names)
            runs.append(first.play(latency_s))
            after = used(self._service, *names)
            trainers = _sum(trainers, after[0].since(before[0]))
            samplers = _sum(samplers, after[1].since(before[1]))
        wall_s = max(run.wall_s for run in runs)
        return phase("dedicated", runs, wall_s, trainers, samplers, accelerators=2 * len(self._jobs)), runs

    def _latency(self, playing: Sequence[Playing]) -> float:
        """Return the latency of the first environment that makes the dedicated duty cycle the published one.

        Each job takes a few steps: that says how long a step takes, and how much of it the trainer.
        """
        busy_s = wall_s = 0.0
        for job, first in zip(self._jobs, playing, strict=True):
            first.play(0.0, steps=2)
            [before] = used(self._service, f"train-{job.number}")
            step_s = first.play(LOOK_S, steps=LOOKED_AT).wall_s / LOOKED_AT - LOOK_S * job.slowness
            [after] = used(self._service, f"train-{job.number}")
            busy_s += after.since(before).busy_s * job.steps / LOOKED_AT
            wall_s += step_s * job.steps
            trainer_s = after.since(before).busy_s / LOOKED_AT
            say(f"{job.name}: a step takes {step_s:.2f} s, {trainer_s:.2f} of it the trainer")
        return max(0.05, (busy_s / PUBLISHED_DUTY - wall_s) / self._weight)

    def on_two(self, latency_s: float) -> tuple[list[Phase], list[list[Ran]], float]:
        """Run all jobs at once on two accelerators, then one after another.

        Return the trainers' duty cycle while all of them ran at once, too.
        """
        for job in self._jobs:
            place(self._service, job, "train", "sample")
        phases, curves, together = [], [], 0.0
        playing = [Playing(self._service, job) for job in self._jobs]
        for name, at_once in (("shared", len(self._jobs)), ("sequential", 1)):
            for one in playing:
                one.begin_anew()
                one.warm_up()
            before = used(self._service, "train", "sample")
            forget_waits(self._service)
            began = time.monotonic()
            with ThreadPoolExecutor(at_once) as pool:
                running = [pool.submit(one.play, latency_s) for one in playing]
                if at_once > 1:
                    wait(running, return_when=FIRST_COMPLETED)
                    # Turns are short here: what the present one adds is little.
                    so_far = _used(self._service, "train").since(before[0])
                    together = round(so_far.busy_s / (time.monotonic() - began), 4)
                runs = [one.result() for one in running]
            wall_s = time.monotonic() - began
            uses = [now.since(then) for now, then in zip(used(self._service, "train", "sample"), before, strict=True)]
            phases.append(phase(name, runs, wall_s, *uses, accelerators=2))
            say(str(phases[-1]))
            curves.append(runs)
        self._stop()
        return phases, curves, together

    def _stop(self) -> None:
        for name in list(self._service.workers):
            self._service.stop(name)


def _sum(one: Use, other: Use) -> Use:
    fields = {name: value + asdict(other)[name] for name, value in asdict(one).items()}
    return Use(**{**fields, "longest_wait_s": max(one.longest_wait_s, other.longest_wait_s)})


def plot(phases: Sequence[Phase], curves: Mapping[str, list[Ran]], jobs: Sequence[Job], path: Path) -> None:
    """Draw duty cycles, wall clocks, and the curves laid over each other."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "duty_cycle"
    mpl.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2 + len(jobs), figsize=(14, 3), layout="constrained")
    names = [one.name for one in phases]
    colors = ("#999999", "#f08a24", "#1f5fa8")
    axes[0].bar(names, [100 * one.trainer_duty for one in phases], color=colors)
    axes[0].set_title("trainer duty cycle, %", fontsize=9)
    axes[1].bar(names, [one.accelerator_s / 60 for one in phases], color=colors)
    axes[1].set_title("accelerator minutes", fontsize=9)
    for number, job in enumerate(jobs):
        for name, color, width in zip(names, colors, (5.0, 2.5, 0.8), strict=True):
            axes[2 + number].plot(curves[name][number].curve, color=color, linewidth=width, label=name)
        axes[2 + number].set_title(f"{job.name}: {'share right' if job.slowness else 'nats a token'}", fontsize=9)
    axes[2].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def figures(
    phases: Sequence[Phase], curves: Mapping[str, list[Ran]], latency_s: float, together: float
) -> list[dict[str, object]]:
    """Return every figure, one row each."""
    dedicated, shared, sequential = phases
    same = {
        name: all(one.curve == other.curve for one, other in zip(curves["dedicated"], curves[name], strict=True))
        for name in ("shared", "sequential")
    }
    ratios = {
        "duty_ratio": round(shared.trainer_duty / dedicated.trainer_duty, 3),
        "wall_ratio": round(shared.wall_s / sequential.wall_s, 3),
        "accelerator_ratio": round(shared.accelerator_s / dedicated.accelerator_s, 3),
    }
    rows: list[dict[str, object]] = [{"figure": "phase", **asdict(one)} for one in phases]
    rows.append({"figure": "latency", "seconds": round(latency_s, 3)})
    rows.append({"figure": "shared_while_all_run", "trainer_duty": together})
    rows.append({"figure": "curves", "identical": all(same.values()), **same})
    rows.append({"figure": "ratios", **ratios})
    return rows


def misses(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return what isn't as it should be."""
    by_name = {str(row["figure"]): row for row in rows if row["figure"] != "phase"}
    duty = next(row["trainer_duty"] for row in rows if row.get("name") == "dedicated")
    ratios, found = by_name["ratios"], []
    if not by_name["curves"]["identical"]:
        found.append("curves differ between phases")
    if abs(float(str(duty)) - PUBLISHED_DUTY) > DUTY_BAND:
        found.append(f"the dedicated duty cycle is {duty}, not {PUBLISHED_DUTY} +- {DUTY_BAND}")
    if float(str(ratios["duty_ratio"])) < LEAST_DUTY_RATIO:
        found.append(f"duty_ratio is {ratios['duty_ratio']}, less than {LEAST_DUTY_RATIO}")
    if float(str(ratios["wall_ratio"])) > MOST_WALL_RATIO:
        found.append(f"wall_ratio is {ratios['wall_ratio']}, more than {MOST_WALL_RATIO}")
    return found


def main() -> None:
    """Run the phases, print, keep, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the steps of every job (%(default)s)")
    parser.add_argument("--latency", type=float, help="seconds, in place of a first look")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "experiments", help="where figures and plot go")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service ends with its `with`
    torch.set_num_threads(1)
    torch.manual_seed(0)
    jobs = [replace(job, steps=max(2, round(args.scale * job.steps))) for job in JOBS]
    with tempfile.TemporaryDirectory() as folder:
        models = {job.model: tiny(Path(folder) / f"model-{job.number}") for job in jobs}
        with placed(models, Path(folder) / "data", accelerator_bytes=ACCELERATOR_BYTES, settings=SETTINGS) as service:
            experiment = Experiment(service, jobs)
            alone, alone_runs, latency_s = experiment.alone(args.latency)
            say(f"latency {latency_s:.2f} s; {alone}")
            on_two, curves, together = experiment.on_two(latency_s)
    phases = [alone, *on_two]
    by_name = dict(zip(("dedicated", "shared", "sequential"), [alone_runs, *curves], strict=True))
    rows = figures(phases, by_name, latency_s, together)
    lines = [json.dumps(row) for row in rows]
    print("\n".join(lines))
    args.to.mkdir(parents=True, exist_ok=True)
    (args.to / "duty_cycle.jsonl").write_text("\n".join(lines) + "\n")
    plot(phases, by_name, jobs, args.to / "duty_cycle.svg")
    if found := misses(rows):
        sys.exit("duty_cycle: " + "; ".join(found))


def say(text: str) -> None:
    """Tell how far it has come."""
    print(f"duty_cycle: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
