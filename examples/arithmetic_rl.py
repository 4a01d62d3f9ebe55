"""Teach a model to add by reinforcement learning: it samples answers, a rule rewards them, good ones become likelier.

Plain Tinker SDK code. Nothing here knows which service answers at TINKER_BASE_URL.
"""

import argparse
import json
import os
import random
import re
from pathlib import Path
from statistics import fmean

import tinker
from matplotlib import pyplot
from rich.progress import Progress

PARAMS = tinker.SamplingParams(max_tokens=6, temperature=1.0, stop=["\n"])


def reward(text: str, stopped: bool, answer: int) -> float:
    """Return 1 for the right number alone on its line, less for a near one, 0 for anything else."""
    match = re.fullmatch(r"\s*(\d{1,3})\s*", text)
    if not (match and stopped):
        return 0.0
    error = abs(int(match.group(1)) - answer)
    return 1.0 if error == 0 else 0.1 + 0.5 * max(0.0, 1 - error / 10)


def datum(prompt: list[int], sequence: tinker.SampledSequence, advantage: float) -> tinker.Datum:
    """Return one sampled answer as training data; the prompt's positions have advantage 0."""
    tokens = prompt + sequence.tokens
    padding = [0.0] * (len(prompt) - 1)
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": padding + sequence.logprobs,
            "advantages": padding + [advantage] * len(sequence.tokens),
        },
    )


def rollouts(sampler, tokenizer, problems: list[tuple[int, int]], group: int) -> tuple[list[tinker.Datum], list[float]]:
    """Sample `group` answers to every problem, all at once; an answer's advantage is its reward over its group's."""
    prompts = [tokenizer.encode(f"{a} + {b} =", add_special_tokens=False) for a, b in problems]
    futures = [sampler.sample(tinker.ModelInput.from_ints(prompt), group, PARAMS) for prompt in prompts]
    data, rewards = [], []
    for (a, b), prompt, future in zip(problems, prompts, futures, strict=True):
        sequences = future.result().sequences
        texts = [tokenizer.decode(sequence.tokens, skip_special_tokens=True) for sequence in sequences]
        scores = [reward(t, s.stop_reason == "stop", a + b) for t, s in zip(texts, sequences, strict=True)]
        rewards += scores
        baseline = fmean(scores)
        data += [datum(prompt, s, r - baseline) for s, r in zip(sequences, scores, strict=True) if r != baseline]
    return data, rewards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=8, help="problems a step")
    parser.add_argument("--group", type=int, default=8, help="answers sampled for each problem")
    parser.add_argument("--loss", choices=("importance_sampling", "ppo"), default="importance_sampling")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the curve and its figures")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    pyplot.switch_backend("Agg")  # there may be no display
    rng = random.Random(1)

    with (
        tinker.ServiceClient(base_url=args.base_url, api_key=os.environ.get("TINKER_API_KEY", "tml-local")) as service,
        Progress() as progress,
    ):
        client = service.create_lora_training_client(base_model=args.model, rank=args.rank, seed=1).result()
        tokenizer = client.get_tokenizer()
        sampler = client.save_weights_and_get_sampling_client().result()
        bar, means, exact = progress.add_task("sampling", total=args.steps), [], []
        for step in range(args.steps):
            problems = [(rng.randint(2, 15), rng.randint(2, 15)) for _ in range(args.problems)]
            data, rewards = rollouts(sampler, tokenizer, problems, args.group)
            if data:  # the update and the next sampler are submitted before any result is read
                forward_backward = client.forward_backward(data, args.loss)
                update = client.optim_step(tinker.AdamParams(learning_rate=args.learning_rate))
                following = client.save_weights_and_get_sampling_client() if step + 1 < args.steps else None
                forward_backward.result()
                update.result()
                sampler = following.result() if following else sampler
            means.append(fmean(rewards))
            exact.append(fmean(r == 1.0 for r in rewards))
            progress.update(bar, advance=1, description=f"mean reward {means[-1]:.3f}, right {exact[-1]:.0%}")

    figures = {"reward": means, "exact": exact}
    (args.out / "arithmetic_rl.json").write_text(json.dumps(figures, indent=2))
    pyplot.plot(means, label="mean reward")
    pyplot.plot(exact, label="share of right answers")
    pyplot.gca().set(title="Addition", xlabel="step", ylim=(0, 1))
    pyplot.legend()
    pyplot.savefig(args.out / "arithmetic_rl.png", dpi=120)
    print(f"mean reward: {fmean(means[:3]):.3f} (first 3 steps) -> {fmean(means[-3:]):.3f} (last 3 steps)")
    print(f"right answers: {fmean(exact[:3]):.0%} -> {fmean(exact[-3:]):.0%}; curve: {args.out / 'arithmetic_rl.png'}")


if __name__ == "__main__":
    main()
